"""Keeps groups of rollouts in flight through every weight update, and hands out the finished."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from examples.async_grpo.replicas import RunError
from examples.async_grpo.samples import Group
from examples.async_grpo.staleness import Admission
from examples.async_grpo.task import ANSWER_LENGTH, END, Prompt
from rollout_client import RolloutClient

SAMPLING: dict[str, Any] = {
    "temperature": 1.0, "max_tokens": ANSWER_LENGTH, "stop_token_ids": [END],
}  # fmt: skip
ROLLOUT_S = 120.0
BATCH_S = 300.0


@dataclass
class Account:
    """What became of all that was begun."""

    begun: int = 0
    """Rollouts, as everywhere here."""
    finished: int = 0
    tokens: int = 0
    resumed: int = 0
    """Were cut at least once and continued from their partial."""
    mixed: int = 0
    """Hold tokens of more than one version."""
    dropped: int = 0
    """Finished, but too old to be trained on."""


class RolloutStream:
    """Generates groups without end, as far as ``Admission`` lets it.

    Args:
        client: For the replicas.
        prompts: One for each group.
        admission: Bounds staleness.
        group_size: Rollouts of one prompt.
        in_flight: Groups at once.
    """

    def __init__(
        self,
        client: RolloutClient,
        prompts: Iterator[Prompt],
        *,
        admission: Admission,
        group_size: int,
        in_flight: int,
    ) -> None:
        self.account = Account()
        self._client, self._prompts, self._admission = client, prompts, admission
        self._group_size, self._in_flight = group_size, in_flight
        self._trained = 0
        self._closed = False
        self._ready: deque[Group] = deque()
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Generate until ``close``, then return when what is in flight has finished.

        Raises:
            ExceptionGroup: of what the client raised: no rollout may be lost silently.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(self._in_flight):
                group.create_task(self._worker())

    async def advance(self, trained: int) -> None:
        """The trainer works on this step now: there may be room for more groups."""
        async with self._changed:
            self._trained = trained
            self._changed.notify_all()

    async def close(self) -> None:
        """Begin no more groups."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take(self, count: int) -> list[Group]:
        """Wait for this many groups that are not too old, in the order in which they finished.

        Raises:
            RunError: there are not so many after ``BATCH_S``.
        """
        try:
            async with asyncio.timeout(BATCH_S), self._changed:
                while True:
                    self._drop_old()
                    if len(self._ready) >= count:
                        return [self._ready.popleft() for _ in range(count)]
                    await self._changed.wait()
        except TimeoutError:
            raise RunError(
                f"{len(self._ready)} of {count} groups finished in {BATCH_S:g} s: {self.account}"
            ) from None

    def _drop_old(self) -> None:
        bound = self._admission.max_staleness
        fresh = [g for g in self._ready if g.staleness(trained=self._trained) <= bound]
        dropped = len(self._ready) - len(fresh)
        if dropped:
            self._ready = deque(fresh)
            self._admission.dropped += dropped
            self.account.dropped += dropped * self._group_size
            self._changed.notify_all()

    async def _worker(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._closed or self._may_begin())
                if self._closed:
                    return
                self._admission.begun += 1
                prompt = next(self._prompts)
            self.account.begun += self._group_size
            rollouts = await self._client.generate_group(
                prompt, SAMPLING, self._group_size, deadline_s=ROLLOUT_S
            )
            group = Group(prompt, tuple(rollouts))
            self._count(group)
            async with self._changed:
                self._ready.append(group)
                self._changed.notify_all()

    def _may_begin(self) -> bool:
        return self._admission.may_begin(trained=self._trained)

    def _count(self, group: Group) -> None:
        account = self.account
        account.finished += len(group.rollouts)
        account.tokens += group.tokens
        account.resumed += sum(r.attempts > 1 for r in group.rollouts)
        account.mixed += sum(len(r.weight_versions) > 1 for r in group.rollouts)

"""The demo's callers: rollouts through the client, and an account of all that they got."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import httpx

from rollout_client import Rollout, RolloutClient

CALLERS = 16
PROMPT_LENGTH = 24


class CountingTransport(httpx.AsyncHTTPTransport):
    """Counts every answer by its status, and connections that broke."""

    def __init__(self) -> None:
        super().__init__(limits=httpx.Limits(max_connections=256, max_keepalive_connections=256))
        self.answers: Counter[str] = Counter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it and count what comes."""
        try:
            response = await super().handle_async_request(request)
        except httpx.TransportError as error:
            self.answers[type(error).__name__] += 1
            raise
        self.answers[str(response.status_code)] += 1
        return response


@dataclass
class Batch:
    """One rollout a caller."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    partials: list[tuple[float, int, Rollout]] = field(default_factory=list)
    """When a caller got a partial (``time.perf_counter()``), which caller, and the partial."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """The finished ones, by caller."""

    @property
    def tokens(self) -> int:
        """All tokens that the callers of finished rollouts hold."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts.values())


class Callers:
    """16 callers of one replica. All rollouts are greedy, so that they can be checked."""

    def __init__(self, endpoint: str, *, vocabulary: int, seed: int = 7) -> None:
        self.transport = CountingTransport()
        self._client = RolloutClient(endpoint, transport=self.transport)
        self._random = Random(seed)
        self._vocabulary = vocabulary
        self._changed = asyncio.Condition()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def batch(self, max_tokens: int) -> Batch:
        """New prompts for one rollout a caller."""
        prompts = [
            [self._random.randrange(3, self._vocabulary) for _ in range(PROMPT_LENGTH)]
            for _ in range(CALLERS)
        ]
        return Batch(prompts, max_tokens)

    async def run(self, batch: Batch, *, deadline_s: float = 180.0) -> None:
        """Generate the whole batch, however often it is cut.

        Raises:
            ExceptionGroup: of what the rollouts raised.
        """
        batch.started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for caller in range(len(batch.prompts)):
                group.create_task(self._call(batch, caller, deadline_s))
        batch.ended = time.perf_counter()

    async def until(self, done: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait for a condition on what the callers hold; False when the time is over before."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(done)
        except TimeoutError:
            return False
        return True

    async def _call(self, batch: Batch, caller: int, deadline_s: float) -> None:
        def keep(partial: Rollout) -> None:
            batch.partials.append((time.perf_counter(), caller, partial))
            news.create_task(self._notify())

        async with asyncio.TaskGroup() as news:
            batch.rollouts[caller] = await self._client.generate(
                batch.prompts[caller],
                {"temperature": 0, "max_tokens": batch.max_tokens, "ignore_eos": True},
                deadline_s=deadline_s,
                on_partial=keep,
            )
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

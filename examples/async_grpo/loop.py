"""The training loop. Asynchronous and synchronous runs differ in two lines, marked below."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from examples.async_grpo.record import Evaluation, Record, Row
from examples.async_grpo.replicas import Published, Replicas, RunError
from examples.async_grpo.rollouts import SAMPLING, RolloutStream
from examples.async_grpo.samples import Group
from examples.async_grpo.task import Prompt, is_exact, reward_of
from examples.async_grpo.trainer import Trained, Trainer
from rollout_client import Rollout, RolloutClient

OnRow = Callable[[Row], None]


@dataclass(frozen=True)
class Limits:
    """When a run ends."""

    steps: int
    seconds: float
    stop_at: float
    """Smoothed reward of the training batches at which there is nothing left to learn."""


class Loop:
    """One run.

    Args:
        trainer: Makes the steps.
        replicas: Get the weights.
        stream: Brings the groups.
        groups_per_step: In a batch.
        is_sync: Wait for the replicas before anything is generated again.
        record: Gets the rows.
        on_row: Told of each.
    """

    def __init__(
        self,
        trainer: Trainer,
        replicas: Replicas,
        stream: RolloutStream,
        *,
        groups_per_step: int,
        is_sync: bool,
        record: Record,
        on_row: OnRow,
    ) -> None:
        self._trainer, self._replicas, self._stream = trainer, replicas, stream
        self._groups_per_step, self._is_sync = groups_per_step, is_sync
        self._record, self._on_row = record, on_row

    async def run(self, limits: Limits) -> None:
        """Generate and train until a limit; the replicas hold the last step's weights then.

        Raises:
            ExceptionGroup: what went wrong with a rollout, an update or the trainer.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stream.run())
            try:
                await self._train(tasks, limits)
            finally:
                await self._stream.close()

    async def _train(self, tasks: asyncio.TaskGroup, limits: Limits) -> None:
        began = last = time.perf_counter()
        publishing: asyncio.Task[list[Published]] | None = None
        tokens = 0
        while not self._is_over(limits, last - began):
            asked = time.perf_counter()
            groups = await self._stream.take(self._groups_per_step)
            taken = time.perf_counter()
            step = self._trainer.step
            trained = await asyncio.to_thread(self._trainer.train, groups)
            done = time.perf_counter()
            # async: the replicas take the step before while this one was trained
            published = await publishing if publishing else []
            publishing = tasks.create_task(
                self._replicas.publish(self._trainer.step, self._trainer.weights())
            )
            if self._is_sync:  # sync: nobody generates until all replicas hold this step
                published = await publishing
                publishing = None
            await self._stream.advance(self._trainer.step)
            now, total = time.perf_counter(), self._stream.account.tokens
            row = _row(
                groups, trained, published, step=step, at=now - began, seconds=now - last,
                tokens=total - tokens, waited_s=taken - asked, publish_s=now - done,
            )  # fmt: skip
            last, tokens = now, total
            self._record.rows.append(row)
            self._on_row(row)
        if publishing:
            await publishing

    def _is_over(self, limits: Limits, seconds: float) -> bool:
        return (
            len(self._record.rows) >= limits.steps
            or seconds >= limits.seconds
            or self._record.recent_reward() >= limits.stop_at
        )


def _row(
    groups: Sequence[Group],
    trained: Trained,
    published: Sequence[Published],
    *,
    step: int,
    at: float,
    seconds: float,
    tokens: int,
    waited_s: float,
    publish_s: float,
) -> Row:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ages = [step - s for group in groups for s in group.steps]
    return Row(
        step=step + 1,
        at=at,
        reward=fmean(reward for group in groups for reward in group.rewards),
        exact=sum(group.exact for group in groups) / len(rollouts),
        staleness_mean=fmean(ages),
        staleness_max=max(ages),
        resumed=fmean(rollout.attempts > 1 for rollout in rollouts),
        mixed=fmean(len(rollout.weight_versions) > 1 for rollout in rollouts),
        tokens=tokens,
        seconds=seconds,
        waited_s=waited_s,
        train_s=trained.seconds,
        publish_s=publish_s,
        paused_s=fmean(p.paused_s for p in published) if published else 0.0,
        entropy=trained.entropy,
        mean_ratio=trained.mean_ratio,
        truncated=trained.truncated,
        mismatch=trained.mismatch,
    )


async def evaluate(
    client: RolloutClient, prompts: Sequence[Prompt], *, step: int, version: str
) -> Evaluation:
    """Answer held-out prompts greedily on the replicas.

    Raises:
        RunError: a rollout failed, or was sampled by other weights than those of ``version``.
    """
    params = SAMPLING | {"temperature": 0.0}
    results = await client.generate_batch(prompts, params, deadline_s=300.0)
    rollouts = [result for result in results if isinstance(result, Rollout)]
    failed = [result for result in results if not isinstance(result, Rollout)]
    if failed:
        raise RunError(f"{len(failed)} rollouts of the evaluation failed, the first: {failed[0]}")
    foreign = {s.version for r in rollouts for s in r.weight_versions} - {version}
    if foreign:
        raise RunError(f"the evaluation of {version} got tokens of {sorted(foreign)}")
    pairs = list(zip(prompts, (rollout.token_ids for rollout in rollouts), strict=True))
    return Evaluation(
        step=step,
        reward=fmean(reward_of(prompt, answer) for prompt, answer in pairs),
        exact=fmean(is_exact(prompt, answer) for prompt, answer in pairs),
        prompts=len(prompts),
    )

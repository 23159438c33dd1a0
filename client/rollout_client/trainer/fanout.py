"""The same asked of every replica at once, each with its own deadline and its own result."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_client.trainer.control import Control, Facts
from rollout_client.trainer.errors import AdapterError, Late, ReplicaErrors
from rollout_client.trainer.results import ReplicaResult

if TYPE_CHECKING:
    from rollout_pod.weights.trainer import SentWeights


@dataclass(frozen=True)
class Reached:
    """What a replica became, and what was sent to it."""

    facts: Facts
    sent: "SentWeights | None" = None


async def fan_out(
    controls: Sequence[Control],
    goal: str,
    work: Callable[[Control], Awaitable[Reached]],
    timeout_s: float,
) -> dict[str, ReplicaResult]:
    """Run ``work`` for all; none waits for another one, and none is cut because another failed.

    Args:
        controls: the replicas.
        goal: what is waited for, for people.
        work: raises ``AdapterError``; anything else is a fault of ours and passes through.
        timeout_s: for each.

    Raises:
        AdapterError: there is one replica, and it failed.
        ReplicaErrors: there are several, and some failed.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one(c, goal, work, timeout_s)) for c in controls]
    return judged([task.result() for task in tasks])


async def _one(
    control: Control,
    goal: str,
    work: Callable[[Control], Awaitable[Reached]],
    timeout_s: float,
) -> ReplicaResult:
    started = time.monotonic()
    reached = Reached(Facts())
    failed: AdapterError | None = None
    try:
        async with asyncio.timeout(timeout_s) as limit:
            reached = await work(control)
    except TimeoutError as error:
        if not limit.expired():
            raise
        told = f"{control.name} is not {goal} after {timeout_s:g} s: {control.told}"
        failed = Late(told, target=control.name)
        failed.__cause__ = error
    except AdapterError as error:
        failed = error
    return ReplicaResult(
        target=control.name,
        seconds=time.monotonic() - started,
        phase=reached.facts.phase,
        weight_version=reached.facts.weight_version,
        sent=reached.sent,
        error=failed,
    )


def judged(results: Sequence[ReplicaResult]) -> dict[str, ReplicaResult]:
    """All results by name, or what went wrong.

    Raises:
        AdapterError: there is one replica, and it failed.
        ReplicaErrors: there are several, and some failed.
    """
    by_name: Mapping[str, ReplicaResult] = {result.target: result for result in results}
    errors = [result.error for result in results if result.error is not None]
    for error in errors:
        error.results = by_name
    if len(results) == 1 and errors:
        raise errors[0]
    if errors:
        raise ReplicaErrors(errors, by_name)
    return dict(by_name)

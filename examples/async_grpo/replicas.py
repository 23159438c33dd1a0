"""How new weights reach the replicas: the seam between the loop and where the replicas run."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from examples.async_grpo.model import save_weights
from rollout_client.trainer import AdapterError, ReplicaErrors, SyncServerAdapter
from rollout_pod.protocol import WeightsSource

KEPT = 4
"""Versions whose folders stay: a replica that restarts loads what it committed last."""


class RunError(Exception):
    """What went wrong, in words for the person who watches."""


@dataclass(frozen=True)
class Published:
    """One replica holds a version now."""

    replica: str
    paused_s: float
    """From the gate's closing to its opening."""


Deliver = Callable[[int, Mapping[str, Tensor]], Awaitable[object]]
"""Brings the weights of a step to all replicas; returns when each has committed them."""

Look = Callable[[], Awaitable[list[Published]]]
"""What each replica says of its last update."""


class Replicas:
    """All replicas of a run.

    Args:
        endpoints: Where rollouts are asked for.
        deliver: ``pushing`` or ``by_folder``.
        look: Asked after each delivery.
    """

    def __init__(self, endpoints: Sequence[str], deliver: Deliver, look: Look) -> None:
        self.endpoints = endpoints
        self._deliver, self._look = deliver, look

    async def publish(self, step: int, weights: Mapping[str, Tensor]) -> list[Published]:
        """Give all replicas the weights of a step, which must not change meanwhile.

        Raises:
            RunError: a replica did not take them.
        """
        try:
            await self._deliver(step, weights)
        except (AdapterError, ReplicaErrors) as error:
            told = [str(r.error) for r in error.results.values() if r.error] or [str(error)]
            raise RunError(f"step {step} did not reach every replica: {'; '.join(told)}") from error
        return await self._look()


# The adapter has an event loop in a thread of its own: in the one of the rollouts, each step of an
# update would wait for its turn among hundreds of them.


def pushing(adapter: SyncServerAdapter) -> Deliver:
    """Out of this process' memory, through memory that it shares with the engines."""

    async def deliver(step: int, weights: Mapping[str, Tensor]) -> object:
        return await asyncio.to_thread(adapter.update_weights, weights, global_steps=step)

    return deliver


def by_folder(adapter: SyncServerAdapter, folder: Path, *, names_source: bool) -> Deliver:
    """By safetensors files that the replicas' weights agents read, one folder a version.

    Args:
        adapter: For the replicas.
        folder: They see it, too.
        names_source: Tell them where the version is. RolloutReplicas know by their
            ``spec.weights.source``.
    """
    kept: list[Path] = []

    async def deliver(step: int, weights: Mapping[str, Tensor]) -> object:
        version = folder / f"step-{step}"
        await asyncio.to_thread(save_weights, weights, version)
        source = WeightsSource(path=str(version)) if names_source else None
        results = await asyncio.to_thread(adapter.update_weights, global_steps=step, source=source)
        kept.append(version)
        while len(kept) > KEPT:
            shutil.rmtree(kept.pop(0), ignore_errors=True)
        return results

    return deliver

"""How new weights reach the replicas: the seam between the loop and where the replicas run."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from examples.async_grpo.model import save_weights
from rollout_client.endpoints import Endpoints

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


class Replica(Protocol):
    """One replica, wherever it runs."""

    name: str

    async def load(self, version: str, *, step: int, folder: Path) -> Published:
        """Ask for a version and return when it is committed and generation goes on.

        Raises:
            RunError: it was refused, or is not there in time.
        """


class Replicas:
    """All of them. Weights go by a folder of safetensors files that they read.

    Args:
        replicas: They all get every version.
        endpoints: Where rollouts are asked for.
        folder: Holds one folder a version; the replicas see it.
    """

    def __init__(
        self, replicas: Sequence[Replica], endpoints: Endpoints | Sequence[str], folder: Path
    ) -> None:
        self.replicas = replicas
        self.endpoints = endpoints
        self._folder = folder
        self._kept: list[Path] = []

    async def publish(self, step: int, weights: Mapping[str, Tensor]) -> list[Published]:
        """Give all replicas the weights of a step; returns when each has committed them.

        Raises:
            RunError: a replica did not take them.
        """
        version = f"step-{step}"
        folder = self._folder / version
        await asyncio.to_thread(save_weights, weights, folder)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(replica.load(version, step=step, folder=folder))
                    for replica in self.replicas
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        self._forget(folder)
        return [task.result() for task in tasks]

    def _forget(self, newest: Path) -> None:
        self._kept.append(newest)
        while len(self._kept) > KEPT:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)

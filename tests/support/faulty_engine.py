"""vLLM whose device faults when its process gets SIGUSR1."""

import asyncio
import signal
from typing import Any

from rollout_pod.engine.base import EngineSettings
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.protocol import EngineInfo

ON_CPU = "RuntimeError: the device of this test is broken"


def fault(worker: Any) -> None:
    """Runs in the worker. On a GPU a kernel reads out of bounds: the device refuses everything from
    then on, and whoever asks it next is told. On CPU, which has no such state, the same is played.
    """
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        few = torch.zeros(8, device=worker.device)
        few[torch.full((1,), 1 << 20, device=worker.device)]
        return

    def step(*_: Any, **__: Any) -> None:
        raise RuntimeError(ON_CPU.partition(": ")[2])

    worker.model_runner.execute_model = step
    worker.rollout_fault = lambda: ON_CPU


class FaultyEngine(VllmEngine):
    """Needs VLLM_ALLOW_INSECURE_SERIALIZATION=1: it sends a function to its worker."""

    _faulting: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        """See ``Engine``."""
        info = await super().start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._begin)
        return info

    def _begin(self) -> None:
        self._faulting = asyncio.create_task(self._llm.collective_rpc(fault))


def create(settings: EngineSettings) -> FaultyEngine:
    """Entry point."""
    return FaultyEngine(settings)

"""A checkpoint engine of verl's that needs no GPU: broadcasts over gloo.

verl's own ones need CUDA, except for ``naive``, which does not leave the process. verl imports this
by ``checkpoint_engine.custom_backend_module``.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

from tests.support.engine_kit import tensors_of

NAME = "gloo_test"
LIMIT = timedelta(seconds=60)


@CheckpointEngineRegistry.register(NAME)
class GlooEngine(CheckpointEngine):
    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master
        self._store: TCPStore | None = None
        self._group: Any = None

    def prepare(self) -> dict[str, Any]:
        if not self._is_master:
            return {}
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT
        )
        return {"port": self._store.port}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[dict]) -> tuple[dict, dict]:
        world, port = actors + rollouts, metadata[0]["port"]

        def of(ranks: range) -> dict[str, list[Any]]:
            count = len(ranks)
            return {"rank": list(ranks), "world": [world] * count, "port": [port] * count}

        return of(range(actors)), of(range(actors, world))

    def init_process_group(self, rank: int, world: int, port: int) -> None:
        if self._store is None:
            self._store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
        self._group = ProcessGroupGloo(self._store, rank, world, LIMIT)

    def finalize(self) -> None:
        self._group = self._store = None

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        count = 0
        for name, tensor in weights:
            spec = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            self._store.set(f"spec-{count}", json.dumps(spec))
            await asyncio.to_thread(self._broadcast, tensor.clone())
            count += 1
        self._store.set(f"spec-{count}", json.dumps(None))

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        count = 0
        while (spec := await asyncio.to_thread(self._spec, count)) is not None:
            name, dtype, shape = spec
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            await asyncio.to_thread(self._broadcast, tensor)
            yield name, tensor
            count += 1

    def _spec(self, count: int) -> Any:
        return json.loads(self._store.get(f"spec-{count}"))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, root=0).wait()


@ray.remote
class Trainer(Worker):
    """The part of verl's actor worker that ``CheckpointEngineManager`` speaks to; its weights are
    those of a checkpoint for each step."""

    def __init__(self, checkpoints: dict[int, str]) -> None:
        super().__init__()
        self._checkpoints = checkpoints
        self._engine = GlooEngine(bucket_size=1 << 20, is_master=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> dict[str, Any]:
        # the files of two checkpoints have other orders; a trainer's model always has one
        weights = sorted(tensors_of(Path(self._checkpoints[global_steps])).items())
        await self._engine.send_weights(iter(weights), global_steps=global_steps)
        return {"sent": len(weights)}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._engine, method)(*args, **kwargs)

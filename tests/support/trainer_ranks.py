"""One rank of a trainer: ``python trainer_ranks.py RANK WORLD STORE ADMIN_URL RUN_DIR SCENE``.

Its model is sharded over all ranks. Prints one JSON line: what each call came to.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rollout_client.trainer import Keep, PodTarget, ServerAdapter
from tests.support.weights import mixed_tensors


def sharded(seed: int, world: int) -> dict[str, torch.Tensor]:
    """Some tensors in shards, one on every rank, and some that are no DTensors at all."""
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in mixed_tensors(seed).items():
        if not tensor.dtype.is_floating_point or tensor.dtype is torch.float8_e4m3fn:
            found[name] = tensor
        elif name == "layers.0.norm":
            found[name] = distribute_tensor(tensor, mesh, [Replicate()])
        elif tensor.ndim:
            found[name] = distribute_tensor(tensor, mesh, [Shard(0)])
        else:
            found[name] = tensor
    assert any(isinstance(t, DTensor) for t in found.values())
    return found


async def scene(rank: int, world: int, adapter: ServerAdapter, name: str) -> list[Any]:
    told: list[Any] = []

    async def call(work: Any) -> None:
        try:
            told.append({url: r.weight_version for url, r in (await work).items()})
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")

    weights = sharded(1, world)
    if name == "versions":
        await call(adapter.cancel())
        await call(adapter.resume_generation())
        for step in (1, 2, 3):
            await call(adapter.update_weights(sharded(step, world), global_steps=step))
        gathered = ((n, t.full_tensor() if isinstance(t, DTensor) else t)
                    for n, t in sharded(4, world).items())  # fmt: skip
        await call(adapter.update_weights(gathered, global_steps=4))
        await call(adapter.update_weights(lambda: sharded(5, world), global_steps=5))
        await call(adapter.update_weights(lambda: sharded(5, world), global_steps=5))
    elif name == "failures":
        wrong = {**weights, "layers.0.scale": torch.randn(2)}
        await call(adapter.update_weights(wrong, version="v1", timeout_s=10))

        if rank == 0:
            await call(adapter.update_weights(weights, version="v2"))
        else:  # whoever does not send may fail, too; it takes part in every gather before
            plain = dict(weights)

            def names() -> Any:
                yield from plain.items()
                raise MemoryError("rank 1 has no room")

            await call(adapter.update_weights(names(), version="v2"))
        await call(adapter.update_weights(weights, version="v3"))
    elif name in ("needs", "copy"):
        await call(adapter.update_weights(weights, version="v1"))
        await call(adapter.resend())
        print("restart it", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await call(adapter.resend())
        await call(adapter.resend())
    return told


async def main() -> None:
    rank, world, store, url, run_dir, name = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    target = PodTarget.of_run_dir(Path(run_dir), url)
    keep: Keep = "copy" if name == "copy" else "reference"
    async with ServerAdapter(target, group="world", keep=keep, timeout_s=30) as adapter:
        told = await scene(int(rank), int(world), adapter, name)
    print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main())

"""One rank of a trainer with FSDP2: ``python trainer_fsdp.py RANK WORLD STORE ADMIN_URL RUN_DIR CHECKPOINT OUT``.

Shards a transformers model over all ranks, trains it, and pushes it through the adapter after each of two steps. The names
of its tensors are not the checkpoint's. Prints a JSON line for each step, and waits for a line before the next; what it
pushed is then in OUT/step-N, a checkpoint that was gathered apart from the adapter.
"""

import asyncio
import json
import shutil
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rollout_client.trainer import PodTarget, ServerAdapter

STEPS = 2


class Policy(torch.nn.Module):
    """As trainers wrap what they train."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.policy = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.policy(ids, use_cache=False).logits
        return logits


def sharded(checkpoint: Path, world: int) -> Policy:
    policy = Policy(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32))
    mesh = init_device_mesh("cpu", (world,))
    for layer in policy.policy.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    return policy


@contextmanager
def gathers() -> Iterator[list[int]]:
    """For each tensor that is gathered: how many that were gathered before are still alive."""
    alive: list[weakref.ref[torch.Tensor]] = []
    told: list[int] = []
    gather = DTensor.full_tensor

    def watched(tensor: DTensor, **more: Any) -> torch.Tensor:
        told.append(sum(ref() is not None for ref in alive))
        whole = gather(tensor, **more)
        alive.append(weakref.ref(whole))
        return whole

    DTensor.full_tensor = watched
    try:
        yield told
    finally:
        DTensor.full_tensor = gather


def checkpoint_name(name: str) -> str:
    return name.removeprefix("policy.")


def write(weights: dict[str, torch.Tensor], like: Path, folder: Path, *, is_first: bool) -> None:
    """Gather all and write a checkpoint; every rank has to."""
    whole = {checkpoint_name(name): tensor.full_tensor() for name, tensor in weights.items()}
    if is_first:
        shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


async def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, url, run_dir = sys.argv[3:6]
    checkpoint, out = map(Path, sys.argv[6:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    policy = sharded(checkpoint, world)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    dice = torch.Generator().manual_seed(rank)  # each rank has data of its own
    target = PodTarget.of_run_dir(Path(run_dir), url)
    async with ServerAdapter(target, group="world", names=checkpoint_name, timeout_s=60) as adapter:
        for step in range(1, STEPS + 1):
            ids = torch.randint(3, 1000, (2, 16), generator=dice)
            logits = policy(ids)[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            weights = policy.state_dict()
            with gathers() as told:
                results = await adapter.update_weights(weights, global_steps=step)
            write(weights, checkpoint, out / f"step-{step}", is_first=rank == 0)
            line = {
                "versions": [r.weight_version for r in results.values()],
                "sharded": sum(isinstance(t, DTensor) for t in weights.values()),
                "held": sum(t.to_local().numel() for t in weights.values()),
                "gathered": len(told), "alive": max(told), "loss": loss.item(),
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
    dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main())

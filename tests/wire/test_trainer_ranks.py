"""A trainer of two processes whose tensors are sharded over both: DTensors, gathered with gloo."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_client.trainer import ServerAdapter
from tests.support.local_pods import Local, local_pods
from tests.support.weights import mixed_tensors, same

pytestmark = pytest.mark.timeout(180)

WORLD = 2
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "trainer_ranks.py"


class Trainer:
    """Its processes, and what each of them prints last."""

    def __init__(self, ranks: list[asyncio.subprocess.Process]) -> None:
        self.ranks = ranks

    @classmethod
    async def start(cls, pod: Local, store: Path, scene: str) -> "Trainer":
        ranks = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, str(SCRIPT), str(rank), str(WORLD), str(store)),
                *(pod.url, str(pod.run_dir), scene),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                cwd=SCRIPT.parents[2], env={"PYTHONPATH": "."},
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        return cls(ranks)

    async def lines(self) -> list[str]:
        """The next one of each."""
        async with asyncio.timeout(120):
            return [(await rank.stdout.readline()).decode().strip() for rank in self.ranks]

    async def told(self) -> list[list[Any]]:
        lines = await self.lines()
        for rank in self.ranks:
            assert await rank.wait() == 0, lines
        return [json.loads(line) for line in lines]

    async def end(self) -> None:
        for rank in self.ranks:
            if rank.returncode is None:
                rank.kill()
                await rank.wait()


@pytest.fixture
async def trainers():
    started: list[Trainer] = []

    async def start(*args) -> Trainer:
        started.append(await Trainer.start(*args))
        return started[-1]

    yield start
    for trainer in started:
        await trainer.end()


async def test_every_rank_gathers_and_one_sends(trainers, tmp_path: Path) -> None:
    async with local_pods(1, ranks=2) as (pod,):
        trainer = await trainers(pod, tmp_path / "store", "versions")
        first, second = await trainer.told()
        assert first == [
            *({pod.url: "base"},) * 2,
            *({pod.url: f"step-{step}"} for step in (1, 2, 3, 4, 5, 5)),
        ]
        assert second == [{}] * 8
        assert all(same(model, mixed_tensors(5)) for model in pod.models)
        loads = [c for c in pod.engine.calls if c.startswith("load")]
        assert loads == [f"load step-{step}" for step in (1, 2, 3, 4, 5)]


async def test_what_one_rank_fails_with_every_rank_is_told(trainers, tmp_path: Path) -> None:
    async with local_pods() as (pod,):
        trainer = await trainers(pod, tmp_path / "store", "failures")
        first, second = await trainer.told()
        assert first[0].startswith("UpdateFailed: ")
        assert "layers.0.scale" in first[0]
        assert second[0].startswith("PeerFailed: rank 0 of the trainer: UpdateFailed: ")
        assert "layers.0.scale" in second[0]
        assert first[1] == "PeerFailed: rank 1 of the trainer: MemoryError: rank 1 has no room"
        assert second[1] == "MemoryError: rank 1 has no room"
        assert first[2] == {pod.url: "v3"}
        assert same(pod.models[0], mixed_tensors(1))


async def test_a_restarted_pod_is_sent_its_version_by_all_ranks(trainers, tmp_path: Path) -> None:
    async with local_pods() as (pod,):
        trainer = await trainers(pod, tmp_path / "store", "needs")
        assert await trainer.lines() == ["restart it"] * WORLD
        await pod.kill()
        await pod.boot()
        await pod.pod.until(lambda s: s.needs == "v1")
        for rank in trainer.ranks:
            rank.stdin.write(b"\n")
        first, second = await trainer.told()
        assert first == [{pod.url: "v1"}, {}, {pod.url: "v1"}, {}]
        assert second == [{}] * 4
        assert same(pod.models[0], mixed_tensors(1))


async def test_a_copy_is_sent_again_without_the_other_ranks(trainers, tmp_path: Path) -> None:
    async with local_pods() as (pod,):
        trainer = await trainers(pod, tmp_path / "store", "copy")
        assert await trainer.lines() == ["restart it"] * WORLD
        await pod.kill()
        await (await pod.boot()).serving("v1")
        assert same(pod.models[0], mixed_tensors(1))
        for rank in trainer.ranks:
            rank.stdin.write(b"\n")
        first, second = await trainer.told()
        assert first == [{pod.url: "v1"}, {}, {}, {}]
        assert second == [{}] * 4


async def test_dtensors_without_a_group_are_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    async with local_pods() as (pod,):
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            mesh = DeviceMesh("cpu", [0, 1])
            weights = {n: distribute_tensor(t, mesh, [Shard(0)]) if n == "layers.0.norm" else t
                       for n, t in mixed_tensors(1).items()}  # fmt: skip
            async with ServerAdapter(pod.target) as adapter:
                with pytest.raises(ValueError, match=r"'layers\.0\.norm' is sharded over several"):
                    await adapter.update_weights(weights, version="v1")
        finally:
            dist.destroy_process_group()
        assert pod.desired.weights is None
    with pytest.raises(ValueError, match="init_process_group"):
        ServerAdapter(pod.target, group="world")

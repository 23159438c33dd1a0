"""verl's ``BaseRollout`` on pods whose ranks are real, and whose engine is not."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from verl.workers.rollout.replica import RolloutMode

from rollout_client.trainer import UpdateFailed
from rollout_client.verl import rollout as bridge
from rollout_client.verl.parsing import parse
from rollout_client.verl.rollout import PodRollout
from rollout_client.verl.server import PodServer
from rollout_pod.protocol import StateDocument
from tests.support.local_pods import Local, local_pods
from tests.support.weights import Tensors, mixed_tensors, same
from tests.verl.kit import model_config, rollout_config

pytestmark = pytest.mark.timeout(90)


def mine(pod: Local) -> dict[str, Any]:
    where = {"data": "http://127.0.0.1:9", "admin": pod.url, "run_dir": str(pod.run_dir)}
    return {"pods": [where], "control_timeout_s": 20}


def named(tensors: Tensors) -> dict[str, str]:
    return {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}


class Trained:
    """A version as a trainer has it: what can be is float32. Says how far it was read."""

    def __init__(self, tensors: Tensors, *, without: str = "") -> None:
        self._tensors = {n: t for n, t in tensors.items() if n != without}
        self.read = 0

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            self.read += 1
            plain = tensor.dtype in (torch.bfloat16, torch.float16)
            yield name, tensor.float().requires_grad_() if plain else tensor

    async def received(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for pair in self:
            yield pair


@pytest_asyncio.fixture
async def pod() -> AsyncIterator[Local]:
    async with local_pods(ranks=2) as (made,):
        yield made


@pytest_asyncio.fixture
async def rollout(pod, monkeypatch) -> AsyncIterator[PodRollout]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(bridge, "read_types", lambda _: named(mixed_tensors(0)))
    made = PodRollout(rollout_config(mine=mine(pod)), model_config(), None)
    yield made
    await made.aclose()


@pytest_asyncio.fixture
async def server(pod) -> AsyncIterator[PodServer]:
    settings = parse({"rollout_replica": mine(pod)})
    made = PodServer(
        config=rollout_config(), model_config=model_config(), settings=settings,
        place=settings.place(0), rollout_mode=RolloutMode.STANDALONE, replica_rank=0,
    )  # fmt: skip
    yield made
    await made.shutdown()


def holds(pod: Local, version: str, tensors: Tensors) -> bool:
    return pod.state.weight_version == version and all(same(m, tensors) for m in pod.models)


@pytest.mark.parametrize("engine", ["naive", "receiving"])
async def test_every_version_arrives_whole_in_the_checkpoints_types(pod, rollout, engine):
    for step in range(3):
        tensors = mixed_tensors(step)
        trained = Trained(tensors)
        weights = iter(trained) if engine == "naive" else trained.received()
        await rollout.update_weights(weights, global_steps=step)
        assert trained.read == len(trained)
        assert holds(pod, f"step-{step}", tensors)
        assert pod.state.weight_step == step


async def test_an_incomplete_version_interrupts_nobody_and_the_next_one_mends_it(pod, rollout):
    await rollout.update_weights(iter(Trained(mixed_tensors(1))), global_steps=1)
    trained = Trained(mixed_tensors(2), without="layers.1.half")
    with pytest.raises(UpdateFailed, match=r"layers\.1\.half"):
        await rollout.update_weights(iter(trained), global_steps=2)
    assert trained.read == len(trained)  # the other ranks are not left waiting
    assert pod.state.phase == "Serving"
    assert holds(pod, "step-1", mixed_tensors(1))
    await rollout.update_weights(iter(Trained(mixed_tensors(3))), global_steps=3)
    assert holds(pod, "step-3", mixed_tensors(3))


async def test_a_stream_that_fails_in_the_middle_commits_nothing(pod, rollout):
    await rollout.update_weights(iter(Trained(mixed_tensors(1))), global_steps=1)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(Trained(mixed_tensors(2))):
            if i == 5:
                raise RuntimeError("a rank was lost while it gathered")
            yield pair

    with pytest.raises(Exception, match="a rank was lost") as failed:
        await rollout.update_weights(broken(), global_steps=2)
    assert pod.state.weight_version != "step-2", failed
    await rollout.update_weights(iter(Trained(mixed_tensors(3))), global_steps=3)
    assert holds(pod, "step-3", mixed_tensors(3))


async def test_a_pod_that_was_restarted_gets_the_next_version(pod, rollout):
    await rollout.update_weights(iter(Trained(mixed_tensors(1))), global_steps=1)
    await pod.kill()
    await pod.boot()
    await rollout.update_weights(iter(Trained(mixed_tensors(2))), global_steps=2)
    assert holds(pod, "step-2", mixed_tensors(2))


async def test_the_order_of_verls_checkpoint_manager(pod, rollout, server):
    """Abort, release the cache, send, take it back, resume; nothing is generated in between."""

    def reached(done: Any) -> Any:
        assert pod.pod is not None
        return pod.pod.until(done)

    def is_paused(state: StateDocument) -> bool:
        return state.gate == "closed" and not state.unfinished

    await server.abort_all_requests()
    assert is_paused(pod.state)
    await server.release_kv_cache()
    await rollout.update_weights(iter(Trained(mixed_tensors(1))), global_steps=1)
    assert is_paused(pod.state)
    assert holds(pod, "step-1", mixed_tensors(1))
    await server.resume_kv_cache()
    await reached(lambda s: s.phase == "Paused")
    await server.resume_generation()
    assert pod.state.gate == "open"
    await reached(lambda s: s.phase == "Serving" and s.weight_version == "step-1")


@pytest.mark.parametrize("on_cpu", [False, True])
async def test_asleep_for_a_training_step(pod, rollout, on_cpu):
    """resume(weights), update, resume(kv_cache), release: twice, each call twice."""
    pod.engine.on_cpu = on_cpu  # then all stays resident, and a wake-up is over at once
    for step in (1, 2):
        for _ in range(2):
            await rollout.release()
        assert set(pod.desired.sleep.tags) == {"weights", "kv_cache"}
        assert pod.desired.sleep.level == 2
        for _ in range(2):
            await rollout.resume(["weights"])
        for _ in range(2):
            await rollout.update_weights(iter(Trained(mixed_tensors(step))), global_steps=step)
        assert holds(pod, f"step-{step}", mixed_tensors(step))
        assert pod.state.phase == "Sleeping"
        for _ in range(2):
            await rollout.resume(["kv_cache"])
        await pod.pod.serving(f"step-{step}")

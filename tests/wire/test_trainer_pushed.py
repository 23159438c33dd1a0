"""A trainer pushes to RolloutReplicas: the operator between a fake API server and real supervisors."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import torch

from rollout_client.trainer import (
    Asleep,
    Refused,
    ReplicaTarget,
    ServerAdapter,
    Superseded,
    UpdateFailed,
    keeper,
)
from rollout_pod.weights.fill import spec_of
from tests.support.local_pods import Local
from tests.support.operator_kit import Bench, bench, running_status
from tests.support.weights import make_place, mixed_tensors, same

pytestmark = pytest.mark.timeout(90)


def adapter_of(b: Bench, target: ReplicaTarget, **settings) -> ServerAdapter:
    return ServerAdapter(target, **{"timeout_s": 15, "server": b.server.url, **settings})


@asynccontextmanager
async def pushed_replica(b: Bench, **settings) -> AsyncIterator[tuple[Local, ServerAdapter]]:
    """A replica that a trainer pushes to, and its trainer."""
    b.apply(weights={"source": {"push": {}}})
    await b.until(lambda: b.server.get("pods", "qwen-0"), "the pod")
    with make_place() as place:
        pod = Local(place, host="127.0.0.2", port=b.port, token=b.token())
        try:
            await pod.boot(first=None)
            b.server.change("pods", "qwen-0", {"status": running_status(pod.host)})
            await b.ready("Serving")
            target = ReplicaTarget(name="qwen", namespace="ns", run_dir=pod.run_dir)
            async with adapter_of(b, target, **settings) as adapter:
                yield pod, adapter
        finally:
            await pod.kill()


async def test_a_version_is_pushed_and_the_replica_says_so() -> None:
    async with bench() as b, pushed_replica(b) as (pod, adapter):
        for step in (1, 2):
            results = await adapter.update_weights(mixed_tensors(step), global_steps=step)
            result = results["ns/qwen"]
            assert (result.weight_version, result.phase) == (f"step-{step}", "Serving")
            assert result.sent.transport == "shared_memory"
            assert same(pod.models[0], mixed_tensors(step))
            assert b.status()["lastCommitted"]["source"] == {"push": {}}
        assert (await adapter.clear_kv_cache())["ns/qwen"].ok
        assert pod.engine.calls[-1] == "clear"
        await adapter.release()
        with pytest.raises(Asleep):
            await adapter.clear_kv_cache()
        await adapter.resume(("weights",))
        await adapter.update_weights(mixed_tensors(3), global_steps=3)
        await adapter.resume()
        assert same(pod.models[0], mixed_tensors(3))
        with pytest.raises(Refused, match="source is push: hand over the weights"):
            await adapter.update_weights(global_steps=4)
        wrong = {**mixed_tensors(4), "layers.0.norm": torch.randn(3)}
        with pytest.raises(UpdateFailed, match=r"layers\.0\.norm"):
            await adapter.update_weights(wrong, global_steps=4)
        assert pod.state.phase == "Serving"


async def test_two_adapters_race_and_the_last_writer_of_the_replica_wins() -> None:
    reached, go = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in mixed_tensors(1).items():
            reached.set()
            go.wait(20)
            yield pair

    specs = [spec_of(*pair) for pair in mixed_tensors(1).items()]
    async with bench() as b, pushed_replica(b, manager="one") as (pod, one):
        target = ReplicaTarget(name="qwen", namespace="ns", run_dir=pod.run_dir)
        async with adapter_of(b, target, manager="two") as two:
            losing = one.begin_update(slowly, version="v1", manifest=specs)
            await asyncio.to_thread(reached.wait, 20)
            winning = two.begin_update(mixed_tensors(2), version="v2")
            await b.until(lambda: b.server.get("rolloutreplicas", "qwen")["spec"]
                          .get("weightVersion") == "v2")  # fmt: skip
            asyncio.get_running_loop().call_later(0.5, go.set)
            with pytest.raises(Superseded):
                await losing.wait()
            assert (await winning.wait())["ns/qwen"].weight_version == "v2"
            assert same(pod.models[0], mixed_tensors(2))
            assert b.status()["history"][0]["by"] == "two"


async def test_a_pod_that_restarts_is_sent_its_version_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "SETTLE_S", 0.05)
    monkeypatch.setattr(keeper, "_RETRY_S", 0.1)
    async with bench() as b, pushed_replica(b) as (pod, adapter):
        await adapter.update_weights(mixed_tensors(1), global_steps=1)
        await pod.kill()
        await pod.boot(first=None)
        await pod.pod.serving("step-1")
        assert same(pod.models[0], mixed_tensors(1))
        await b.ready("Serving")

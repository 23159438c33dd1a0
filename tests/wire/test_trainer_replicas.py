"""The trainer's adapter and RolloutReplicas: the operator, between a fake API server and pods."""

import asyncio

import pytest

from rollout_client.trainer import (
    Asleep,
    Refused,
    ReplicaErrors,
    ReplicaGone,
    ReplicaTarget,
    SelectorTarget,
    ServerAdapter,
    Superseded,
    Unreachable,
    WeightsUnavailable,
)
from rollout_pod.protocol import SleepSpec, SleepTag
from tests.support.fake_apiserver import Fault
from tests.support.operator_kit import Bench, bench
from tests.support.weights import mixed_tensors

pytestmark = pytest.mark.timeout(90)

SOURCE = {"source": {"path": "/ckpt/{version}"}}
QWEN = ReplicaTarget(name="qwen", namespace="ns")


def adapter_of(b: Bench, *targets, **settings) -> ServerAdapter:
    return ServerAdapter(targets or QWEN, **{"timeout_s": 15, "server": b.server.url, **settings})


async def test_every_call_patches_the_replica() -> None:
    async with bench() as b, adapter_of(b) as adapter:
        admin = await b.serving(weights=SOURCE)
        results = await adapter.cancel()
        assert results["ns/qwen"].phase == "Paused"
        assert admin.documents[-1].paused
        await adapter.release(1, ("kv_cache",))
        assert admin.documents[-1].sleep == SleepSpec(level=1, tags=(SleepTag.KV_CACHE,))
        await adapter.release()
        assert admin.documents[-1].sleep == SleepSpec(level=2)
        with pytest.raises(Asleep, match="resume"):
            await adapter.update_weights(global_steps=7)
        await adapter.resume(("weights",))
        assert admin.documents[-1].sleep == SleepSpec(level=2, tags=(SleepTag.KV_CACHE,))
        await adapter.resume()
        assert admin.documents[-1].sleep is None
        await adapter.resume_generation()
        results = await adapter.update_weights(global_steps=7)
        assert results["ns/qwen"].weight_version == "step-7"
        assert admin.documents[-1].weights.step == 7
        assert b.status()["history"][0]["by"] == "rollout-trainer"
        with pytest.raises(Refused, match="run_dir"):
            await adapter.clear_kv_cache()
        with pytest.raises(Refused, match=r"spec\.weights\.source is path: set it to {push: {}}"):
            await adapter.update_weights(mixed_tensors(1), version="v1")
        assert (await adapter.status())["ns/qwen"].weight_version == "step-7"


async def test_what_replicas_fail_with_is_typed() -> None:
    async with bench() as b, adapter_of(b) as adapter:
        admin = await b.serving(weights=SOURCE)
        admin.missing = {"step-404"}
        with pytest.raises(WeightsUnavailable, match="/ckpt/step-404: no such folder"):
            await adapter.update_weights(version="step-404")
        b.server.faults.append(Fault(lambda r: r.method == "PATCH", 403, message="may not patch"))
        with pytest.raises(Refused, match="may not patch"):
            await adapter.cancel()
        admin.hold = asyncio.Event()
        losing = adapter.begin_update(version="step-1")
        await b.until(lambda: admin.state.phase == "Updating")
        b.patch(weightVersion="step-2")
        with pytest.raises(Superseded, match="'step-2' before 'step-1'"):
            await losing.wait()
        admin.hold.set()
        await b.until(lambda: b.status().get("weightVersion") == "step-2")
    async with ServerAdapter(ReplicaTarget(name="x"), server=b.server.url, timeout_s=5) as nobody:
        with pytest.raises(Unreachable):
            await nobody.cancel()


async def test_all_with_a_label_and_one_that_is_gone() -> None:
    async with bench() as b:
        for name in ("qwen", "kimi"):
            b.apply(name, weights=SOURCE)
            await b.run_pod(name)
            await b.until(lambda name=name: b.condition("Ready", name) == ("True", "Serving"))
        async with adapter_of(b, SelectorTarget(namespace="ns"), QWEN) as adapter:
            assert set(await adapter.update_weights(global_steps=1)) == {"ns/qwen", "ns/kimi"}
        gone = ReplicaTarget(name="gone", namespace="ns")
        async with adapter_of(b, QWEN, gone) as adapter:
            with pytest.raises(ReplicaErrors, match="1 of 2") as told:
                await adapter.cancel()
            assert told.value.results["ns/qwen"].phase == "Paused"
            assert isinstance(told.value.results["ns/gone"].error, ReplicaGone)
        b.server.remove("rolloutreplicas", "qwen")
        b.server.remove("rolloutreplicas", "kimi")
        async with adapter_of(b, SelectorTarget(selector="app=x", namespace="ns")) as adapter:
            with pytest.raises(Refused, match="'app=x' finds no RolloutReplica in namespace ns"):
                await adapter.cancel()


def test_the_replica_whose_pod_we_are_in() -> None:
    given = {"ROLLOUT_REPLICA": "q", "ROLLOUT_NAMESPACE": "n", "ROLLOUT_RUN_DIR": "/run/rollout"}
    here = ReplicaTarget.here(given)
    assert (here.name, here.namespace, str(here.run_dir)) == ("q", "n", "/run/rollout")
    with pytest.raises(ValueError, match="ROLLOUT_RUN_DIR is not set: this process runs in no pod"):
        ReplicaTarget.here({k: v for k, v in given.items() if k != "ROLLOUT_RUN_DIR"})

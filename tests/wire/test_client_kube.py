"""``rollout_client.kube`` against the operator, between its fakes."""

import asyncio
import json
from pathlib import Path

import pytest

from rollout_client import RolloutClient
from rollout_client.kube import (
    ApiError,
    Kube,
    ReplicaGone,
    ReplicaSelector,
    Superseded,
    SyncKube,
    WaitTimeout,
    WeightsUnavailable,
    sync,
)
from rollout_pod.protocol import SleepSpec, SleepTag
from tests.support import docs
from tests.support.fake_apiserver import Fault
from tests.support.fake_fleet import FakeFleet, FakeReplica
from tests.support.operator_kit import Bench, bench

SOURCE = {"source": {"path": "/ckpt/{version}"}}


def connect(b: Bench, manager: str = "trainer"):
    return Kube.connect(namespace="ns", manager=manager, server=b.server.url)


async def test_pause_resume_update_and_delete_are_waited_for():
    async with bench() as b, await connect(b) as kube:
        await b.serving(weights=SOURCE)
        replica = kube.replica("qwen")
        status = await (await replica.pause()).wait(10)
        assert status["phase"] == "Paused"
        assert b.admins[0].documents[-1].paused
        await (await replica.resume()).wait(10)
        assert not b.admins[0].documents[-1].paused
        told: list[str] = []
        b.admins[0].hold = asyncio.Event()
        change = await replica.set_weight_version("step-7", step=7)
        waiting = asyncio.ensure_future(
            change.wait(10, on_progress=lambda line, status: told.append(line))
        )
        await b.until(lambda: any("transferring step-7" in line for line in told))
        assert not waiting.done()
        b.admins[0].hold.set()
        status = await waiting
        assert status["weightVersion"] == "step-7"
        assert status["history"][0]["by"] == "trainer"
        # equal to what is: nothing to do, reached at once
        await (await replica.set_weight_version("step-7", step=7)).wait(5)
        await (await replica.set_weight_version(None)).wait(10)
        raw = b.server.get("rolloutreplicas", "qwen")
        assert raw is not None
        assert not {"weightVersion", "weightStep"} & raw["spec"].keys()
        await (await replica.delete()).wait(10)
        with pytest.raises(ReplicaGone, match="no RolloutReplica qwen in namespace ns"):
            await replica.pause()


async def test_the_last_of_two_writers_wins_and_the_other_is_told():
    async with bench() as b, await connect(b, "one") as one, await connect(b, "two") as two:
        admin = await b.serving(weights=SOURCE)
        admin.hold = asyncio.Event()
        first = await one.replica("qwen").set_weight_version("step-1")
        losing = asyncio.ensure_future(first.wait(10))
        await b.until(lambda: admin.state.phase == "Updating")
        second = await two.replica("qwen").set_weight_version("step-2")
        with pytest.raises(Superseded, match="'step-2' before 'step-1'") as lost:
            await losing
        assert lost.value.status["weightVersion"] in ("base", "")
        # a pause of the other's is no rival of the version
        await two.replica("qwen").pause()
        admin.hold.set()
        assert (await second.wait(10))["weightVersion"] == "step-2"


async def test_sleep_and_wake_are_waited_for_and_keep_what_others_released():
    async with bench() as b, await connect(b) as kube:
        admin = await b.serving(weights=SOURCE)
        replica = kube.replica("qwen")
        status = await (await replica.sleep(SleepSpec(level=2))).wait(10)
        assert (status["phase"], b.condition("Ready")) == ("Sleeping", ("True", "Sleeping"))
        await (await replica.wake((SleepTag.WEIGHTS,))).wait(10)
        assert admin.documents[-1].sleep == SleepSpec(level=2, tags=(SleepTag.KV_CACHE,))
        # read, and written by another before we write: read again
        raced = Fault(lambda r: r.method == "PATCH" and "resourceVersion" in str(r.body), 409)
        b.server.faults.append(raced)
        status = await (await replica.wake()).wait(10)
        assert raced.count == 0
        assert status["phase"] == "Serving"
        assert admin.documents[-1].sleep is None
        await (await replica.wake()).wait(10)  # it is awake: nothing to do


async def test_a_missing_version_is_typed_and_a_timeout_carries_the_status():
    async with bench() as b, await connect(b) as kube:
        admin = await b.serving(weights=SOURCE)
        admin.missing = {"step-404"}
        replica = kube.replica("qwen")
        with pytest.raises(WeightsUnavailable, match="/ckpt/step-404: no such folder"):
            await (await replica.set_weight_version("step-404")).wait(10)
        admin.hold = asyncio.Event()
        change = await replica.set_weight_version("step-5")
        await b.until(lambda: admin.state.phase == "Updating")
        with pytest.raises(WaitTimeout, match=r"qwen is not on step-5 after 0\.5 s") as late:
            await change.wait(0.5)
        assert late.value.status["observedGeneration"] >= change.ask.generation
        admin.hold.set()
        await change.wait(10)


async def test_a_wait_survives_an_api_server_that_stumbles():
    async with bench() as b, await connect(b) as kube:
        admin = await b.serving(weights=SOURCE)
        admin.hold = asyncio.Event()
        change = await kube.replica("qwen").set_weight_version("step-1")
        waiting = asyncio.ensure_future(change.wait(10))
        await b.until(lambda: admin.state.phase == "Updating")
        watches = b.server._watches["rolloutreplicas"]
        await b.until(lambda: len(watches) == 2, "the operator's watch and ours")
        mine = Fault(lambda r: str(r) == "GET rolloutreplicas/qwen", 503, count=2)
        b.server.faults.append(mine)
        b.server.expire_watches()
        await b.until(lambda: mine.count == 0)
        b.server.end_watches()
        admin.hold.set()
        assert (await waiting)["weightVersion"] == "step-1"
        b.server.faults.append(Fault(lambda r: r.method == "PATCH", 403, message="may not patch"))
        with pytest.raises(ApiError, match="may not patch"):
            await kube.replica("qwen").pause()


async def test_apply_waits_until_it_is_ready():
    async with bench() as b, await connect(b) as kube:
        manifest = {
            "apiVersion": "rollout.dev/v1alpha1",
            "kind": "RolloutReplica",
            "metadata": {"name": "qwen"},
            "spec": {"model": "m"},
        }
        with pytest.raises(ValueError, match=r"RolloutReplica of rollout\.dev"):
            await kube.apply({**manifest, "kind": "Pod"})
        waiting = asyncio.ensure_future((await kube.apply(manifest)).wait(15))
        await b.run_pod()
        assert (await waiting)["phase"] == "Serving"


async def test_the_sync_form_does_the_same():
    async with bench() as b:
        await b.serving(weights=SOURCE)

        def steer() -> str:
            with SyncKube(namespace="ns", server=b.server.url) as kube:
                replica = kube.replica("qwen")
                replica.pause().wait(10)
                replica.resume().wait(10)
                status = replica.set_weight_version("step-1").wait(10)
                assert [body["metadata"]["name"] for body in kube.list()] == ["qwen"]
                return str(status["weightVersion"])

        assert await asyncio.to_thread(steer) == "step-1"


async def test_a_selector_follows_replicas_as_they_come_go_and_move_on():
    """Endpoints that the operator publishes; a scaled-away replica is not asked any more."""
    async with bench() as b:
        for name in ("qwen", "kimi"):
            b.apply(name, weights=SOURCE)
            await b.run_pod(name)
            await b.until(lambda name=name: b.condition("Ready", name) == ("True", "Serving"))
        pods = {f"http://{name}.ns.svc:8000": FakeReplica() for name in ("qwen", "kimi")}

        class ByName(FakeFleet):
            async def handle_async_request(self, request):
                url = f"http://{request.url.host}:{request.url.port}"
                request.url = request.url.copy_with(host=f"pod-{list(pods).index(url)}")
                return await super().handle_async_request(request)

        fleet = ByName(*pods.values())
        selector = ReplicaSelector(namespace="ns", server=b.server.url)
        async with RolloutClient(selector, transport=fleet) as api:
            assert {e.url for e in await selector.list()} == set(pods)
            for n in range(12):
                await api.generate([1], {"max_tokens": 1}, session_id=str(n))
            assert set(fleet.hosts) == {0, 1}
            b.server.change(
                "rolloutreplicas", "kimi", {"spec": {"weightVersion": "step-3", "weightStep": 3}}
            )
            before = len(fleet.hosts)
            rollout = await api.generate([1], {"max_tokens": 1}, min_step=3, deadline_s=15)
            assert fleet.hosts[before:] == [1]
            assert rollout.attempts == 1
            b.server.remove("rolloutreplicas", "kimi")
            await b.until(lambda: len(selector._objects or {}) == 1)
            before = len(fleet.hosts)
            for n in range(12):
                await api.generate([1], {"max_tokens": 1}, session_id=str(n))
            assert set(fleet.hosts[before:]) == {0}


async def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """docs/clients.md, with the kubeconfig that it speaks of."""
    async with bench() as b:
        await b.serving(weights=SOURCE)
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": b.server.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [
                {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}
            ],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        (code,) = docs.blocks("clients.md", "python kube")
        code = code.replace(', "rollout")', ")")

        def run() -> None:
            try:
                exec(code, {})
            finally:
                shared, sync._shared = sync._shared, None
                if shared is not None:
                    shared.close()

        await asyncio.to_thread(run)
        assert b.status()["weightVersion"] == "step-7"
        assert b.status()["history"][0]["by"] == "rollout-client"

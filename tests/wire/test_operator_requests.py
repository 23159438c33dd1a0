"""What the operator sends to the API server and to pods, exactly."""

import asyncio

from tests.support.operator_kit import Bench, bench

SOURCE = {"source": {"path": "/ckpt/{version}"}}


async def test_creation_sends_each_child_once():
    async with bench() as b:
        admin = await b.serving()
        writes = b.server.writes()
        assert writes[:4] == [
            "POST secrets",
            "PATCH services/qwen",
            "PATCH services/qwen-nodes",
            "POST pods",
        ]
        assert set(writes[4:]) == {"PATCH rolloutreplicas/qwen/status"}
        post = next(r for r in b.server.requests if str(r) == "POST pods")
        assert post.query["fieldValidation"] == "Strict"
        apply = next(r for r in b.server.requests if str(r) == "PATCH services/qwen")
        assert apply.content_type == "application/apply-patch+yaml"
        assert apply.query == {"fieldManager": "rollout-operator", "force": "true"}
        assert [d.generation for d in admin.documents] == [1, 1]
        # the second tells of the fallback that the first commit made
        assert [d.fallback is None for d in admin.documents] == [True, False]
        assert b.status()["weightVersion"] == "base"
        assert b.status()["endpoint"] == "http://qwen.ns.svc:8000"
        assert b.status()["lastCommitted"] == {"version": "base"}
        assert b.condition("Available") == ("True", "Serving")
        for listed in ("pods", "services"):
            lists = [r for r in b.server.requests if str(r) == f"GET {listed}"]
            ours = "app.kubernetes.io/managed-by=rollout-operator"
            assert {r.query.get("labelSelector") for r in lists} == {ours}
        # secrets are never listed
        assert not [r for r in b.server.requests if str(r) == "GET secrets"]


async def test_a_steady_replica_costs_no_request():
    async with bench() as b:
        admin = await b.serving()
        requests, puts = len(b.server.requests), admin.puts
        # kubelet's news that change nothing for us
        for n in range(5):
            b.server.change("pods", "qwen-0", {"metadata": {"annotations": {"n": str(n)}}})
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        assert b.server.requests[requests:] == []
        assert admin.puts == puts


async def test_a_resync_reads_but_does_not_write():
    async with bench(resync_seconds=1) as b:
        b.apply()
        admin = await b.run_pod()
        await b.ready("Serving")
        await asyncio.sleep(1)
        start, puts = len(b.server.requests), admin.puts
        await asyncio.sleep(3)
        assert len(b.server.requests) > start
        assert [str(r) for r in b.server.requests[start:] if r.write] == []
        assert admin.puts == puts


async def test_a_pause_is_one_status_write_and_one_event():
    async with bench() as b:
        admin = await b.serving()
        start = len(b.server.requests)
        b.patch(paused=True)
        await b.ready("Paused")
        await b.quiet()
        assert b.server.writes(start) == ["PATCH rolloutreplicas/qwen/status"]
        assert len([r for r in b.server.requests[start:] if r.write]) == 2
        assert admin.documents[-1].paused
        assert b.condition("Paused") == ("True", "Paused")
        assert b.condition("Available") == ("True", "Serving")
        assert b.status()["phase"] == "Paused"
        b.patch(paused=False)
        await b.ready("Serving")
        assert not admin.documents[-1].paused


async def test_a_weight_update_is_at_most_four_writes():
    async with bench() as b:
        admin = await b.serving(weights=SOURCE)
        start = len(b.server.requests)
        b.patch(weightVersion="step-1", weightStep=1)
        await b.until(lambda: b.status().get("weightVersion") == "step-1")
        await b.quiet()
        assert len([r for r in b.server.requests[start:] if r.write]) <= 4
        document = admin.documents[-1]
        assert document.weights is not None
        assert document.weights.source is not None
        assert document.weights.source.path == "/ckpt/step-1"
        assert document.weights.step == 1
        status = b.status()
        assert status["lastCommitted"] == {
            "version": "step-1",
            "step": 1,
            "source": {"path": "/ckpt/step-1"},
        }
        assert status["weightUpdate"]["phase"] == "Committed"
        assert status["weightUpdate"]["bytes"] == 4096
        # written with the rest, by nobody's extra request
        assert [(u["version"], u["step"], u["by"]) for u in status["history"][:1]] == [
            ("step-1", 1, "kubectl")
        ]
        assert b.condition("WeightsReady") == ("True", "Committed")
        await b.until(lambda: ("Normal", "WeightsCommitted") in b.server.events())


async def test_two_quick_patches_end_in_the_newest():
    async with bench() as b:
        hold = asyncio.Event()
        admin = await b.serving(weights=SOURCE)
        admin.hold = hold
        b.patch(weightVersion="step-1")
        await b.until(lambda: admin.state.phase == "Updating")
        b.patch(weightVersion="step-2")
        b.patch(weightVersion="step-3")
        await b.until(lambda: admin.documents[-1].weights.version == "step-3")
        hold.set()
        await b.until(lambda: b.status().get("weightVersion") == "step-3")
        await b.ready("Serving")
        assert b.server.writes().count("POST pods") == 1


async def test_a_version_that_cannot_be_had_leaves_it_available():
    async with bench() as b:
        await b.serving(weights=SOURCE)
        b.admins[0].missing = {"step-404"}
        b.patch(weightVersion="step-404")
        await b.ready("WeightsUnavailable", "False")
        assert b.condition("Available") == ("True", "Serving")
        assert b.condition("Reconciling") == ("True", "WeightsUnavailable")
        assert b.status()["weightVersion"] == "base"
        ready = next(c for c in b.status()["conditions"] if c["type"] == "Ready")
        assert "/ckpt/step-404: no such folder" in ready["message"]
        await b.until(lambda: ("Warning", "WeightsUnavailable") in b.server.events())
        b.patch(weightVersion="step-2")
        await b.until(lambda: b.condition("Ready") == ("True", "Serving"))
        assert b.status()["weightVersion"] == "step-2"


def series(b: Bench) -> list[str]:
    """The names of what is exported of the replica."""
    assert b.runtime is not None
    return [
        sample.name
        for family in b.runtime.metrics.registry.collect()
        for sample in family.samples
        if sample.labels.get("name") == "qwen"
    ]


async def test_deletion_writes_nothing_and_ends_the_worker():
    async with bench() as b:
        await b.serving()
        assert series(b)
        start = len(b.server.requests)
        b.server.remove("rolloutreplicas", "qwen")
        await b.until(lambda: not b.runtime.metrics.replicas._value.get(), "no worker")
        assert b.server.writes(start) == []
        assert not series(b)
        assert b.runtime.metrics.polls._value.get() == 0


async def test_a_changed_model_rolls_the_pod_after_the_old_one_is_gone():
    async with bench() as b:
        await b.serving()
        old = b.server.get("pods", "qwen-0")
        start = len(b.server.requests)
        b.patch(model="other")
        await b.ready("PodReplacing", "False")
        delete = next(r for r in b.server.requests[start:] if str(r) == "DELETE pods/qwen-0")
        assert delete.body["preconditions"] == {"uid": old["metadata"]["uid"]}
        assert "POST pods" not in b.server.writes(start)
        assert b.condition("Available") == ("False", "NotServing")
        b.server.remove("pods", "qwen-0")
        new = await b.until(lambda: b.server.get("pods", "qwen-0"))
        assert "other" in new["spec"]["containers"][0]["args"]
        assert b.server.writes(start).count("DELETE pods/qwen-0") == 1
        await b.run_pod()
        await b.ready("Serving")


async def test_a_new_default_image_restarts_no_pod():
    async with bench(default_image="pod:1") as b:
        await b.serving()
        await b.stop()
        start = len(b.server.requests)
        await b.start(default_image="pod:2")
        await b.quiet(1)
        assert b.server.writes(start) == []
        assert b.server.get("pods", "qwen-0")["spec"]["containers"][0]["image"] == "pod:1"

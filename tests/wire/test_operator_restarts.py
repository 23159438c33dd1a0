"""What ends pods, as the API server tells of it: condition, count, and what comes after."""

import signal
from pathlib import Path
from typing import Any

import pytest

from rollout_operator.apply import executor
from tests.support.fake_apiserver import Fault, Json, Refused
from tests.support.operator_kit import Bench, bench, running_status
from tests.wire.test_operator_process import process

AT_ONCE = {"backoffSeconds": 0, "backoffLimitSeconds": 0}
LONG_AGO = "2026-01-01T00:00:00Z"


def counts(b: Bench) -> dict[str, int]:
    restarts = b.status().get("restarts") or {}
    return {entry["reason"]: entry["count"] for entry in restarts.get("byReason") or ()}


def fail_pod(b: Bench, **status: Any) -> None:
    gone = {"phase": "Failed", "conditions": [{"type": "Ready", "status": "False"}], **status}
    b.server.change("pods", "qwen-0", {"status": gone})


def deleting(b: Bench) -> bool:
    return bool(
        (b.server.get("pods", "qwen-0") or {"metadata": {}})["metadata"].get("deletionTimestamp")
    )


async def replaced(b: Bench) -> None:
    """Do kubelet's part of a replacement, and serve again."""
    await b.until(lambda: deleting(b))
    old = b.server.get("pods", "qwen-0")
    assert old is not None
    b.server.remove("pods", "qwen-0")
    new = await b.until(lambda: b.server.get("pods", "qwen-0"))
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    await b.run_pod()
    await b.ready("Serving")


async def test_a_quota_is_told_apart_and_the_pod_comes_when_it_allows_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(executor, "FORBIDDEN_RETRY_S", 0.5)
    async with bench() as b:

        def forbid(body: Json) -> None:
            raise Refused(403, "Forbidden", 'pods "qwen-0" is forbidden: exceeded quota: gpus')

        b.server.admit = forbid
        b.apply()
        await b.ready("QuotaExceeded", "False")
        assert "exceeded quota: gpus" in b.message()
        assert b.condition("Reconciling") == ("True", "QuotaExceeded")
        b.server.admit = lambda body: None
        await b.run_pod()
        await b.ready("Serving")
        await b.until(lambda: ("Warning", "QuotaExceeded") in b.server.events())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "Unschedulable"),
        ('0/1 nodes are available: persistentvolumeclaim "ckpt" not found.', "VolumeUnavailable"),
    ],
)
async def test_a_pod_without_a_node_says_what_is_missing_and_goes_on_when_it_is_there(
    words: str, reason: str
):
    async with bench() as b:
        b.apply()
        await b.until(lambda: b.server.get("pods", "qwen-0"))
        waits = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": words,
        }
        b.server.change("pods", "qwen-0", {"status": {"phase": "Pending", "conditions": [waits]}})
        await b.ready(reason, "False")
        assert words in b.message()
        await b.run_pod()
        await b.ready("Serving")
        assert "DELETE pods/qwen-0" not in b.server.writes()


async def test_an_image_that_cannot_be_pulled_is_named_and_mended_by_the_spec():
    async with bench() as b:
        b.apply(image="nowhere/pod:1")
        await b.until(lambda: b.server.get("pods", "qwen-0"))
        status = running_status("", ready=False)
        waiting = {"reason": "ErrImagePull", "message": "nowhere/pod:1: not found"}
        status["initContainerStatuses"][0]["state"] = {"waiting": waiting}
        b.server.change("pods", "qwen-0", {"status": {**status, "phase": "Pending"}})
        await b.ready("ImagePullFailed", "False")
        assert "nowhere/pod:1" in b.message()
        b.patch(image="pod:1")
        await replaced(b)
        assert counts(b) == {}  # a changed spec is no failure


async def test_an_engine_out_of_memory_is_counted_and_comes_back():
    async with bench() as b:
        admin = await b.serving()
        dead = running_status(admin.ip, ready=False)
        terminated = {"exitCode": 137, "reason": "OOMKilled"}
        dead["containerStatuses"][0]["state"] = {"terminated": terminated}
        b.server.change("pods", "qwen-0", {"status": dead})
        await b.ready("OOMKilled", "False")
        assert "limits.memory" in b.message()
        await b.until(lambda: ("Warning", "OOMKilled") in b.server.events())
        back = running_status(admin.ip, restarts=1)
        back["containerStatuses"][0]["lastState"] = {"terminated": terminated}
        b.server.change("pods", "qwen-0", {"status": back})
        await b.ready("Serving")
        assert counts(b) == {"OOMKilled": 1}
        assert b.runtime is not None
        sample = b.runtime.metrics.registry.get_sample_value
        assert sample("rollout_operator_replica_restarts_total", {"reason": "OOMKilled"}) == 1


async def test_a_drained_node_is_no_failure_and_the_pod_moves():
    async with bench() as b:
        await b.serving(restartPolicy={**AT_ONCE, "maxRestarts": 0})
        evicted = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }
        b.server.change("pods", "qwen-0", {"status": {"conditions": [evicted]}})
        b.server.change(
            "pods", "qwen-0", {"metadata": {"deletionTimestamp": "2036-01-01T00:00:00Z"}}
        )
        await b.ready("Evicted", "False")
        assert "Eviction API" in b.message()
        await replaced(b)
        assert counts(b) == {"Evicted": 1}
        assert b.status()["restarts"]["consecutive"] == 0


async def test_a_pod_that_fails_too_often_is_given_up_until_the_spec_changes():
    async with bench() as b:
        await b.serving(restartPolicy={**AT_ONCE, "maxRestarts": 1})
        fail_pod(b, reason="Evicted", message="The node was low on resource: memory.")
        await replaced(b)
        start = len(b.server.requests)
        fail_pod(b, message="and again")
        await b.ready("CrashLoop", "False")
        assert b.condition("Stalled") == ("True", "CrashLoop")
        assert "and again" in b.message()
        assert counts(b) == {"Evicted": 1, "PodFailed": 1}
        await b.quiet()
        # what failed stays, for its log
        assert set(b.server.writes(start)) == {"PATCH rolloutreplicas/qwen/status"}
        # also over a restart of the operator, and when the pod is gone
        await b.stop()
        await b.start()
        b.server.remove("pods", "qwen-0")
        await b.quiet(1)
        assert "POST pods" not in b.server.writes(start)
        assert b.condition("Stalled") == ("True", "CrashLoop")
        b.patch(engineArgs=["--seed=1"])
        await b.run_pod()
        await b.ready("Serving")
        assert b.condition("Stalled") == ("False", "NotStalled")


async def test_killed_between_count_and_replacement_it_neither_forgets_nor_counts_twice(
    tmp_path: Path,
):
    async with process(tmp_path) as operator:
        b = operator.bench
        b.apply(restartPolicy={"backoffSeconds": 2})
        await b.run_pod()
        await b.ready("Serving")
        fail_pod(b)
        await b.until(lambda: counts(b) == {"PodFailed": 1})
        await operator.end(signal.SIGKILL)
        assert not deleting(b)
        await operator.start()
        await replaced(b)
        assert counts(b) == {"PodFailed": 1}
        assert b.server.writes().count("DELETE pods/qwen-0") == 1


def lose(b: Bench, *, ready: str) -> None:
    """The pod should be gone since long, and nobody ends it."""
    ready_condition = {"type": "Ready", "status": ready}
    b.server.put("nodes", {"metadata": {"name": "n"}, "status": {"conditions": [ready_condition]}})
    b.server.change(
        "pods", "qwen-0", {"spec": {"nodeName": "n"}, "metadata": {"deletionTimestamp": LONG_AGO}}
    )


async def test_a_pod_of_a_lost_node_is_deleted_by_force_and_by_uid():
    async with bench() as b:
        await b.serving()
        old = b.server.get("pods", "qwen-0")
        assert old is not None
        start = len(b.server.requests)
        lose(b, ready="Unknown")
        await b.until(
            lambda: (
                (b.server.get("pods", "qwen-0") or old)["metadata"]["uid"] != old["metadata"]["uid"]
            )
        )
        await b.run_pod()
        await b.ready("Serving")
        (body,) = [r.body for r in b.server.requests[start:] if str(r) == "DELETE pods/qwen-0"]
        assert body["gracePeriodSeconds"] == 0
        assert body["preconditions"] == {"uid": old["metadata"]["uid"]}
        assert counts(b) == {"NodeLost": 1}
        # the node is asked before, and the pod is read afresh
        asked = [str(r) for r in b.server.requests[start:]]
        before = asked[: asked.index("DELETE pods/qwen-0")]
        assert "GET nodes/n" in before and "GET pods/qwen-0" in before


@pytest.mark.parametrize(
    ("ready", "reason"), [("Unknown", "NodeLost"), ("False", "NodeLost"), ("True", "Evicted")]
)
async def test_a_taint_ends_a_pod_and_its_node_tells_why(ready: str, reason: str):
    async with bench() as b:
        await b.serving()
        node = {"status": {"conditions": [{"type": "Ready", "status": ready}]}}
        b.server.put("nodes", {"metadata": {"name": "n"}, **node})
        taint = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        start = len(b.server.requests)
        b.server.change(
            "pods",
            "qwen-0",
            {
                "spec": {"nodeName": "n"},
                "metadata": {"deletionTimestamp": "2099-01-01T00:00:00Z"},
                "status": {"conditions": [taint]},
            },
        )
        await b.ready(reason, "False")
        assert counts(b) == {reason: 1}
        await b.quiet(1)
        assert "DELETE pods/qwen-0" not in b.server.writes(start)


@pytest.mark.parametrize("node", ["ready", "forbidden", "in trouble"])
async def test_a_pod_that_lingers_is_left_alone_unless_its_node_is_known_to_be_lost(node: str):
    async with bench() as b:
        await b.serving()
        status = {"forbidden": 403, "in trouble": 500}.get(node)
        if status is not None:
            b.server.faults.append(Fault(lambda r: r.resource == "nodes", status, count=1000))
        start = len(b.server.requests)
        lose(b, ready="True" if node == "ready" else "Unknown")
        await b.ready("PodReplacing", "False")
        await b.until(lambda: "GET nodes/n" in map(str, b.server.requests[start:]))
        await b.quiet(1)
        assert "DELETE pods/qwen-0" not in b.server.writes(start)

"""Replicas of several pods, as the API server tells of them."""

import time
from typing import Any

import pytest

from rollout_operator.api.times import rfc3339
from tests.support.fake_apiserver import Json
from tests.support.operator_kit import Bench, bench, running_status

AT_ONCE = {"backoffSeconds": 0, "backoffLimitSeconds": 0}


def uid(b: Bench, rank: int) -> str:
    found = b.server.get("pods", f"qwen-{rank}")
    return str(found["metadata"]["uid"]) if found else ""


def group(b: Bench, rank: int) -> str:
    found: Json = b.server.get("pods", f"qwen-{rank}") or {"metadata": {"labels": {}}}
    return str(found["metadata"]["labels"].get("rollout.dev/group"))


def deleting(b: Bench, rank: int) -> bool:
    found = b.server.get("pods", f"qwen-{rank}")
    return bool(found and found["metadata"].get("deletionTimestamp"))


def counts(b: Bench) -> dict[str, int]:
    restarts = b.status().get("restarts") or {}
    return {entry["reason"]: entry["count"] for entry in restarts.get("byReason") or ()}


async def serve(b: Bench) -> None:
    """Do kubelet's part for both pods."""
    await b.until(lambda: uid(b, 1) and group(b, 1) == uid(b, 0), "a follower of this head")
    await b.run_pod()
    status = running_status(f"127.0.1.{1 + len(b.admins)}")
    b.server.change("pods", "qwen-1", {"status": status})
    await b.ready("Serving")
    for rank in range(2):
        pod = b.server.get("pods", f"qwen-{rank}")
        assert pod is not None
        container = pod["status"]["containerStatuses"][0]
        started = [{**container, "started": True}]
        b.server.change("pods", f"qwen-{rank}", {"status": {"containerStatuses": started}})


async def gone(b: Bench, *ranks: int) -> None:
    for rank in ranks:
        await b.until(lambda rank=rank: deleting(b, rank), f"the end of rank {rank}")
        b.server.remove("pods", f"qwen-{rank}")


def dead(**terminated: Any) -> Json:
    """As kubelet tells of an engine of a pod that starts nothing again, its sidecar still up."""
    status = running_status("127.0.0.9", ready=False)
    status["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 1, **terminated}}
    return status


async def test_the_document_goes_to_the_head_alone_and_the_status_shows_both() -> None:
    async with bench() as b:
        b.apply(nodes=2)
        await serve(b)
        assert [(p["name"], p["rank"], p["ready"]) for p in b.status()["pods"]] == [
            ("qwen-0", 0, True), ("qwen-1", 1, True),
        ]  # fmt: skip
        b.patch(paused=True)
        await b.ready("Paused")
        assert len(b.admins) == 1
        assert b.admins[0].documents[-1].paused
        await b.quiet()
        creates = [w for w in b.server.writes() if w.startswith("POST pods")]
        assert len(creates) == 2


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_death_of_one_pod_replaces_both_and_the_old_ones_are_gone_first(
    rank: int,
) -> None:
    async with bench() as b:
        b.apply(nodes=2, restartPolicy=AT_ONCE)
        await serve(b)
        old = [uid(b, 0), uid(b, 1)]
        b.server.change("pods", f"qwen-{rank}", {"status": dead(reason="Error")})
        await b.until(lambda: deleting(b, 0) and deleting(b, 1))
        assert counts(b) == {"EngineFailed": 1}
        b.server.remove("pods", "qwen-0")
        # the head's name is free, and still nobody takes it
        await b.quiet()
        assert uid(b, 0) == ""
        b.server.remove("pods", "qwen-1")
        await serve(b)
        assert {uid(b, 0), uid(b, 1)}.isdisjoint(old)
        assert counts(b) == {"EngineFailed": 1}


async def test_an_eviction_of_one_pod_drains_both_and_is_no_failure() -> None:
    async with bench() as b:
        b.apply(nodes=2, restartPolicy={**AT_ONCE, "maxRestarts": 0})
        await serve(b)
        evicted = {
            "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
            "message": "evicting",
        }  # fmt: skip
        pod = b.server.get("pods", "qwen-1")
        assert pod is not None
        conditions = [*pod["status"]["conditions"], evicted]
        b.server.change(
            "pods", "qwen-1",
            {"metadata": {"deletionTimestamp": "2099-01-01T00:00:00Z"},
             "status": {"conditions": conditions}},
        )  # fmt: skip
        await gone(b, 0, 1)
        await serve(b)
        assert counts(b) == {"Evicted": 1}


async def test_a_node_that_shuts_down_is_the_cause_although_its_pod_tells_last() -> None:
    """Kubelet deletes nothing then, and the head has drained before the other one is over."""
    async with bench() as b:
        b.apply(nodes=2, restartPolicy={**AT_ONCE, "maxRestarts": 0})
        await serve(b)
        ended = dead(exitCode=0, finishedAt=rfc3339(time.time()))
        b.server.change("pods", "qwen-0", {"status": ended})
        await b.ready("PodReplacing", "False")
        assert counts(b) == {}
        assert not deleting(b, 1)
        cause = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        over = {**ended, "phase": "Failed", "reason": "Terminated", "conditions": [cause]}
        b.server.change("pods", "qwen-1", {"status": over})
        await b.ready("NodeShutdown", "False")
        assert counts(b) == {"NodeShutdown": 1}


async def test_a_pod_that_vanished_while_no_operator_ran_replaces_the_group() -> None:
    async with bench() as b:
        b.apply(nodes=2, restartPolicy=AT_ONCE)
        await serve(b)
        old = uid(b, 0)
        await b.stop()
        b.server.remove("pods", "qwen-1")
        await b.start()
        await gone(b, 0)
        await serve(b)
        assert uid(b, 0) != old
        assert counts(b) == {"NodePodGone": 1}


async def test_a_follower_of_an_earlier_head_never_joins_a_later_one() -> None:
    """Its name outlives its head: it goes before the next head comes, by its uid."""
    async with bench() as b:
        b.apply(nodes=2, restartPolicy=AT_ONCE)
        await serve(b)
        stale = uid(b, 1)
        await b.stop()
        b.server.remove("pods", "qwen-0")
        await b.start()
        await b.until(lambda: deleting(b, 1))
        await b.quiet()
        assert (uid(b, 0), uid(b, 1)) == ("", stale)
        b.server.remove("pods", "qwen-1")
        await serve(b)

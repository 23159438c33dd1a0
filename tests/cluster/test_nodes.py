"""examples/multi-node.yaml as it stands: two pods, one engine; what it does, and the death of each."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.client import Cluster
from tests.support.engine_kit import prompts
from tests.support.replica import (
    ROOT,
    Replica,
    checkpoints,
    container_pids,
    in_flight,
    install_operator,
)

UP_S = 200.0


@pytest.fixture
def data(cluster: Cluster) -> Iterator[Path]:
    with checkpoints(cluster, "nodes", ("base", "step-1")) as folder:
        yield folder


def manifest(data: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "multi-node.yaml").read_text())
    found["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"] = str(data)
    found["spec"]["restartPolicy"] = {"backoffSeconds": 0, "backoffLimitSeconds": 0}
    found["spec"]["drainTimeoutSeconds"] = 0
    return found


def pods(replica: Replica) -> dict[str, str]:
    """Uids by name."""
    text = replica.kubectl(
        "get", "pods", "-l", f"rollout.dev/replica={replica.name}",
        "-o", "jsonpath={range .items[*]}{.metadata.name}={.metadata.uid} {end}",
    )  # fmt: skip
    return dict(pair.split("=") for pair in text.split())


def kill(replica: Replica, rank: int) -> None:
    """SIGKILL the engine's first process, as the kernel does when memory is out."""
    pod = replica.cluster.get("pod", f"{replica.name}-{rank}", replica.namespace)
    (found,) = [c for c in pod["status"]["containerStatuses"] if c["name"] == "engine"]
    os.kill(container_pids(found["containerID"])[0], signal.SIGKILL)


def follow_the_groups(replica: Replica, old: dict[str, str], timeout_s: float) -> dict[str, str]:
    """Wait for the next group; on the way no pod of it is seen beside one of the old."""

    def look() -> dict[str, str] | None:
        now = pods(replica)
        fresh = {name: uid for name, uid in now.items() if uid not in old.values()}
        assert not fresh or len(fresh) == len(now), f"{now} while {old} is still there"
        return fresh if len(fresh) == len(old) else None

    found = replica.cluster.wait(look, timeout_s, "the next group", namespace=replica.namespace)
    assert found is not None
    return found


def failures(replica: Replica) -> int:
    found = replica.get()["status"].get("restarts") or {}
    return sum(entry["count"] for entry in found.get("byReason", ()))


@pytest.mark.timeout(600, func_only=True)
async def test_two_pods_are_one_engine_and_live_and_die_as_one(
    cluster: Cluster, namespace: str, data: Path
) -> None:
    install_operator(cluster, namespace)
    replica = Replica(cluster, namespace, data, name="wide")
    replica.kubectl("apply", "-f", "-", input=json.dumps(manifest(data)))
    replica.serving("base", timeout_s=UP_S)
    first = pods(replica)
    assert sorted(first) == ["wide-0", "wide-1"]
    follower = cluster.get("pod", "wide-1", namespace)
    assert follower["metadata"]["labels"]["rollout.dev/group"] == first["wide-0"]
    asked = prompts(1)[0]
    assert replica.is_greedy("base", asked, await replica.generate(asked, 24))

    # an update, with a request under way, is committed when both ranks hold it
    async with replica.client() as client:
        under_way = asyncio.create_task(
            client.generate(asked, {"temperature": 0, "ignore_eos": True, "max_tokens": 600})
        )
        await in_flight(replica, 1)
        replica.patch(weightVersion="step-1")
        status = await asyncio.to_thread(replica.serving, "step-1", timeout_s=60)
        rollout = await under_way
    assert {span.version for span in rollout.weight_versions} == {"base", "step-1"}
    assert len(rollout.token_ids) == 600
    assert status["lastCommitted"]["version"] == "step-1"
    assert [(p["rank"], p["ready"], p["weightVersion"]) for p in status["pods"]] == [
        (0, True, "step-1"), (1, True, "step-1"),
    ]  # fmt: skip
    assert replica.is_greedy("step-1", asked, await replica.generate(asked, 24))

    replica.patch(paused=True)
    replica.until_condition("Ready", "True", "Paused")
    replica.patch(paused=False)
    replica.serving("step-1", timeout_s=30)

    # one rank dies: all pods go, by their uids, before the next head comes, which knows the version
    kill(replica, 1)
    second = follow_the_groups(replica, first, 90)
    replica.serving("step-1", timeout_s=UP_S)
    assert replica.is_greedy("step-1", asked, await replica.generate(asked, 24))
    assert failures(replica) == 1

    kill(replica, 0)
    follow_the_groups(replica, second, 90)
    assert failures(replica) == 2
    assert pods(replica)["wide-0"] != second["wide-0"]

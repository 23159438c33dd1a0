"""A node that hangs with all that runs on it: its replica is said to be lost, moves, and nothing is
doubled when the node comes back.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster.client import Cluster
from devcluster.settings import FIRST, SECOND, Settings
from tests.support.devcluster import frozen, must
from tests.support.engine_kit import prompts
from tests.support.replica import (
    GREEDY,
    Replica,
    checkpoints,
    container_pids,
    in_flight,
    operator_site,
)

TOKENS = 3000
# the controllers call a node lost after 50 s without a word; 2 s later its taint ends the pod, which
# has 16 s to go and a minute more
LOST_S = 90.0
GIVEN_UP_S = 120.0


@pytest.fixture(scope="module")
def data(cluster: Cluster) -> Iterator[Path]:
    with checkpoints(cluster, "lost", ("base",)) as folder:
        yield folder


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Iterator[str]:
    """A namespace with the operators in it, which are on the first node: there is no other."""
    with operator_site(cluster, "lost") as name:
        yield name


@pytest.fixture
def second(settings: Settings, cluster: Cluster, site: str) -> Iterator[str]:
    """A second node."""
    if settings.external:
        pytest.skip("DEVCLUSTER=external: the processes of its nodes are not ours to stop")
    must("node", "add")
    # the controllers take the taint of its beginning away a moment later: it would end the pod
    cluster.wait(lambda: not cluster.get("node", SECOND.name)["spec"].get("taints"), 30, "no taint")
    yield SECOND.name
    must("node", "remove")


def on_second(replica: Replica) -> dict[str, Any]:
    """It prefers the second node, and leaves a lost one at once."""
    preference = {"key": "kubernetes.io/hostname", "operator": "In", "values": [SECOND.name]}
    terms = [{"weight": 100, "preference": {"matchExpressions": [preference]}}]
    template: dict[str, Any] = replica.manifest()["spec"]["template"]
    template["spec"] |= {
        "affinity": {
            "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms},
        },
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{state}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 2,
            }
            for state in ("not-ready", "unreachable")
        ],
    }
    return {"template": template, "drainTimeoutSeconds": 1, "restartPolicy": {"maxRestarts": 0}}


def served_by(replica: Replica) -> list[str]:
    """The pods behind the replica's Service, by uid."""
    found = json.loads(
        replica.kubectl(
            *("get", "endpointslices", "-o", "json"),
            *("-l", f"kubernetes.io/service-name={replica.name}"),
        )
    )
    return [
        end["targetRef"]["uid"]
        for piece in found["items"]
        for end in piece["endpoints"] or ()
        if end["conditions"].get("ready")
    ]


def pods(replica: Replica) -> list[str]:
    text = replica.kubectl("get", "pods", "-l", f"rollout.dev/replica={replica.name}", "-o", "json")
    return [pod["metadata"]["uid"] for pod in json.loads(text)["items"]]


def containers(pod: dict[str, Any]) -> list[int]:
    """The processes in a pod's containers."""
    status = pod["status"]
    found = [*status["containerStatuses"], *status["initContainerStatuses"]]
    return [pid for container in found for pid in container_pids(container["containerID"])]


@pytest.mark.slow  # five minutes, in which the controllers and the operator wait
@pytest.mark.timeout(480, func_only=True)
async def test_a_replica_leaves_a_lost_node_and_nothing_is_doubled_when_it_comes_back(
    cluster: Cluster, settings: Settings, site: str, data: Path, second: str
) -> None:
    replica = Replica(cluster, site, data)
    try:
        await _lose_and_find(cluster, settings, replica, second)
    except BaseException:
        print(cluster.dump(site))
        raise
    finally:
        replica.kubectl("delete", "rr", replica.name, "--ignore-not-found")
        cluster.wait(lambda: not pods(replica), 60, "the replica's pod to be gone")


async def _lose_and_find(
    cluster: Cluster, settings: Settings, replica: Replica, second: str
) -> None:
    replica.apply(on_second(replica))
    replica.serving("base")
    old = replica.pod()
    assert old["spec"]["nodeName"] == second
    assert served_by(replica) == [old["metadata"]["uid"]]
    ran = containers(old)
    assert ran
    prompt = prompts(1)[0]
    async with replica.client() as client:
        sampling = GREEDY | {"max_tokens": TOKENS}
        rollout = asyncio.create_task(client.generate(prompt, sampling, deadline_s=400))
        await in_flight(replica, 1)
        with frozen(settings, SECOND):
            await asyncio.to_thread(_watch_it_go, replica, old)
            done = await rollout
            new = replica.pod()["metadata"]["uid"]
            assert served_by(replica) == pods(replica) == [new]
            assert set(containers(old)) == set(ran), "the old pod still stands there"
    assert done.attempts > 1 and len(done.token_ids) == TOKENS
    assert replica.is_greedy("base", prompt, done), "the new pod went on from the partial"

    # its connections died while it hung: kubelet finds that out after 45 s, and tries again
    cluster.wait(lambda: _is_ready(cluster, second), 120, f"node {second} to be back")
    cluster.wait(lambda: not containers(old), 60, "what is left of the old pod to end")
    assert served_by(replica) == pods(replica) == [new]
    status = replica.serving("base")
    assert {entry["reason"]: entry["count"] for entry in status["restarts"]["byReason"]} == {
        "NodeLost": 1
    }
    assert status["restarts"]["consecutive"] == 0


def _watch_it_go(replica: Replica, old: dict[str, Any]) -> None:
    """Until another pod serves, on the node that is left."""
    node, seen = old["spec"]["nodeName"], list[dict[str, Any]]()

    def lost() -> bool:
        seen.append(replica.condition("Ready"))
        return seen[-1].get("reason") == "NodeLost"

    replica.cluster.wait(lost, LOST_S, "the reason NodeLost")
    assert f"its node {node} is lost" in seen[-1]["message"]
    # before, who hears it sooner decides: the operator that no poll ends, or the controllers
    before = {(found["status"], found["reason"]) for found in seen[:-1]}
    assert before <= {
        ("True", "Serving"),
        ("Unknown", "PodUnreachable"),
        ("False", "PodUnreachable"),
        ("False", "ReadinessPending"),
    }, before
    assert replica.pod()["metadata"]["uid"] == old["metadata"]["uid"], "not before its time"
    assert served_by(replica) == [], "nobody is sent there"
    replica.cluster.wait(
        lambda: replica.pod()["metadata"]["uid"] != old["metadata"]["uid"],
        GIVEN_UP_S,
        "the pod to be given up and made anew",
        namespace=replica.namespace,
    )
    replica.serving("base")
    assert replica.pod()["spec"]["nodeName"] == FIRST.name
    selector = f"--field-selector=involvedObject.name={replica.name}"
    told = replica.kubectl("get", "events", selector, "-o", "jsonpath={.items[*].reason}")
    assert "NodeLost" in told.split()


def _is_ready(cluster: Cluster, node: str) -> bool:
    conditions = cluster.get("node", node)["status"]["conditions"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

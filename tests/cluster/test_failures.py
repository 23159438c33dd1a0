"""What a cluster does to a replica, done by the real thing: named, counted, and recovered from."""

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster.client import Cluster
from tests.support.engine_kit import prompts
from tests.support.replica import Replica, checkpoints, in_flight, operator_site

CLAIM = "late-claim"
LABEL = "rollout.dev/test-late"
SOON_S = 120


@pytest.fixture(scope="module")
def data(cluster: Cluster) -> Iterator[Path]:
    with checkpoints(cluster, "failures", ("base",)) as folder:
        yield folder


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Iterator[str]:
    """A namespace with the operator in it."""
    with operator_site(cluster, "failures") as name:
        yield name


@pytest.fixture
def replica(
    cluster: Cluster, site: str, data: Path, request: pytest.FixtureRequest
) -> Iterator[Replica]:
    """Not applied yet; its state is in the report of a failed test."""
    made = Replica(cluster, site, data, name=f"r{uuid.uuid4().hex[:6]}")
    failed = request.session.testsfailed
    yield made
    if request.session.testsfailed > failed:
        print(cluster.dump(site))
    made.kubectl("delete", "rr", made.name, "--ignore-not-found")
    cluster.wait(
        lambda: (
            not made.kubectl("get", "pods", "-l", f"rollout.dev/replica={made.name}", "-o", "name")
        ),
        90,
        "the replica's pod to be gone",
    )


def template(replica: Replica, **pod_spec: Any) -> dict[str, Any]:
    """The example's template with more in its pod spec; a list is added to."""
    found: dict[str, Any] = replica.manifest()["spec"]["template"]
    for key, value in pod_spec.items():
        more = isinstance(value, list)
        found["spec"][key] = [*found["spec"].get(key, ()), *value] if more else value
    return found


def limited(replica: Replica, memory: str) -> dict[str, Any]:
    found = template(replica)
    engine = found["spec"]["containers"][0]
    engine["resources"] = {"requests": {"memory": memory}, "limits": {"memory": memory}}
    return found


def restarts(replica: Replica) -> dict[str, int]:
    found = replica.get()["status"].get("restarts") or {}
    return {entry["reason"]: entry["count"] for entry in found.get("byReason", ())}


def test_whatever_keeps_a_pod_away_is_named_and_it_comes_when_that_is_mended(
    cluster: Cluster, replica: Replica
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "full"},
        "spec": {"hard": {"pods": "1"}},  # the operator's
    }
    replica.kubectl("apply", "-f", "-", input=json.dumps(quota))
    cluster.wait(
        lambda: cluster.get("resourcequota", "full", replica.namespace)["status"].get("used"),
        30,
        "the quota to count",
    )
    replica.apply({"image": "localhost/rollout-nowhere:1"})
    forbidden = replica.until_condition("Ready", "False", "QuotaExceeded", timeout_s=SOON_S)
    assert "exceeded quota: full" in forbidden["message"]
    replica.kubectl("delete", "resourcequota", "full")
    unpulled = replica.until_condition("Ready", "False", "ImagePullFailed", timeout_s=SOON_S)
    assert "localhost/rollout-nowhere:1" in unpulled["message"]

    claim = [{"name": "late", "persistentVolumeClaim": {"claimName": CLAIM}}]
    replica.apply(
        {"template": template(replica, volumes=claim, nodeSelector={LABEL: replica.name})}
    )
    replica.patch(image=None)
    missing = replica.until_condition("Ready", "False", "VolumeUnavailable", timeout_s=SOON_S)
    assert CLAIM in missing["message"]
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{replica.namespace}-late"},
        "spec": {
            "capacity": {"storage": "1Mi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": "",
            "hostPath": {"path": str(replica.data)},
        },
    }
    asked = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM},
        "spec": {
            "storageClassName": "",
            "volumeName": f"{replica.namespace}-late",
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Mi"}},
        },
    }
    cluster.kubectl("apply", "-f", "-", input=json.dumps(volume))
    try:
        replica.kubectl("apply", "-f", "-", input=json.dumps(asked))
        nowhere = replica.until_condition("Ready", "False", "Unschedulable", timeout_s=SOON_S)
        assert "node affinity/selector" in nowhere["message"]
        uid = replica.pod()["metadata"]["uid"]
        node = cluster.kubectl("get", "nodes", "-o", "jsonpath={.items[0].metadata.name}")
        cluster.kubectl("label", "node", node, f"{LABEL}={replica.name}")
        replica.serving("base")
        assert replica.pod()["metadata"]["uid"] == uid
        assert restarts(replica) == {}, "what never ran has not failed"
        cluster.kubectl("label", "node", node, f"{LABEL}-")
    finally:
        cluster.kubectl("delete", "pv", f"{replica.namespace}-late", "--wait=false")


def test_a_drained_node_moves_the_replica(cluster: Cluster, replica: Replica) -> None:
    replica.apply({"restartPolicy": {"maxRestarts": 0}})
    replica.serving("base")
    old = replica.pod()
    node = old["spec"]["nodeName"]
    try:
        cluster.kubectl(
            *("drain", node, f"--pod-selector=rollout.dev/replica={replica.name}"),
            *("--force", "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=60s"),
        )
        waits = replica.until_condition("Ready", "False", "Unschedulable", timeout_s=SOON_S)
        assert "unschedulable" in waits["message"]
        assert restarts(replica) == {"Evicted": 1}
    finally:
        cluster.kubectl("uncordon", node)
    replica.serving("base")
    assert replica.pod()["metadata"]["uid"] != old["metadata"]["uid"]
    assert replica.get()["status"]["restarts"]["consecutive"] == 0
    events = replica.kubectl("get", "events", "-o", "jsonpath={.items[*].reason}").split()
    assert "Evicted" in events


def test_an_engine_that_does_not_fit_its_memory_is_given_up_and_comes_back_with_more(
    cluster: Cluster, replica: Replica
) -> None:
    replica.apply({"template": limited(replica, "32Mi"), "restartPolicy": {"maxRestarts": 1}})
    killed = replica.until_condition("Ready", "False", "OOMKilled", timeout_s=90)
    assert "limits.memory" in killed["message"]
    stalled = replica.until_condition("Stalled", "True", "CrashLoop", timeout_s=90)
    assert "OOMKilled" in stalled["message"]
    assert restarts(replica)["OOMKilled"] >= 2
    cluster.wait(
        lambda: not replica.kubectl("get", "pod", f"{replica.name}-0", "--ignore-not-found"),
        60,
        "the pod to free what it held",
    )
    replica.apply({"template": template(replica), "restartPolicy": {"maxRestarts": 1}})
    replica.serving("base")
    assert replica.condition("Stalled")["status"] == "False"


async def test_a_changed_spec_rolls_with_a_drain_and_a_revert_meanwhile_does_no_harm(
    cluster: Cluster, replica: Replica
) -> None:
    replica.apply()
    replica.serving("base")
    old = replica.pod()["metadata"]["uid"]
    async with replica.client() as client:
        task = asyncio.create_task(
            client.generate(
                prompts(1)[0],
                {"temperature": 0, "ignore_eos": True, "max_tokens": 1500},
                deadline_s=60,
            )
        )
        await in_flight(replica, 1)
        replica.patch(loadTimeoutSeconds=301)
        await asyncio.to_thread(
            cluster.wait,
            lambda: replica.pod()["metadata"].get("deletionTimestamp"),
            30,
            "the old pod to be asked to stop",
        )
        replica.patch(loadTimeoutSeconds=300)
        rollout = await task
    assert len(rollout.token_ids) == 1500 and rollout.attempts == 1, "cut instead of drained"
    replica.serving("base")
    assert replica.pod()["metadata"]["uid"] != old
    assert restarts(replica) == {}, "a wish is no failure"
    selector = f"--field-selector=involvedObject.name={replica.name}"
    told = replica.kubectl("get", "events", selector, "-o", "jsonpath={.items[*].reason}")
    assert told.split().count("PodReplacing") == 1, "the revert was rolled once more"

"""Every rule of the CRD, by the real API server: what it accepts and rejects, in what words."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster.client import Cluster, CommandError

FILE = Path(__file__).parents[2] / "crds" / "rolloutreplica.yaml"
NAME = "rolloutreplicas.rollout.dev"
SOURCE = {"source": {"path": "/ckpt/{version}"}}
URL = {"source": {"url": "s3://bucket/run/{version}", "secretRef": {"name": "creds"}}}


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[Cluster]:
    """The kind as this working copy has it.

    Taken away again only if it was not there before and nobody has come to use it since: with
    the kind all replicas of all namespaces go.
    """
    found = bool(cluster.kubectl("get", "crd", NAME, "--ignore-not-found", "-o", "name"))
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(FILE))
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{NAME}", "--timeout=30s")
    yield cluster
    if not found and not _in_use(cluster):
        cluster.kubectl("delete", "crd", NAME)


def _in_use(cluster: Cluster) -> bool:
    labels = cluster.get("crd", NAME)["metadata"].get("labels") or {}
    adopted = labels.get("app.kubernetes.io/managed-by") == "Helm"
    return adopted or bool(cluster.kubectl("get", NAME, "-A", "-o", "name"))


def create(cluster: Cluster, spec: dict[str, Any], name: str = "qwen") -> dict[str, Any]:
    body = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutReplica",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }
    made: dict[str, Any] = json.loads(
        cluster.kubectl(
            *("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-"),
            input=json.dumps(body),
        )
    )
    return made


def test_defaults_are_filled_in(served: Cluster):
    assert create(served, {"model": "m"})["spec"] == {
        "model": "m",
        "engine": "vllm",
        "engineArgs": [],
        "gpus": 0,
        "nodes": 1,
        "loadTimeoutSeconds": 3600,
        "weights": {
            "hostMemory": "16Gi",
            "staging": "Host",
            "transport": "Auto",
            "bucketSize": "256Mi",
            "timeoutSeconds": 600,
            "maxAttempts": 3,
        },
        "drainTimeoutSeconds": 30,
        "restartPolicy": {
            "backoffSeconds": 10,
            "backoffLimitSeconds": 600,
            "resetAfterSeconds": 600,
            "maxRestarts": 10,
        },
        "template": {},
        "paused": False,
        "interruption": {"mode": "Abort", "timeoutSeconds": 60},
    }


def test_a_sleep_is_of_everything_at_level_1(served: Cluster):
    made = create(served, {"model": "m", "sleep": {}})
    assert made["spec"]["sleep"] == {"level": 1, "tags": ["weights", "kv_cache"]}


@pytest.mark.parametrize(
    "spec",
    [
        {"image": "x:1", "engineArgs": ["--seed=1"] * 256, "gpus": 64},
        {"engine": "sg-lang_0.5"},
        {"weightVersion": "step-1", "weights": SOURCE},
        {"weightVersion": "Step_1.0", "weightStep": 0, "weights": SOURCE},
        {"weightVersion": "a", "weights": {"source": {"path": "/c/{version}/x-{version}"}}},
        {"weightVersion": "step-1", "weights": {"source": {"path": "/ckpt/step-1"}}},
        {"weights": {"source": {"path": "/ckpt/anything"}}},
        {"weightVersion": "step-1", "weights": URL},
        {"weightVersion": "step-1", "weights": {"source": {"url": "https://h:8443/run/step-1"}}},
        {"weightVersion": "step-1", "weights": {"source": {"url": "hf://org/tiny@step-1"}}},
        {"weightVersion": "step-1", "weights": {"source": {"url": "gs://b/{version}/model"}}},
        {"weights": {"source": {"url": "http://store.ns.svc/a"}}},
        {"weights": {"source": {"url": "s3://" + "b" * 2043}}},
        {"weights": {"hostMemory": 1048576, "bucketSize": 4096}},
        {"weights": {"hostMemory": "1.5Gi", "bucketSize": "16Gi"}},
        {"weights": {"hostMemory": "16Ti", "bucketSize": "4Ki"}},
        {"gpus": 1, "weights": {"staging": "Device"}},
        {"nodes": 64, "gpus": 8, "weights": {"source": {"url": "s3://b/{version}"}}},
        {"nodes": 1, "engine": "other", "weights": {"source": {"push": {}}}},
        {"template": {"metadata": {"labels": {"a": "b"}}, "spec": {"whatever": [1, {"x": None}]}}},
        {"drainTimeoutSeconds": 0, "interruption": {"mode": "Abort", "timeoutSeconds": 3600}},
        {"interruption": {"mode": "Keep"}},
        {"interruption": {"mode": "Drain", "timeoutSeconds": 1}},
        {"paused": True},
        {"sleep": {}},
        {"sleep": {"level": 2, "tags": ["kv_cache", "weights"]}},
        {"restartPolicy": {"maxRestarts": 0}},
        {"restartPolicy": {"backoffSeconds": 0, "backoffLimitSeconds": 0}},
        {"weightVersion": "step-1", "weights": {"source": {"push": {}}}},
        {"weights": {"source": {"push": {}}, "transport": "CUDAIPC"}},
    ],
)
def test_accepted(served: Cluster, spec: dict[str, Any]):
    create(served, {"model": "m", **spec})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": ""}, "spec.model"),
        ({"model": None}, "spec.model"),
        ({"image": ""}, "spec.image"),
        ({"engine": ""}, "spec.engine"),
        ({"engine": "-x"}, "spec.engine"),
        ({"engine": "a b"}, "spec.engine"),
        ({"engine": "x" * 64}, "spec.engine"),
        ({"engineArgs": ["x"] * 257}, "spec.engineArgs"),
        ({"engineArgs": ["x" * 4097]}, "spec.engineArgs[0]"),
        ({"gpus": -1}, "spec.gpus"),
        ({"gpus": 65}, "spec.gpus"),
        ({"gpus": 1.5}, "spec.gpus"),
        ({"loadTimeoutSeconds": 0}, "spec.loadTimeoutSeconds"),
        ({"loadTimeoutSeconds": 86401}, "spec.loadTimeoutSeconds"),
        ({"drainTimeoutSeconds": -1}, "spec.drainTimeoutSeconds"),
        ({"sleep": {"level": 0}}, "spec.sleep.level"),
        ({"sleep": {"level": 3}}, "spec.sleep.level"),
        ({"sleep": {"tags": []}}, "spec.sleep.tags"),
        ({"sleep": {"tags": ["kv_cache", "kv_cache"]}}, "Duplicate value"),
        ({"sleep": {"tags": ["scheduling"]}}, '"weights", "kv_cache"'),
        ({"weights": {"transport": "Pigeon"}}, '"Auto", "SharedMemory"'),
        ({"weights": {"staging": "Disk"}}, '"Host", "Device"'),
        ({"weights": {"staging": "Device"}}, "weights.staging Device needs gpus"),
        ({"nodes": 0}, "spec.nodes"),
        ({"nodes": 65}, "spec.nodes"),
        ({"nodes": 2, "engine": "other"}, "nodes above 1 needs engine vllm"),
        (
            {"nodes": 2, "gpus": 1, "weights": {"staging": "Device"}},
            "weights.staging Device works with nodes 1 only",
        ),
        (
            {"nodes": 2, "weights": {"source": {"push": {}}}},
            "weights.source.push works with nodes 1 only",
        ),
        ({"weights": {"hostMemory": "lots"}}, "spec.weights.hostMemory"),
        ({"weights": {"hostMemory": "17Ti"}}, "hostMemory must be from 1 byte to 16Ti"),
        ({"weights": {"hostMemory": 0}}, "hostMemory must be from 1 byte to 16Ti"),
        ({"weights": {"bucketSize": "1Ki"}}, "bucketSize must be from 4Ki to 16Gi"),
        ({"weights": {"bucketSize": "17Gi"}}, "bucketSize must be from 4Ki to 16Gi"),
        ({"weights": {"timeoutSeconds": 0}}, "spec.weights.timeoutSeconds"),
        ({"weights": {"maxAttempts": 0}}, "spec.weights.maxAttempts"),
        ({"weights": {"source": {}}}, "set exactly one source: path, url or push"),
        ({"weights": {"source": {"path": "/a", "push": {}}}}, "set exactly one source"),
        ({"weights": {"transport": "CUDAIPC"}}, "transport CUDAIPC needs source.push"),
        (
            {"weights": {"transport": "CUDAIPC", "source": {"url": "s3://b/{version}"}}},
            "transport CUDAIPC needs source.push",
        ),
        (
            {"weights": {"source": {"push": {}, "secretRef": {"name": "s"}}}},
            "secretRef holds credentials for url",
        ),
        ({"weights": {"source": {"path": "/a", "url": "s3://b"}}}, "set exactly one source"),
        ({"weights": {"source": {"url": "ftp://h/v"}}}, "spec.weights.source.url"),
        ({"weights": {"source": {"url": "https://u:p@h/v"}}}, "spec.weights.source.url"),
        ({"weights": {"source": {"url": "https://h/v?sig=x"}}}, "spec.weights.source.url"),
        ({"weights": {"source": {"url": "s3://" + "b" * 2044}}}, "spec.weights.source.url"),
        (
            {"weights": {"source": {"url": "s3://b/{step}"}}},
            "the only placeholder that url may hold is {version}",
        ),
        (
            {"weights": {"source": {"path": "/a", "secretRef": {"name": "s"}}}},
            "secretRef holds credentials for url",
        ),
        ({"weights": {"source": {"url": "s3://b", "secretRef": {}}}}, "secretRef.name"),
        (
            {"weightVersion": "step-2", "weights": {"source": {"url": "hf://o/r@step-1"}}},
            "weights.source.url must contain {version}",
        ),
        ({"weights": {"source": {"path": ""}}}, "spec.weights.source.path"),
        ({"weights": {"source": {"path": "ckpt/{version}"}}}, "path must be absolute"),
        (
            {"weights": {"source": {"path": "/{step}/{version}"}}},
            "the only placeholder that path may hold is {version}",
        ),
        ({"weightVersion": "step-1"}, "weightVersion needs weights.source"),
        ({"weightVersion": "base", "weights": SOURCE}, "base is the name of the model's own"),
        ({"weightVersion": "a/b", "weights": SOURCE}, "spec.weightVersion"),
        ({"weightVersion": "..", "weights": SOURCE}, "spec.weightVersion"),
        ({"weightVersion": "-a", "weights": SOURCE}, "spec.weightVersion"),
        ({"weightVersion": "a" * 129, "weights": SOURCE}, "spec.weightVersion"),
        (
            {"weightVersion": "step-2", "weights": {"source": {"path": "/ckpt/step-1"}}},
            "one folder cannot hold two versions",
        ),
        ({"weightStep": 1}, "weightStep counts a weightVersion"),
        ({"weightVersion": "a", "weightStep": -1, "weights": SOURCE}, "spec.weightStep"),
        ({"interruption": {"mode": "Hold"}}, '"Abort"'),
        ({"interruption": {"timeoutSeconds": 0}}, "spec.interruption.timeoutSeconds"),
        ({"restartPolicy": {"maxRestarts": -1}}, "spec.restartPolicy.maxRestarts"),
        ({"restartPolicy": {"resetAfterSeconds": 0}}, "spec.restartPolicy.resetAfterSeconds"),
        (
            {"restartPolicy": {"backoffSeconds": 20, "backoffLimitSeconds": 10}},
            "backoffSeconds must not be larger than backoffLimitSeconds",
        ),
        ({"template": []}, "spec.template"),
        ({"paused": "yes"}, "spec.paused"),
        ({"nap": {"level": 1}}, 'unknown field "spec.nap"'),
    ],
)
def test_rejected(served: Cluster, spec: dict[str, Any], words: str):
    with pytest.raises(CommandError) as caught:
        create(served, {"model": "m", **spec})
    assert words in caught.value.output


@pytest.mark.parametrize("name", ["q", "qwen-3", "a" * 52])
def test_names_accepted(served: Cluster, name: str):
    create(served, {"model": "m"}, name)


@pytest.mark.parametrize("name", ["3qwen", "qwen.3", "a" * 53])
def test_names_rejected(served: Cluster, name: str):
    with pytest.raises(CommandError) as caught:
        create(served, {"model": "m"}, name)
    assert "metadata.name also names a Service and its pods" in caught.value.output


def test_every_status_field_survives(served: Cluster, namespace: str):
    """Nothing that the operator writes is pruned."""
    status = {
        "observedGeneration": 1,
        "phase": "Serving",
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Serving",
                "message": "",
                "observedGeneration": 1,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
        "weightVersion": "step-1",
        "lastCommitted": {"version": "step-1", "step": 1, "source": {"url": "s3://b/step-1"}},
        "weightUpdate": {
            "target": "step-1",
            "phase": "Committed",
            "attempt": 1,
            "startedAt": "2026-01-01T00:00:00Z",
            "finishedAt": "2026-01-01T00:00:01Z",
            "pausedSeconds": 0.36,
            "seconds": {
                "prefetch": 3.1,
                "cancel": 0.03,
                "transfer": 0.3,
                "commit": 0.01,
                "steps": {"first": 0.01, "load": 0.2},
            },
            "bytes": 16381470720,
            "transport": "shared_memory",
            "mode": "bucketed",
            "path": "replayed",
            "note": "",
            "message": "",
        },
        "endpoint": f"http://qwen.{namespace}.svc:8000",
        "pods": [
            {
                "name": "qwen-0",
                "rank": 0,
                "node": "n",
                "ready": True,
                "bootID": "b",
                "phase": "Serving",
                "weightVersion": "step-1",
                "message": "",
            }
        ],
        "restarts": {
            "total": 3,
            "consecutive": 1,
            "byReason": [{"reason": "Evicted", "count": 2}, {"reason": "OOMKilled", "count": 1}],
            "lastAt": "2026-01-01T00:00:00Z",
            "lastReason": "OOMKilled",
            "message": "m",
            "podHash": "h",
            "podUID": "u",
            "podEnded": True,
            "engineExits": 1,
        },
    }
    # an operator that may run here does not serve this namespace
    body: dict[str, Any] = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutReplica",
        "metadata": {"name": "qwen", "namespace": namespace},
    }
    served.kubectl("create", "-f", "-", input=json.dumps({**body, "spec": {"model": "m"}}))
    arguments = ("apply", "--server-side", "--subresource=status", "--field-manager=x", "-f", "-")
    served.kubectl(*arguments, input=json.dumps({**body, "status": status}))
    found = served.get("rolloutreplicas.rollout.dev", "qwen", namespace)
    assert found["status"] == status
    # a second time changes nothing
    served.kubectl(*arguments, input=json.dumps({**body, "status": status}))
    again = served.get("rolloutreplicas.rollout.dev", "qwen", namespace)
    assert again["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"]


def test_columns_and_short_name(served: Cluster, namespace: str):
    body = {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutReplica",
        "metadata": {"name": "qwen", "namespace": namespace},
        "spec": {"model": "m", "weightVersion": "step-1", "weights": SOURCE},
    }
    served.kubectl("create", "-f", "-", input=json.dumps(body))
    head, row = served.kubectl("get", "rr", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "READY", "PHASE", "WEIGHTS", "TARGET", "PAUSED", "AGE"]
    assert row.split()[:3] == ["qwen", "step-1", "false"]
    assert "rolloutreplica.rollout.dev/qwen" in served.kubectl(
        *("get", "all", "-n", namespace, "-o", "name")
    )


def test_explain_reads_well(served: Cluster):
    text = " ".join(served.kubectl("explain", "rr.spec.weights.source.path").split())
    assert "{version} stands for the weightVersion" in text

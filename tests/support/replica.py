"""One RolloutReplica on the real cluster, seen and driven as its users do."""

import asyncio
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from devcluster.client import Cluster
from examples.tiny_models import make
from rollout_client import Rollout, RolloutClient
from rollout_pod.engine.base import EngineOutput
from tests.support.engine_kit import reference

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "rollout-operator"
START_S = 180.0
GREEDY = {"temperature": 0, "ignore_eos": True}


def install_operator(
    cluster: Cluster, namespace: str, values: Mapping[str, Any] | None = None
) -> None:
    """By helm, as users do: the operator runs as a pod."""
    cluster.helm(
        "install", "ro", str(CHART), "-n", namespace, "--take-ownership", "--wait",
        "--timeout=120s", "--values=-", input=json.dumps(values or {}),
    )  # fmt: skip


@contextmanager
def operator_site(cluster: Cluster, prefix: str) -> Iterator[str]:
    """A namespace with the operator in it, for the tests of a module."""
    name = f"{prefix}-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    install_operator(cluster, name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    cluster.wait(
        lambda: not cluster.kubectl("get", "pods", "-n", name, "-o", "name"), 120, "pods gone"
    )


@contextmanager
def checkpoints(
    cluster: Cluster, prefix: str, versions: Sequence[str], **shape: Any
) -> Iterator[Path]:
    """Tiny checkpoints on the node, a folder for each version."""
    assert cluster.data, "name a folder that the nodes share in DEVCLUSTER_DATA"
    folder = cluster.data / f"{prefix}-{uuid.uuid4().hex[:6]}"
    for seed, version in enumerate(versions):
        make(folder / version, seed=seed, **shape)
    yield folder
    shutil.rmtree(folder)


def metric(text: str, name: str) -> float:
    found = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def container_pids(container_id: str) -> list[int]:
    """The processes of a container on this machine, the first one first."""
    bare = container_id.rpartition("/")[2]
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                inside = bare in (folder / "cgroup").read_text()
            except OSError:  # it ended meanwhile
                continue
            if inside:
                pids.append(int(folder.name))
    return sorted(pids)


@dataclass
class Replica:
    """``data`` is a folder on the node that the pod sees as /checkpoints."""

    cluster: Cluster
    namespace: str
    data: Path
    name: str = "tiny"
    _url: str = ""

    def manifest(self, spec: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """examples/replica.yaml with this test's folder, and with ``spec`` over it."""
        body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "replica.yaml").read_text())
        body["metadata"]["name"] = self.name
        body["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"] = str(self.data)
        body["spec"] |= spec or {}
        return body

    def apply(self, spec: Mapping[str, Any] | None = None) -> None:
        self.kubectl("apply", "-f", "-", input=json.dumps(self.manifest(spec)))

    def patch(self, **spec: Any) -> None:
        """``kubectl patch``."""
        self.kubectl("patch", "rr", self.name, "--type", "merge", "-p", json.dumps({"spec": spec}))

    def kubectl(self, *args: str, input: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.namespace, *args, input=input)

    def get(self) -> dict[str, Any]:
        return self.cluster.get("rr", self.name, self.namespace)

    def pod(self) -> dict[str, Any]:
        return self.cluster.get("pod", f"{self.name}-0", self.namespace)

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition of the present generation; {} while the status is older."""
        body = self.get()
        for found in body.get("status", {}).get("conditions", []):
            if found["type"] == kind:
                is_fresh = found["observedGeneration"] == body["metadata"]["generation"]
                return found if is_fresh else {}
        return {}

    def until(
        self, done: Callable[[dict[str, Any]], Any], what: str, *, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Wait until the CR's status of the present generation is as wanted."""

        def ask() -> dict[str, Any] | None:
            body = self.get()
            status = body.get("status", {})
            if status.get("observedGeneration") != body["metadata"]["generation"]:
                return None
            return status if done(status) else None

        found = self.cluster.wait(ask, timeout_s, what, namespace=self.namespace)
        assert found is not None
        return found

    def until_condition(
        self, kind: str, status: str, reason: str, *, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.wait(
            lambda: (
                (c := self.condition(kind)).get("status") == status and c["reason"] == reason and c
            ),
            timeout_s,
            f"{kind}={status}, reason {reason}",
            namespace=self.namespace,
        )
        return found

    def serving(self, version: str, *, timeout_s: float = START_S) -> dict[str, Any]:
        """Wait until it is Ready with this version, and reachable."""

        def served(status: dict[str, Any]) -> bool:
            (ready,) = [c for c in status["conditions"] if c["type"] == "Ready"]
            return ready["reason"] == "Serving" and status.get("weightVersion") == version

        status = self.until(served, f"serving {version}", timeout_s=timeout_s)
        # kube-proxy learns of a ready pod a moment after everybody else
        self.cluster.wait(self._answers, 10, f"{self.url} to answer", namespace=self.namespace)
        return status

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).is_success
        except httpx.TransportError:
            return False

    @property
    def url(self) -> str:
        """The Service's own address: the machine of a test does not know cluster names."""
        if not self._url:
            service = self.cluster.get("service", self.name, self.namespace)
            self._url = f"http://{service['spec']['clusterIP']}:8000"
        return self._url

    def client(self) -> RolloutClient:
        return RolloutClient(self.url)

    async def generate(self, prompt: list[int], n: int, **more: Any) -> Rollout:
        async with self.client() as client:
            return await client.generate(prompt, GREEDY | {"max_tokens": n}, deadline_s=120, **more)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=10).text

    def kill_container(self, name: str) -> str:
        """SIGKILL its first process, as the kernel does when memory is out; returns its id."""
        status = self.pod()["status"]
        found = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
        (container_id,) = [c["containerID"] for c in found if c["name"] == name]
        os.kill(container_pids(container_id)[0], signal.SIGKILL)
        return str(container_id)

    def is_greedy(self, version: str, prompt: list[int], rollout: Rollout) -> bool:
        """Exactly the greedy tokens of transformers with this version's checkpoint."""
        output = EngineOutput(tuple(rollout.token_ids), tuple(rollout.log_probs), "length")
        return reference(self.data / version).agrees(prompt, output)


def writes(cluster: Cluster) -> dict[str, float]:
    """Writes that the API server counted so far, of the kinds that an operator makes. Events and
    the pods' own status (kubelet's) are not among them."""
    text = cluster.kubectl("get", "--raw", "/metrics")
    counts: dict[str, float] = {}
    for resource in ("rolloutreplicas", "services", "secrets"):
        for verb in ("POST", "PUT", "PATCH", "APPLY", "DELETE"):
            counts[f"{verb} {resource}"] = sum(
                float(line.rpartition(" ")[2])
                for line in text.splitlines()
                if line.startswith("apiserver_request_total{")
                and f'resource="{resource}"' in line
                and f'verb="{verb}"' in line
            )
    return counts


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {k: after[k] - before[k] for k in after if after[k] != before[k]}


async def in_flight(replica: Replica, n: int) -> None:
    """Wait until the engine has ``n`` requests."""
    deadline = time.monotonic() + 30
    while metric(text := await asyncio.to_thread(replica.metrics), "rollout_unfinished ") < n:
        assert time.monotonic() < deadline, text
        await asyncio.sleep(0.02)

"""Seeds of chaos for real: processes die, the API server and kubelet are away, requests are
refused and watch events lost, specs change.

Four run in CI; ``CHAOS_REAL_SEEDS=5,6,7,8,9,10,11,12`` makes it a dozen. Each prints what it did,
also where all is well; the invariants are looked at all the time, and at its end the replica is
what was asked for last and generates what that version says.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from devcluster import processes
from devcluster.client import Cluster, CommandError
from devcluster.settings import Settings
from examples.tiny_models import make
from rollout_client import Rollout
from tests.support.devcluster import must
from tests.support.engine_kit import prompts
from tests.support.faulty_way import FaultyWay
from tests.support.replica import Replica, container_pids, install_operator

SEEDS = [int(seed) for seed in os.environ.get("CHAOS_REAL_SEEDS", "").split(",") if seed] or [
    *range(1, 5)
]
VERSIONS = ("base", "step-1", "step-2")
OPERATIONS = 2
SETTLE_S = 150.0


@pytest.fixture(scope="module")
def way(settings: Settings, cluster: Cluster) -> Iterator[FaultyWay]:
    """How the operators reach the API server."""
    if settings.external:
        pytest.skip("the parts of this cluster are not ours to kill")
    made = FaultyWay(settings, SEEDS[0])
    with made.open():
        yield made


def by_this_way(cluster: Cluster, namespace: str, way: FaultyWay) -> dict[str, Any]:
    """Values of the chart with which the operators take it."""
    account = "by-the-way"
    cluster.kubectl("-n", namespace, "create", "serviceaccount", account)
    token = cluster.kubectl("-n", namespace, "create", "token", account, "--duration=3h").strip()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": account},
        "stringData": {"config": json.dumps(way.kubeconfig(token))},
    }
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(secret))
    return {
        "serviceAccount": {"create": False, "name": account},
        "extraEnv": [
            {"name": "KUBECONFIG", "value": f"/etc/{account}/config"},
            # what a watch loses the next list finds
            {"name": "ROLLOUT_OPERATOR_RESYNC_SECONDS", "value": "15"},
        ],
        "extraVolumes": [{"name": account, "secret": {"secretName": account}}],
        "extraVolumeMounts": [{"name": account, "mountPath": f"/etc/{account}"}],
    }


@pytest.fixture(scope="module")
def replica(cluster: Cluster, way: FaultyWay) -> Iterator[Replica]:
    """Two operators, and one replica that serves base."""
    name = f"chaos-{uuid.uuid4().hex[:6]}"
    assert cluster.data is not None
    for seed, version in enumerate(VERSIONS):
        make(cluster.data / name / version, seed=seed)
    cluster.kubectl("create", "namespace", name)
    install_operator(cluster, name, by_this_way(cluster, name, way))
    made = Replica(cluster, name, cluster.data / name)
    made.apply()
    made.serving("base")
    yield made
    cluster.kubectl("delete", "all", "--all", "-n", name, "--wait=false")
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    shutil.rmtree(cluster.data / name)


class Story:
    """What one seed does."""

    def __init__(self, settings: Settings, replica: Replica, way: FaultyWay, seed: int) -> None:
        self.settings, self.replica, self.way = settings, replica, way
        self.seed = seed
        self.told: list[str] = []
        self.dice = random.Random(seed)
        self.wanted: dict[str, Any] = {"paused": False, "weightVersion": None}
        self.operations: list[Callable[[], str]] = [
            self.patch, self.patch, self.kill_operator, self.kill_operators,
            self.restart_api_server, self.stop_kubelet, self.kill_agent, self.kill_engine,
            self.delete_pod, self.refuse_requests, self.lose_events,
        ]  # fmt: skip

    def chosen(self) -> list[Callable[[], str]]:
        """The first one goes by the seed, so that each one is in a dozen of them."""
        first = self.operations[self.seed % len(self.operations)]
        return [first, *self.dice.choices(self.operations, k=OPERATIONS - 1)]

    def do(self, operation: Callable[[], str]) -> None:
        """Do it, and keep what it says."""
        self.told.append(f"{operation.__name__}: {operation()}")

    def refuse_requests(self) -> str:
        self.way.refuses = self.dice.choice((0.1, 0.4))
        return f"{self.way.refuses:g} of all"

    def lose_events(self) -> str:
        self.way.loses = self.dice.choice((0.3, 1.0))
        return f"{self.way.loses:g} of all, or they are late"

    def patch(self) -> str:
        version = self.dice.choice(VERSIONS)
        self.wanted = {
            "paused": self.dice.random() < 0.3,
            "weightVersion": None if version == "base" else version,
        }
        self.replica.patch(**self.wanted)
        return str(self.wanted)

    def _operators(self) -> list[dict[str, Any]]:
        text = self.replica.kubectl(
            "get", "pods", "-l", "app.kubernetes.io/name=rollout-operator", "-o", "json"
        )
        found: list[dict[str, Any]] = json.loads(text)["items"]
        return found

    def kill_operator(self) -> str:
        found = self._operators()
        return self._kill(self.dice.sample(found, min(1, len(found))))

    def kill_operators(self) -> str:
        return self._kill(self._operators())

    def _kill(self, pods: list[dict[str, Any]]) -> str:
        said = []
        for pod in pods:
            for status in pod["status"].get("containerStatuses", ()):
                for pid in container_pids(status.get("containerID", "none")):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                said.append(f"{pod['metadata']['name']} ({status['restartCount']} restarts)")
                if status["restartCount"]:
                    # kubelet's growing pauses are no part of this story
                    self._delete(pod["metadata"]["name"])
        return ", ".join(said)

    def _delete(self, pod: str) -> str:
        # A pod that was listed may be gone by now: other operations delete too.
        asked = ("delete", "pod", pod, "--wait=false", "--ignore-not-found")
        return self.replica.kubectl(*asked).strip() or f"there is no {pod}"

    def _part(self, name: str) -> int:
        record = processes.read_record(self.settings.part_folder(name) / "record.json")
        assert record is not None and processes.is_alive(record), f"{name} does not run"
        return record.pid

    def restart_api_server(self) -> str:
        os.kill(self._part("kube-apiserver"), signal.SIGKILL)
        time.sleep(self.dice.choice((0.0, 3.0)))
        must("up")
        return "killed and started"

    def stop_kubelet(self) -> str:
        pid, seconds = self._part("kubelet"), self.dice.choice((2.0, 8.0))
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        return f"{seconds:g} s"

    def kill_agent(self) -> str:
        return self._container("weights")

    def kill_engine(self) -> str:
        return self._container("engine")

    def _container(self, name: str) -> str:
        try:
            killed = self.replica.kill_container(name)
            counts = self.replica.pod()["status"].get("containerStatuses", ())
            if any(c["restartCount"] > 1 for c in counts):
                self._delete(f"{self.replica.name}-0")
            return killed
        except (CommandError, ValueError, IndexError, ProcessLookupError) as error:
            return f"there is none: {error}"

    def delete_pod(self) -> str:
        return self._delete(f"{self.replica.name}-0")


@contextmanager
def watched(replica: Replica) -> Iterator[None]:
    """Whenever the replica says Ready, it holds what that generation asked for."""
    stop, wrong = threading.Event(), list[str]()

    def look() -> None:
        while not stop.wait(0.5):
            try:
                body = replica.get()
            except CommandError:
                continue  # the API server is away
            spec, status = body["spec"], body.get("status", {})
            ready = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), None)
            if not ready or ready["status"] != "True":
                continue
            if ready["observedGeneration"] != body["metadata"]["generation"]:
                continue
            reason = "Paused" if spec.get("paused") else "Serving"
            version = spec.get("weightVersion", "base")
            if (ready["reason"], status["weightVersion"]) != (reason, version):
                wrong.append(f"Ready, but {ready['reason']} of {status['weightVersion']}: {spec}")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_dies_the_replica_becomes_what_was_asked_for(
    settings: Settings,
    replica: Replica,
    way: FaultyWay,
    seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    story, before, begun = Story(settings, replica, way, seed), +way.done, time.monotonic()
    try:
        rollout, version = _run(story)
    finally:
        way.refuses = way.loses = 0.0
        done = ", ".join(f"{count} x {what}" for what, count in (way.done - before).items())
        with capsys.disabled():
            print(f"\nseed {seed}, {time.monotonic() - begun:.0f} s: {'; '.join(story.told)}")
            print(f"  requests and events: {done or 'all passed on'}", flush=True)
    assert [span.version for span in rollout.weight_versions] == [version]
    assert replica.is_greedy(version, prompts(1)[0], rollout)


def _run(story: Story) -> tuple[Rollout, str]:
    """Until all is as it was asked for last; the faults of the way last as long."""
    replica = story.replica
    with watched(replica):
        for operation in story.chosen():
            story.do(operation)
            time.sleep(story.dice.choice((0.0, 0.3, 2.0)))
        story.do(story.patch)
        version = story.wanted["weightVersion"] or "base"
        if story.wanted["paused"]:
            replica.until_condition("Ready", "True", "Paused", timeout_s=SETTLE_S)
            replica.patch(paused=False)
        replica.serving(version, timeout_s=SETTLE_S)
    return asyncio.run(replica.generate(prompts(1)[0], 30)), version

"""An operator outside the cluster: it reaches the API server, and no pod."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devcluster.client import Cluster
from devcluster.network import run
from devcluster.settings import NODE_IP, Settings
from examples.tiny_models import make
from tests.support.process import free_port
from tests.support.replica import CHART, Replica

HOST, GUEST = "10.98.77.1", "10.98.77.2"


@pytest.fixture
def outside(settings: Settings) -> Iterator[str]:
    """A network namespace with one route: to the API server's address."""
    if settings.external:
        pytest.skip("the network namespace is made on the node, and this cluster is elsewhere")
    name = f"out-{uuid.uuid4().hex[:6]}"
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "address", "add", f"{HOST}/30", "dev", name)
        run("ip", "link", "set", name, "up")
        inside = ("ip", "-n", name)
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "address", "add", f"{GUEST}/30", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "route", "add", f"{NODE_IP}/32", "via", HOST)
        yield name
    finally:
        # takes its end of the wire, and so the other one, along
        run("ip", "netns", "delete", name)


@pytest.fixture
def replica(cluster: Cluster, namespace: str) -> Iterator[Replica]:
    """Not yet applied; the chart brings the kind and no operator."""
    cluster.helm(
        "install", "ro", str(CHART), "-n", namespace, "--take-ownership", "--set", "replicas=0"
    )
    assert cluster.data is not None
    folder = cluster.data / namespace
    for seed, version in enumerate(("base", "step-1")):
        make(folder / version, seed=seed)
    yield Replica(cluster, namespace, folder)
    shutil.rmtree(folder)


@contextmanager
def operator(outside: str, cluster: Cluster, namespace: str, log: Path) -> Iterator[None]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(log.parent),
        "KUBECONFIG": str(cluster.kubeconfig),
        "ROLLOUT_OPERATOR_METRICS_PORT": str(free_port()),
        "ROLLOUT_OPERATOR_PROBE_PORT": str(free_port()),
        "ROLLOUT_OPERATOR_DEFAULT_IMAGE": "localhost/rollout-pod:dev",
    }
    command = [
        *("ip", "netns", "exec", outside, sys.executable, "-m", "rollout_operator"),
        *("--pod-access=proxy", f"--watch-namespaces={namespace}"),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(20)


def reaches(outside: str, address: str, port: int) -> bool:
    script = f"import socket; socket.create_connection(({address!r}, {port}), 3)"
    done = subprocess.run(
        ["ip", "netns", "exec", outside, sys.executable, "-c", script],
        capture_output=True,
        timeout=20,
        check=False,
    )
    return done.returncode == 0


def test_a_person_steers_a_replica_from_where_no_pod_can_be_reached(
    outside: str, cluster: Cluster, namespace: str, replica: Replica, tmp_path: Path
) -> None:
    replica.apply()
    with operator(outside, cluster, namespace, tmp_path / "operator.log"):
        replica.serving("base")
        ip = replica.pod()["status"]["podIP"]
        assert reaches(outside, NODE_IP, 6443)
        assert not reaches(outside, ip, 8001)
        replica.patch(weightVersion="step-1")
        replica.serving("step-1")
        replica.patch(paused=True)
        replica.until_condition("Ready", "True", "Paused")
    log = (tmp_path / "operator.log").read_text()
    assert "Traceback" not in log, log

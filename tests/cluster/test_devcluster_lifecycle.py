"""Up and down of the dev cluster, also after crashes: nothing is left on the machine.

These tests end clusters; they run first, and only where this session found none.
"""

import json
import os
import signal
import socket
import subprocess

import pytest

from devcluster import processes
from devcluster.health import wait_until
from devcluster.settings import NODES, SECOND
from tests.support.devcluster import REPO, command, devcluster, must, traces

pytestmark = pytest.mark.cluster

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "sleeper"},
    "spec": {
        "containers": [
            {
                "name": "sleep",
                "image": "localhost/rollout-pod:dev",
                "imagePullPolicy": "Never",
                "command": ["sleep", "600"],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    },
}


@pytest.fixture(scope="module")
def clean(settings, found_up):
    """What the machine is like without a cluster."""
    if found_up:
        pytest.skip("a cluster was up before: it is not these tests' to take down")
    # the programs must have been built, and iptables' own tables exist, before the comparison
    must("up")
    must("down")
    state = traces(settings)
    assert not state["processes"]
    assert not state["root"]
    return state


@pytest.fixture
def before(clean):
    """What `down` has to bring back."""
    yield clean
    must("down")


def test_down_after_an_up_that_was_killed(settings, before):
    up = subprocess.Popen(
        command("up"), cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert wait_until(lambda: "kubelet" in processes.ours(settings.root).values(), 120)
    finally:
        up.kill()
        up.wait()
    assert traces(settings) != before
    must("down")
    assert traces(settings) == before


def test_down_after_parts_and_shims_were_killed(settings, before):
    must("up")
    apply = [*command("kubectl", "apply", "-f", "-")]
    subprocess.run(apply, cwd=REPO, input=json.dumps(POD), text=True, check=True, timeout=60)
    must("kubectl", "wait", "--for=condition=Ready", "pod/sleeper", "--timeout=60s")
    must("node", "add")
    away = {**POD, "metadata": {"name": "away"}, "spec": {**POD["spec"], "nodeName": SECOND.name}}
    subprocess.run(apply, cwd=REPO, input=json.dumps(away), text=True, check=True, timeout=60)
    must("kubectl", "wait", "--for=condition=Ready", "pod/away", "--timeout=60s")
    alive = processes.ours(settings.root)
    assert {node.containers for node in NODES} <= set(alive.values())
    shims = [pid for pid in alive if processes.command(pid).startswith("containerd-shim")]
    assert shims
    records = [
        processes.read_record(settings.part_folder(part) / "record.json")
        for part in ("containerd", "kubelet", "containerd-2", "kubelet-2", "etcd")
    ]
    for pid in [*shims, *(record.pid for record in records if record is not None)]:
        os.kill(pid, signal.SIGKILL)
    must("down")
    assert traces(settings) == before


def test_a_failure_names_the_log_and_its_reason(settings, before):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 2379))
        taken.listen()
        done = devcluster("up")
    assert done.returncode == 1
    assert str(settings.log("etcd")) in done.stderr
    assert "address already in use" in done.stderr
    assert "Traceback" not in done.stderr
    must("down")
    assert traces(settings) == before


def test_down_without_a_cluster_does_nothing(settings, before):
    must("down")
    assert traces(settings) == before


def test_a_folder_that_is_not_ours_is_left_alone(before, tmp_path):
    (tmp_path / "precious").write_text("x")
    # pytest's folders have long names, and sockets allow few characters
    link = f"/var/tmp/rollout-{os.getpid()}"
    os.symlink(tmp_path, link)
    try:
        for action in ("up", "down"):
            done = devcluster(action, env={"DEVCLUSTER_ROOT": link})
            assert done.returncode == 1
            assert "not a dev cluster's state folder" in done.stderr
    finally:
        os.unlink(link)
    assert (tmp_path / "precious").read_text() == "x"

"""What the dev cluster takes from the machine, gives back, and leaves alone."""

import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from devcluster import network, processes
from devcluster.cluster import node_ready
from devcluster.errors import DevclusterError, failed
from devcluster.health import complaint, wait_until
from devcluster.leftovers import (
    Before,
    mounts_below,
    recall,
    remember,
    sweep_node,
    tasks,
)
from devcluster.network import chains_removal, overlapping_route
from devcluster.settings import BRIDGE, CONTEXT, FIRST, SECOND, load_settings

SAVED = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:DOCKER - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-SERVICES - [1:60]
-A INPUT -j DOCKER
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A KUBE-FORWARD -j ACCEPT
-A DOCKER -p tcp -j ACCEPT
COMMIT
*nat
:OUTPUT ACCEPT [0:0]
-A OUTPUT -j MASQUERADE
COMMIT
"""


def test_only_kube_proxys_chains_and_the_jumps_into_them_are_removed():
    assert chains_removal(SAVED) == (
        "*filter\n"
        ":KUBE-FORWARD - [0:0]\n"
        ":KUBE-SERVICES - [0:0]\n"
        '-D FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD\n'
        "-X KUBE-FORWARD\n"
        "-X KUBE-SERVICES\n"
        "COMMIT\n"
    )


@pytest.mark.parametrize("gone", [True, False])
def test_an_interface_that_goes_by_itself_meanwhile_is_no_failure(monkeypatch, tmp_path, gone):
    port = tmp_path / BRIDGE / "brif" / "veth1"
    port.mkdir(parents=True)

    def fail(*argv):
        assert argv == ("ip", "link", "delete", "veth1")
        if gone:
            port.rmdir()
            (tmp_path / BRIDGE / "brif").rmdir()
            (tmp_path / BRIDGE).rmdir()
        raise DevclusterError("Cannot find device")

    monkeypatch.setattr(network, "run", fail)
    monkeypatch.setattr(network, "INTERFACES", tmp_path)
    with nullcontext() if gone else pytest.raises(DevclusterError):
        network.remove_bridge()


def test_without_such_chains_nothing_is_touched():
    assert chains_removal("*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j DOCKER\nCOMMIT\n") is None
    assert chains_removal("") is None


@pytest.mark.parametrize(
    ("destination", "clash"),
    [
        ("default", False),
        ("0.0.0.0/0", False),
        ("192.168.0.0/16", False),
        ("fd00::/64", False),
        ("10.244.7.0/24", True),
        ("10.0.0.0/8", True),
        ("10.96.0.10", True),
    ],
)
def test_routes_that_the_pods_would_collide_with(destination, clash):
    found = overlapping_route(f'[{{"dst": "{destination}"}}]')
    assert (found == destination) is clash


def test_mounts_are_found_youngest_first():
    text = (
        "1 0 8:1 / / rw - ext4 /dev/vda rw\n"
        "2 1 8:1 / /r/dev rw - ext4 /dev/vda rw\n"
        "3 1 8:1 / /r/developer rw - ext4 /dev/vda rw\n"
        "4 2 0:5 / /r/dev/pods/a\\040b rw - tmpfs tmpfs rw\n"
    )
    assert mounts_below(text, "/r/dev") == ["/r/dev/pods/a b", "/r/dev"]


def test_containers_are_known_by_their_root_file_system():
    overlay = "7 6 0:9 / / rw - overlay overlay rw,lowerdir=/r/dev/containerd/root/1/fs\n"
    host = (
        "1 0 8:1 / / rw - ext4 /dev/vda rw\n"
        "7 1 0:9 / /r/dev/containerd/state/x rw - overlay overlay rw,lowerdir=/r/dev/containerd/1\n"
    )
    assert processes.container_root_is_ours(overlay, "/r/dev/containerd/")
    assert not processes.container_root_is_ours(host, "/r/dev/containerd/")
    assert not processes.container_root_is_ours(overlay, "/r/other/containerd/")
    assert not processes.container_root_is_ours(overlay, "/r/dev/containerd-2/")


@pytest.fixture
def sleeper(tmp_path):
    record = processes.start(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        root=tmp_path,
        part="sleeper",
        log=tmp_path / "log",
        record=tmp_path / "record.json",
        fingerprint="f",
    )
    yield record
    processes.stop_record(record, grace_s=0)
    assert record.pid not in [process.pid for process in processes._started], "a zombie"


def test_a_recorded_process_is_found_and_stopped(sleeper, tmp_path):
    assert processes.read_record(tmp_path / "record.json") == sleeper
    assert processes.is_alive(sleeper)
    assert processes.ours(tmp_path) == {sleeper.pid: "sleeper"}
    processes.stop_record(sleeper, grace_s=5)
    assert not processes.is_alive(sleeper)
    assert processes.ours(tmp_path) == {}


@pytest.mark.parametrize("field", [{"start_ticks": 1}, {"boot_id": "another"}])
def test_a_reused_pid_is_never_killed(sleeper, field):
    stale = replace(sleeper, **field)
    assert not processes.is_alive(stale)
    processes.stop_record(stale, grace_s=0)
    time.sleep(0.1)  # a signal would have arrived
    assert processes.is_alive(sleeper)


def test_a_process_of_another_cluster_is_not_ours(sleeper, tmp_path):
    processes.kill_all(tmp_path / "other", lambda _: True, timeout_s=5)
    assert processes.is_alive(sleeper)
    processes.kill_all(tmp_path, lambda part: part == "sleeper", timeout_s=5)
    assert not processes.is_alive(sleeper)


def test_a_zombie_counts_as_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        assert wait_until(lambda: processes.start_ticks(child.pid) is None, 10)
    finally:
        child.wait()


def test_a_broken_record_is_no_record(tmp_path):
    file = tmp_path / "record.json"
    assert processes.read_record(file) is None
    for text in ("", "{}", "[1]", '{"pid": 1'):
        file.write_text(text)
        assert processes.read_record(file) is None


def test_the_machine_before_is_remembered(tmp_path):
    settings = replace(load_settings({}), root=tmp_path)
    assert recall(settings) is None
    before = Before({"kernel/panic": "1"}, ["/var/lib/kubelet"])
    remember(settings, before)
    assert recall(settings) == before


def test_what_a_nodes_containers_left_goes_and_the_other_nodes_stays(tmp_path):
    settings = replace(load_settings({}), root=tmp_path)
    leases = settings.cni / "leases" / CONTEXT
    leases.mkdir(parents=True)
    for address, container in (("10.244.0.2", "first"), ("10.244.0.3", "second")):
        (leases / address).write_text(f"{container}\r\neth0")
    (leases / "last_reserved_ip.0").write_text("10.244.0.3")
    (leases / "lock").touch()
    sockets = {name: tmp_path / name for name in ("one.sock", "two.sock")}
    for socket in sockets.values():
        socket.touch()
    state = settings.containerd(SECOND) / "state" / "io.containerd.runtime.v2.task"
    (state / "k8s.io" / "second").mkdir(parents=True)
    (state / "k8s.io" / "second" / "address").write_text(f"unix://{sockets['two.sock']}")
    sweep_node(settings, SECOND, tasks(settings, SECOND))
    assert sorted(file.name for file in leases.iterdir()) == [
        "10.244.0.2",
        "last_reserved_ip.0",
        "lock",
    ]
    assert [name for name, socket in sockets.items() if socket.exists()] == ["one.sock"]
    assert tasks(settings, FIRST).ids == ()


def test_a_failure_names_the_log_and_shows_its_end(tmp_path):
    log = tmp_path / "etcd.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    message = str(failed("etcd ended", log))
    assert str(log) in message
    assert "line 99" in message
    assert "line 80" in message
    assert "line 79" not in message
    assert "no log" in str(failed("etcd ended", tmp_path / "none"))


def test_waiting_ends():
    begun = time.monotonic()
    assert not wait_until(lambda: False, 0.3)
    assert time.monotonic() - begun < 5
    answers = iter([False, True])
    assert wait_until(lambda: next(answers), 5)


@pytest.mark.parametrize(
    ("status", "said", "ready"),
    [
        ("True", "2026-01-01T00:00:10Z", True),
        ("True", "2026-01-01T00:00:09Z", False),
        ("False", "2026-01-01T00:00:11Z", False),
    ],
)
def test_only_the_present_kubelets_word_counts(status, said, ready):
    condition = {"type": "Ready", "status": status, "lastHeartbeatTime": said}
    node = {"status": {"conditions": [{"type": "DiskPressure", "status": "True"}, condition]}}
    since = datetime(2026, 1, 1, 0, 0, 10, 700000, tzinfo=UTC).timestamp()
    assert node_ready(node, since) is ready
    assert not node_ready({"status": {}}, since)


def test_a_complaint_is_one_line():
    assert (
        complaint("[+]ping ok\n[-]etcd failed: no\nreadyz check failed\n") == "[-]etcd failed: no"
    )
    assert complaint("a\n b\n") == "a b"

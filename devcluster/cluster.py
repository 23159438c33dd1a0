"""Brings the cluster up: the order of things. Everything is idempotent, also after a crash."""

import json
import resource
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from devcluster import images, leftovers, network, processes
from devcluster.build import ensure_binaries
from devcluster.certs import ensure_certificates
from devcluster.errors import DevclusterError, failed
from devcluster.health import ailment, wait_until
from devcluster.machine import machine_lock, need_root
from devcluster.node import node, second_node
from devcluster.packages import ensure_packages
from devcluster.parts import PART_NAMES, Part, control_plane
from devcluster.report import Reporter
from devcluster.rights import BOOTSTRAP
from devcluster.settings import FIRST, SECOND, Node, Settings
from devcluster.status import has_second_node

PART_TIMEOUT_S = 180.0
NODE_TIMEOUT_S = 180.0
MAX_FILES = 1 << 20
SHIM = "containerd-shim"


def up(settings: Settings, report: Reporter) -> None:
    """Bring the cluster up, or what is missing or outdated of it.

    Raises:
        DevclusterError: something failed; the message names the log to read.
    """
    need_root()
    with machine_lock(report):
        ensure_packages(report)
        bins = ensure_binaries(settings, report)
        _prepare(settings)
        ensure_certificates(settings)
        network.ensure_bridge(settings.root)
        for part in control_plane(settings, bins):
            _ensure_part(settings, part, report)
        _bootstrap_rights(settings, bins)
        snapshotter = _snapshotter(settings)
        images.write_console_scripts(settings)
        spec = _base_spec(settings)
        parts = node(settings, bins, snapshotter=snapshotter, base_spec=spec)
        _ensure_node(settings, bins, FIRST, parts, snapshotter, report)
        if has_second_node(settings):
            parts = second_node(settings, bins, snapshotter=snapshotter, base_spec=spec)
            _ensure_node(settings, bins, SECOND, parts, snapshotter, report)


def add_node(settings: Settings, report: Reporter) -> None:
    """Bring up a second node beside the first, or what is missing of it. It stays until
    ``teardown.remove_node`` or ``down``; ``up`` looks after it, too.

    Raises:
        DevclusterError: the cluster is not up, or something failed.
    """
    need_root()
    with machine_lock(report):
        if not settings.kubeconfig.exists():
            raise DevclusterError("The dev cluster is not up: run `python -m devcluster up`")
        bins = ensure_binaries(settings, report)
        snapshotter = _snapshotter(settings)
        spec = _base_spec(settings)
        parts = second_node(settings, bins, snapshotter=snapshotter, base_spec=spec)
        _ensure_node(settings, bins, SECOND, parts, snapshotter, report)


def _ensure_node(
    settings: Settings,
    bins: Path,
    which: Node,
    parts: tuple[Part, ...],
    snapshotter: str,
    report: Reporter,
) -> None:
    runtime, *others = parts
    _ensure_part(settings, runtime, report)
    loaded = (images.pause_image(settings), images.project_image(settings))
    images.load_images(settings, which, loaded, snapshotter=snapshotter)
    for part in others:
        _ensure_part(settings, part, report)
    with report.step(f"node {which.name} ready"):
        _wait_for_node(settings, bins, which)


def _prepare(settings: Settings) -> None:
    root = settings.root
    if root.exists() and any(root.iterdir()) and leftovers.recall(settings) is None:
        raise DevclusterError(
            f"{root} exists and is not a dev cluster's state folder: set DEVCLUSTER_ROOT to "
            "another folder, or empty this one"
        )
    if leftovers.recall(settings) is None:
        _refuse_other_nodes(settings)
        root.mkdir(parents=True, exist_ok=True)
        leftovers.remember(settings, leftovers.look())
    # pods' users must be able to pass on to `data`
    root.chmod(0o755)
    settings.data.mkdir(exist_ok=True)
    for part in PART_NAMES:
        settings.part_folder(part).mkdir(parents=True, exist_ok=True)


def _refuse_other_nodes(settings: Settings) -> None:
    if network.bridge_owner() == str(settings.root):
        raise DevclusterError(
            f"A dev cluster's bridge is here but its state folder {settings.root} is gone: "
            "run `python -m devcluster down` first"
        )
    if network.has_service_chains():
        raise DevclusterError(
            "iptables holds the chains of another kube-proxy: this machine is already a "
            "Kubernetes node. Use another machine, or DEVCLUSTER=external."
        )
    for pid in processes.pids():
        # one in a network of its own (kind, k3d) is no neighbour
        if processes.command(pid) == "kubelet" and processes.shares_network(pid):
            raise DevclusterError(
                f"Another kubelet (pid {pid}) runs on this machine: stop it first"
            )


def _ensure_part(settings: Settings, part: Part, report: Reporter) -> None:
    path = settings.part_folder(part.name) / "record.json"
    record = processes.read_record(path)
    if record is not None and processes.is_alive(record):
        if record.fingerprint == part.fingerprint:
            if wait_until(lambda: ailment(settings, part) is None, PART_TIMEOUT_S / 3):
                return
            report.say(f"{part.name} runs but is not well: {ailment(settings, part)}")
        else:
            report.say(f"{part.name} is restarted with what changed")
        processes.stop_record(record, grace_s=part.grace_s)
    # one that was started by an `up` that died before it could write the record
    for pid, name in processes.ours(settings.root).items():
        if name == part.name and not processes.command(pid).startswith(SHIM):
            processes.stop_marked(pid, settings.root, grace_s=part.grace_s)
    for file, text in part.files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    log = settings.log(part.name)
    if log.exists():
        log.replace(log.with_suffix(".old.log"))
    with report.step(f"start {part.name}"):
        started = processes.start(
            part.argv,
            root=settings.root,
            part=part.name,
            log=log,
            record=path,
            fingerprint=part.fingerprint,
        )
        _wait_healthy(settings, part, started)


def _wait_healthy(settings: Settings, part: Part, record: processes.Record) -> None:
    log = settings.log(part.name)

    def well() -> bool:
        if not processes.is_alive(record):
            raise failed(f"{part.name} ended", log)
        return ailment(settings, part) is None

    if not wait_until(well, PART_TIMEOUT_S):
        raise failed(
            f"{part.name} is not well after {PART_TIMEOUT_S:.0f} s: {ailment(settings, part)}", log
        )


def _kubectl(settings: Settings, bins: Path, *arguments: str, stdin: str | None = None) -> str:
    return network.run(
        f"{bins}/kubectl", f"--kubeconfig={settings.kubeconfig}", *arguments, stdin=stdin
    )


def _bootstrap_rights(settings: Settings, bins: Path) -> None:
    rights = {"apiVersion": "v1", "kind": "List", "items": list(BOOTSTRAP)}
    _kubectl(settings, bins, "apply", "-f", "-", stdin=json.dumps(rights))


def _snapshotter(settings: Settings) -> str:
    """Overlay mounts where the state folder's file system can carry them, else plain copies."""
    record = settings.containerd(FIRST) / "snapshotter"
    if record.exists():
        return record.read_text()
    probe = settings.root / "probe"
    lower, upper, work, merged = (probe / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    try:
        network.run("mount", "-t", "overlay", "overlay", "-o", options, str(merged))
        network.run("umount", str(merged))
        found = "overlayfs"
    except DevclusterError:
        found = "native"
    shutil.rmtree(probe)
    record.parent.mkdir(exist_ok=True)
    record.write_text(found)
    return found


def _base_spec(settings: Settings) -> str:
    binds = images.project_binds(settings, lambda path: Path(path).exists())
    unreadable = [source for source in binds.values() if not _readable_by_all(Path(source))]
    if unreadable:
        raise DevclusterError(
            f"Pods run as another user, who may not read {', '.join(unreadable)}: chmod o+rX it"
        )
    default = json.loads(network.run("ctr", "oci", "spec"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    return json.dumps(images.base_spec(default, binds, max_files=max_files), indent=1)


def _readable_by_all(path: Path) -> bool:
    wanted = 0o5 if path.is_dir() else 0o4
    return path.stat().st_mode & wanted == wanted


def node_ready(found: Mapping[str, Any], since: float) -> bool:
    """Whether a Node is ready by what its kubelet said after ``since`` (seconds of the epoch)."""
    for condition in found["status"].get("conditions", ()):
        if condition["type"] == "Ready" and condition["status"] == "True":
            said = datetime.fromisoformat(condition["lastHeartbeatTime"])
            # Kubernetes' times have whole seconds
            return said.timestamp() >= int(since)
    return False


def _wait_for_node(settings: Settings, bins: Path, which: Node) -> None:
    # what an earlier kubelet wrote does not count
    since = (settings.part_folder(which.kubelet) / "record.json").stat().st_mtime

    def ready() -> bool:
        try:
            found = json.loads(_kubectl(settings, bins, "get", "node", which.name, "-o", "json"))
            # pods cannot be created before the controllers made this one
            _kubectl(settings, bins, "get", "serviceaccount", "default", "-n", "default")
        except DevclusterError:
            return False
        return node_ready(found, since)

    if not wait_until(ready, NODE_TIMEOUT_S):
        raise failed(
            f"{which.name} is not ready after {NODE_TIMEOUT_S:.0f} s", settings.log(which.kubelet)
        )

"""Takes everything away again, in whatever state it is."""

import shutil
from pathlib import Path

from devcluster import leftovers, network, processes
from devcluster.build import bin_folder
from devcluster.errors import DevclusterError
from devcluster.machine import machine_lock, need_root
from devcluster.parts import control_plane
from devcluster.report import Reporter
from devcluster.settings import NODES, SECOND, Node, Settings

CONTAINERS_TIMEOUT_S = 30.0


def down(settings: Settings, report: Reporter) -> None:
    """Take everything away that `up` brought, in whatever state it is.

    Raises:
        DevclusterError: something cannot be removed; run it again after what the message says.
    """
    need_root()
    with machine_lock(report):
        before = leftovers.recall(settings)
        if before is None and settings.root.exists() and any(settings.root.iterdir()):
            raise DevclusterError(f"{settings.root} is not a dev cluster's state folder")
        bridge_is_ours = network.bridge_owner() == str(settings.root)
        # containerd forgets the tasks that end while it stops; the network keeps files of their ids
        ran = {node: leftovers.tasks(settings, node) for node in NODES}
        with report.step("stop the processes"):
            _stop_processes(settings)
        with report.step("remove mounts, interfaces and iptables chains"):
            leftovers.unmount(settings.root)
            if bridge_is_ours:
                network.remove_bridge()
            if (bridge_is_ours or before is not None) and shutil.which("iptables-save"):
                network.remove_chains()
            if before is not None:
                leftovers.sweep(settings, before, ran)
                network.write_sysctls(before.sysctls)
        if settings.root.exists():
            with report.step(f"remove {settings.root}"):
                # the marker goes last, so that a `down` that dies here can be run again
                for entry in settings.root.iterdir():
                    if entry.is_dir():
                        shutil.rmtree(entry)
                    elif entry != settings.marker:
                        entry.unlink()
                settings.marker.unlink(missing_ok=True)
                settings.root.rmdir()


def remove_node(settings: Settings, report: Reporter) -> None:
    """Take the second node away, whatever runs on it; nothing if there is none.

    Raises:
        DevclusterError: something cannot be removed; run it again after what the message says.
    """
    need_root()
    with machine_lock(report):
        ran = leftovers.tasks(settings, SECOND)
        with report.step(f"remove node {SECOND.name}"):
            try:
                _stop_node(settings, SECOND)
            except TimeoutError as error:
                raise DevclusterError(str(error)) from error
            folders = (
                settings.containerd(SECOND), settings.kubelet(SECOND), settings.pod_logs(SECOND),
                settings.part_folder(SECOND.kubelet), settings.part_folder(SECOND.containerd),
            )  # fmt: skip
            for folder in folders[:2]:
                leftovers.unmount(folder)
            leftovers.sweep_node(settings, SECOND, ran)
            if settings.kubeconfig.exists():
                network.run(
                    *(f"{bin_folder(settings)}/kubectl", f"--kubeconfig={settings.kubeconfig}"),
                    *("delete", "node", SECOND.name, "--ignore-not-found"),
                )
            for folder in filter(Path.exists, folders):
                shutil.rmtree(folder)


def _stop_processes(settings: Settings) -> None:
    bins = bin_folder(settings)
    graces = {part.name: part.grace_s for part in control_plane(settings, bins)}
    try:
        # first those that would start others again, then what runs in pods, then etcd last
        for part in ("kube-proxy", "coredns"):
            _stop_part(settings, part, 3.0)
        for node in reversed(NODES):
            _stop_node(settings, node)
        for part in reversed(graces):
            _stop_part(settings, part, graces[part])
        processes.kill_all(settings.root, lambda _: True, timeout_s=CONTAINERS_TIMEOUT_S)
    except TimeoutError as error:
        raise DevclusterError(str(error)) from error


def _stop_node(settings: Settings, node: Node) -> None:
    _stop_part(settings, node.kubelet, 3.0)
    processes.kill_all(
        settings.root, lambda part: part == node.containers, timeout_s=CONTAINERS_TIMEOUT_S
    )
    _stop_part(settings, node.containerd, 3.0)
    # the shims outlive it
    processes.kill_all(
        settings.root,
        lambda part: part in (node.kubelet, node.containerd),
        timeout_s=CONTAINERS_TIMEOUT_S,
    )


def _stop_part(settings: Settings, part: str, grace_s: float) -> None:
    record = processes.read_record(settings.part_folder(part) / "record.json")
    if record is not None:
        processes.stop_record(record, grace_s=grace_s)

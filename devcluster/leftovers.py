"""What a node leaves on a machine outside its processes, and how `down` takes it away."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from devcluster.certs import write_private
from devcluster.errors import DevclusterError
from devcluster.network import read_sysctls, run
from devcluster.settings import CGROUP, CONTEXT, NODES, SECOND, Node, Settings

DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
CONTAINER_LOGS = Path("/var/log/containers")
CNI_RESULTS = Path("/var/lib/cni/results")
# made by kubelet, containerd and libcni at fixed places; children before their parents
FIXED_FOLDERS = (
    DEVICE_PLUGINS,
    Path("/var/lib/kubelet"),
    CONTAINER_LOGS,
    Path("/var/log/pods"),
    CNI_RESULTS,
    Path("/var/lib/cni"),
    Path("/run/containerd/s"),
    Path("/run/containerd"),
    Path("/run/netns"),
    Path("/run/mount"),
)
CGROUPS = Path("/sys/fs/cgroup")
PODS_GROUP = "kubepods"
SECOND_GROUP = f"{CGROUP}{SECOND.suffix}"
"""Of the second node's pods; no other program's."""


@dataclass(frozen=True)
class Before:
    """What the machine was like before the first `up`."""

    sysctls: dict[str, str]
    absent: list[str]
    """Those of the fixed folders, and the pods' cgroups, that did not exist."""


def look() -> Before:
    """Look at the machine."""
    absent = [str(folder) for folder in FIXED_FOLDERS if not folder.exists()]
    if not groups(PODS_GROUP):
        absent.append(PODS_GROUP)
    return Before(read_sysctls(), absent)


def remember(settings: Settings, before: Before) -> None:
    """Write down what the machine was like; this also marks the state folder as ours."""
    write_private(settings.marker, json.dumps(asdict(before), indent=1).encode())


def recall(settings: Settings) -> Before | None:
    """Read it again; None if there is none that can be read."""
    try:
        return Before(**json.loads(settings.marker.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def mounts_below(mountinfo: str, folder: str) -> list[str]:
    """Return the mount points at or below ``folder``, the youngest first."""
    points = []
    for line in mountinfo.splitlines():
        # blanks in paths are written as octal escapes
        point = line.split()[4].encode().decode("unicode_escape")
        if point == folder or point.startswith(f"{folder}/"):
            points.append(point)
    return points[::-1]


def unmount(folder: Path) -> None:
    """Unmount everything in a folder.

    Raises:
        DevclusterError: something stays mounted, so that the folder must not be deleted.
    """
    mountinfo = Path("/proc/self/mountinfo")
    for point in mounts_below(mountinfo.read_text(), str(folder)):
        try:
            run("umount", point)
        except DevclusterError:
            run("umount", "--lazy", point)
    left = mounts_below(mountinfo.read_text(), str(folder))
    if left:
        raise DevclusterError(f"still mounted: {', '.join(left)}; unmount it, then `down` again")


@dataclass(frozen=True)
class Tasks:
    """What a node's containerd knows of its containers."""

    ids: tuple[str, ...]
    sockets: tuple[Path, ...]
    """The shims' sockets, which lie outside the state folder."""


def tasks(settings: Settings, node: Node) -> Tasks:
    """Read the state folder of a node's containerd, before it is removed."""
    state = settings.containerd(node) / "state"
    folders = sorted((state / "io.containerd.runtime.v2.task").glob("*/*"))
    addresses = [f.read_text().strip() for f in (d / "address" for d in folders) if f.exists()]
    return Tasks(
        tuple(folder.name for folder in folders),
        tuple(Path(address.removeprefix("unix://")) for address in addresses),
    )


def sweep_node(settings: Settings, node: Node, ran: Tasks) -> None:
    """Remove what a node's containers left in folders that it shares with others."""
    for socket in ran.sockets:
        socket.unlink(missing_ok=True)
    for link in CONTAINER_LOGS.glob("*.log"):
        if link.is_symlink() and str(link.readlink()).startswith(f"{settings.pod_logs(node)}/"):
            link.unlink()
    for result in CNI_RESULTS.glob("*"):
        # network-container-interface; containerd's own loopback network has a name of its own
        if any(i in result.name for i in ran.ids):
            result.unlink()
    for lease in (settings.cni / "leases" / CONTEXT).glob("*.*.*.*"):
        # its first line is the container's id
        if set(lease.read_text().split()) & set(ran.ids):
            lease.unlink()
    if node == SECOND:
        for group in groups(SECOND_GROUP):
            _remove_group(group)


def sweep(settings: Settings, before: Before, ran: Mapping[Node, Tasks]) -> None:
    """Remove our files from the fixed folders, and those folders that did not exist before."""
    for node in NODES:
        sweep_node(settings, node, ran[node])
    for result in CNI_RESULTS.glob(f"{CONTEXT}-*"):
        result.unlink()
    if str(DEVICE_PLUGINS) in before.absent:
        shutil.rmtree(DEVICE_PLUGINS, ignore_errors=True)
    for folder in FIXED_FOLDERS:
        if str(folder) in before.absent and folder.is_dir() and not any(folder.iterdir()):
            # `ip netns add` mounts its folder on itself
            for point in mounts_below(Path("/proc/self/mountinfo").read_text(), str(folder)):
                run("umount", point)
            folder.rmdir()
    if PODS_GROUP in before.absent:
        for group in groups(PODS_GROUP):
            _remove_group(group)


def groups(name: str) -> list[Path]:
    """Return the cgroups of this name, one for each hierarchy that has it."""
    places = [CGROUPS, *(folder for folder in CGROUPS.iterdir() if folder.is_dir())]
    return [place / name for place in places if (place / name).is_dir()]


def _remove_group(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            Path(folder).rmdir()
        except OSError as error:
            raise DevclusterError(f"cgroup {folder} cannot be removed: {error}") from error

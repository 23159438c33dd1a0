"""Processes of the cluster: started with a mark, recorded, and never confused with others.

A process is ours when its environment carries our mark (parts and containerd's shims), when a
record names its pid, start time and boot, or when its root file system is a snapshot of our
containerd (containers). It is signalled through a pidfd that was opened before that check, so a
reused pid is never hit.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from devcluster.certs import write_private
from devcluster.settings import NODES, Node

MARK = "ROLLOUT_DEVCLUSTER"
KILL_WAIT_S = 10.0

# they outlive this process; a Popen that is let go of would warn about that
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Record:
    """A process that was started, as it is written to disk."""

    pid: int
    start_ticks: int
    boot_id: str
    fingerprint: str


def boot_id() -> str:
    """Return the kernel's name for this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Return when a process began, in ticks since boot; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the command's name, in parentheses, may contain anything
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(record: Record) -> bool:
    """Whether the very process of the record still runs."""
    return record.boot_id == boot_id() and start_ticks(record.pid) == record.start_ticks


def read_record(path: Path) -> Record | None:
    """Read a record; None if there is none that can be read."""
    try:
        return Record(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def mark(root: Path, part: str) -> str:
    """Return the value that marks a process of a part in its environment."""
    return f"{root}:{part}"


def start(
    argv: Sequence[str], *, root: Path, part: str, log: Path, record: Path, fingerprint: str
) -> Record:
    """Start a process in a session of its own and record it; its output goes to ``log``."""
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(root),
        MARK: mark(root, part),
    }
    with log.open("ab") as out:
        process = subprocess.Popen(
            argv,
            cwd=root,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started.append(process)
    ticks = start_ticks(process.pid)
    made = Record(process.pid, -1 if ticks is None else ticks, boot_id(), fingerprint)
    write_private(record, json.dumps(asdict(made)).encode())
    return made


def stop(pid: int, is_ours: Callable[[], bool], *, grace_s: float) -> None:
    """End a process: SIGTERM, after ``grace_s`` seconds SIGKILL; nothing if it is not ours.

    Raises:
        TimeoutError: it survived SIGKILL (the kernel holds it).
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not is_ours():
            return
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
            if wait_s <= 0:
                continue
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                return
            if _ended(handle, wait_s):
                return
        raise TimeoutError(f"process {pid} does not end, not even by SIGKILL")
    finally:
        os.close(handle)
        _let_go()


def _let_go() -> None:
    """Of those that have ended: the others outlive this process."""
    _started[:] = [process for process in _started if process.poll() is None]


def stop_record(record: Record, *, grace_s: float) -> None:
    """End the process of a record, if it is still that process."""
    stop(record.pid, lambda: is_alive(record), grace_s=grace_s)


def _ended(handle: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def marked_part(pid: int, root: Path) -> str | None:
    """Return the part in whose name a process was started; None if it is none of ours."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{MARK}={root}:".encode()
    for variable in variables:
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode(errors="replace")
    return None


def container_root_is_ours(mountinfo: str, folder: str) -> bool:
    """Whether a process' root file system lies in our containerd's ``folder``."""
    for line in mountinfo.splitlines():
        fields = line.split()
        # id, parent, device, root within the file system, mount point, … - type, source, options
        if len(fields) > 4 and fields[4] == "/":
            return folder in line
    return False


def node_of_container(pid: int, root: Path) -> Node | None:
    """Return the node in whose container a process runs; None if it is in none of ours."""
    try:
        mounts = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return None
    for node in NODES:
        if container_root_is_ours(mounts, f"{root}/{node.containerd}/"):
            return node
    return None


def command(pid: int) -> str:
    """Return a process' short name (15 characters); empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def shares_network(pid: int) -> bool:
    """Whether a process sees this process' network interfaces."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:
        return False


def pids() -> Iterable[int]:
    """Return the pids of all processes of the machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def ours(root: Path) -> dict[int, str]:
    """Return the pids of the cluster's processes, each with its part (for pods' processes
    ``Node.containers``).
    """
    found: dict[int, str] = {}
    for pid in pids():
        part = marked_part(pid, root)
        if part is None and (node := node_of_container(pid, root)) is not None:
            part = node.containers
        if part is not None and start_ticks(pid) is not None:
            found[pid] = part
    return found


def kill_all(root: Path, parts: Callable[[str], bool], *, timeout_s: float) -> None:
    """Kill every process of ours whose part is wanted, also those born meanwhile.

    Raises:
        TimeoutError: some are still there after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = {pid: part for pid, part in ours(root).items() if parts(part)}
        if not left:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"these processes do not end: {left}")
        for pid in left:
            stop_marked(pid, root, grace_s=0)


def stop_marked(pid: int, root: Path, *, grace_s: float) -> None:
    """End a process that carries our mark or runs in one of our containers."""
    stop(pid, partial(_is_ours, pid, root), grace_s=grace_s)


def _is_ours(pid: int, root: Path) -> bool:
    return marked_part(pid, root) is not None or node_of_container(pid, root) is not None

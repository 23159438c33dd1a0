"""Files in /dev/shm that processes of an engine leave when they are killed.

In a pod /dev/shm outlives the container, and what lies there counts against its memory.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
"""Where the C library puts what is named by ``shm_open`` and ``sem_open``."""

IN_POD = "POD_UID"
"""Environment variable: set where /dev/shm is one pod's own, whose one engine this is."""

# The weights agent's segments have other names.
_PREFIXES = (
    "vllm_dist_",
    "vllm_offload_",
    "VLLM_OBJECT_STORAGE_SHM_BUFFER",
    "psm_",
    "sem.mp-",
    "torch_",
    "nccl-",
)
# how Python's resource tracker knows them: (prefix of the file, kind, prefix of the name)
_TRACKED = (("psm_", "shared_memory", "/psm_"), ("sem.mp-", "semaphore", "/mp-"))

_Inode = tuple[str, int]


class _UnreadableError(Exception):
    """A process that may map a file does not show what it maps."""


def names_now(folder: Path = SHM) -> frozenset[str]:
    """Names of the files of this user that an engine may have made."""
    return frozenset(_inodes(folder))


def mapped_by(processes: Iterable[psutil.Process], folder: Path = SHM) -> frozenset[str]:
    """Which of ``names_now`` these processes map; those gone already map none."""
    pids = [process.pid for process in processes if process.is_running()]
    mapped = {inode for pid in pids for inode in _visible_maps(pid)}
    return frozenset(name for name, inode in _inodes(folder).items() if inode in mapped)


def unused(names: Iterable[str], folder: Path = SHM) -> frozenset[str]:
    """Those of ``names`` that are there and that no process maps which shows what it maps.

    Enough to know of files that this process' children made: no other's would hide it.
    """
    return _unmapped(names, folder, maps=_visible_maps)


def remove_unused(names: Iterable[str], folder: Path = SHM) -> frozenset[str]:
    """Remove what ``unused`` says, which this process' children made; returns the names."""
    removed = _remove(unused(names, folder), folder)
    for name in removed:
        for prefix, kind, known in _TRACKED:
            if name.startswith(prefix):
                # else it would complain of them when this process ends
                resource_tracker.unregister(known + name.removeprefix(prefix), kind)
    return removed


def sweep_pod(environ: Mapping[str, str] = os.environ, folder: Path = SHM) -> frozenset[str]:
    """Before an engine starts: remove what a killed container left in this pod's /dev/shm.

    Elsewhere than in a pod nothing: /dev/shm may be shared with processes that are not seen here.
    Nor where a process of this user hides what it maps.
    """
    if not environ.get(IN_POD):
        return frozenset()
    try:
        return _remove(_unmapped(names_now(folder), folder, maps=_maps), folder)
    except _UnreadableError:
        return frozenset()


def _unmapped(
    names: Iterable[str], folder: Path, *, maps: Callable[[int], set[_Inode]]
) -> frozenset[str]:
    there = _inodes(folder)
    candidates = {name: there[name] for name in names if name in there}
    if not candidates:
        return frozenset()
    mapped = {inode for pid in psutil.pids() for inode in maps(pid)}
    return frozenset(name for name, inode in candidates.items() if inode not in mapped)


def _remove(names: frozenset[str], folder: Path) -> frozenset[str]:
    removed = set()
    for name in names:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
            removed.add(name)
    return frozenset(removed)


def _inodes(folder: Path) -> dict[str, _Inode]:
    found: dict[str, _Inode] = {}
    if not folder.is_dir():
        return found
    for path in folder.iterdir():
        if not path.name.startswith(_PREFIXES):
            continue
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if status.st_uid == os.geteuid():
                device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
                found[path.name] = (device, status.st_ino)
    return found


def _visible_maps(pid: int) -> set[_Inode]:
    try:
        return _maps(pid)
    except _UnreadableError:
        return set()


def _maps(pid: int) -> set[_Inode]:
    """The files that a process maps; none where it is gone, or another user's that hides it.

    Raises:
        _UnreadableError: it is this user's.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    except PermissionError as error:
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{pid}").stat().st_uid == os.geteuid():
                raise _UnreadableError(pid) from error
        return set()
    # address, rights, offset, device, inode, path
    split = (line.split(maxsplit=5) for line in lines)
    return {(fields[3], int(fields[4])) for fields in split if fields[4] != "0"}

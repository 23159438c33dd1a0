"""POSIX shared memory that two containers share through a volume at ``/dev/shm``.

Segments are plain files of a tmpfs. Python's ``multiprocessing.shared_memory`` is not used: its
resource tracker removes segments that another process still needs.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

MIN_BYTES: Final = mmap.PAGESIZE
PUSH_PREFIX: Final = "rollout-push-"
"""Of the names of what senders make; the agent's have one of their own."""
_NO_RESERVE: Final = 0x4000  # MAP_NORESERVE, which Python 3.11 does not name


class RoomError(Exception):
    """Not enough shared memory; the message has the arithmetic.

    ``retryable``: room may come by itself (somebody else's files), a configured limit does not.
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class AttachError(Exception):
    """A segment that is not there, or is not what was announced."""


@dataclass
class Segment:
    """A segment that this process made, mapped for writing. Its file is locked from before it has a
    size until it is unmapped or its maker (and whoever was forked of that) is gone.
    """

    path: Path
    size: int
    map: mmap.mmap = field(repr=False)

    @classmethod
    def create(cls, shm_dir: Path, name: str, size: int) -> Self:
        """Make a segment of ``size`` bytes whose pages are all there already, so that no later
        write can fail for want of memory.

        Raises:
            RoomError: the file system has less.
            FileExistsError: the name is taken.
        """
        size = max(size, MIN_BYTES)
        path = shm_dir / name
        check_free(shm_dir, size)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, size)
            mapped = mmap.mmap(fd, size)  # with a duplicate of fd, which keeps the lock
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise RoomError(_full(shm_dir, size), retryable=True) from error
            raise
        finally:
            os.close(fd)
        return cls(path, size, mapped)

    @property
    def name(self) -> str:
        """What a peer attaches by."""
        return self.path.name

    def close(self) -> None:
        """Unmap and remove. Idempotent."""
        self.path.unlink(missing_ok=True)
        # a slice that a traceback still holds keeps the mapping until it goes
        with suppress(BufferError):
            self.map.close()

    def withdraw(self) -> None:
        """Like ``close``, but give the pages back even while a thread hangs in a read into them:
        whatever the kernel still writes there fails with ``EFAULT``. No rank may have it mapped:
        to touch it from a program is a SIGBUS from now on.
        """
        with suppress(FileNotFoundError):
            os.truncate(self.path, 0)
        self.close()


@dataclass
class Attached:
    """Another process' segment, mapped privately: what is written here stays here."""

    name: str
    size: int
    map: mmap.mmap = field(repr=False)

    def refresh(self, start: int, length: int) -> None:
        """Forget private copies of pages (a loader that changed a view in place made them), so
        that the window shows what the segment holds now.
        """
        if length:
            first = start - start % mmap.PAGESIZE
            self.map.madvise(mmap.MADV_DONTNEED, first, start + length - first)

    def close(self) -> None:
        """Unmap; views that are still alive keep the mapping."""
        with suppress(BufferError):
            self.map.close()


def attach(shm_dir: Path, name: str) -> Attached:
    """Map a segment by name.

    Raises:
        AttachError: it is not in ``shm_dir``, or is no regular file.
    """
    if name != Path(name).name or name.startswith("."):
        raise AttachError(f"segment name {name!r} is no plain file name")
    path = shm_dir / name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise AttachError(
            f"segment {path}: {error.strerror}; both containers must mount the same memory there"
        ) from error
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise AttachError(f"segment {path} is empty")
        mapped = mmap.mmap(
            fd,
            size,
            flags=mmap.MAP_PRIVATE | _NO_RESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    except OSError as error:
        raise AttachError(f"segment {path} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(fd)
    return Attached(name, size, mapped)


def address_of(mapped: mmap.mmap) -> int:
    """Of its first byte."""
    holder = ctypes.c_ubyte.from_buffer(mapped)
    return ctypes.addressof(holder)


def check_free(shm_dir: Path, size: int) -> None:
    """Raise ``RoomError`` if the file system has less than ``size`` bytes left."""
    room = os.statvfs(shm_dir)
    if room.f_blocks and room.f_bavail * room.f_frsize < size:
        raise RoomError(_full(shm_dir, size), retryable=True)


def _full(shm_dir: Path, size: int) -> str:
    room = os.statvfs(shm_dir)
    return (
        f"{shm_dir}: {size} bytes are needed, {room.f_bavail * room.f_frsize} of "
        f"{room.f_blocks * room.f_frsize} are free; give the memory volume a larger sizeLimit"
    )


def remove_orphans(shm_dir: Path, prefix: str) -> tuple[str, ...]:
    """Remove what dead processes left under ``prefix``, which living ones use too; returns the
    names. Ranks that have one mapped keep it until they see that its name is gone.
    """
    removed: list[str] = []
    for path in shm_dir.iterdir():
        if path.name.startswith(prefix) and _is_orphan(path):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return tuple(removed)


def _is_orphan(path: Path) -> bool:
    try:
        status = path.lstat()
        # one without a size may be about to be locked, and takes no memory
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # gone, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # its maker lives
    finally:
        os.close(fd)
    return True


def remove_stale(shm_dir: Path, prefix: str) -> tuple[str, ...]:
    """Remove what a dead process left under ``prefix``; returns the names."""
    stale = [path for path in shm_dir.iterdir() if path.name.startswith(prefix) and path.is_file()]
    for path in stale:
        path.unlink(missing_ok=True)
    return tuple(path.name for path in stale)

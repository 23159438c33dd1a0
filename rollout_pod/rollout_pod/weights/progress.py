"""How far the GPU work of each side has come: counters in a page of memory that all of them share.

A GPU writes a counter when everything that its process queued before is done; hosts read it. So a
message about a bucket may run ahead of the copies that it speaks of, and nobody's stream ever waits
for another process: one that dies leaves a counter that stops, which a deadline ends.
"""

import ctypes
import functools
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rollout_pod.weights.device import Device, DeviceError
from rollout_pod.weights.segment import AttachError, RoomError, Segment, address_of, attach

SENDER: Final = 0
"""The sender's counter; that of rank ``r`` is ``r + 1``."""
_LINE: Final = 64
"""Bytes from one counter to the next: a cache line each."""
_SPIN_S: Final = 20e-6
_SLOW_S: Final = 1e-3
_SPINS_FOR_S: Final = 0.05
"""A bucket takes less; from then on somebody is late, and waiting must not cost a core."""
_CHECK_S: Final = 1e-3
_SET_TIMER_SLACK: Final = 29  # PR_SET_TIMERSLACK, nanoseconds


class Counters:
    """One process' view of the page, of which it writes one counter. Calls may come from any
    thread, ``queue`` from the one whose work is counted.

    Args:
        memory: the page, shared with the other processes.
        device: that writes.
        mine: the index of the counter that this process writes.

    Raises:
        DeviceError: the GPU cannot write there, or has not when it was tried.
    """

    def __init__(self, memory: mmap.mmap, device: Device, mine: int) -> None:
        if (mine + 1) * _LINE > len(memory):
            raise DeviceError(f"there is no counter {mine} in {len(memory)} bytes")
        self._memory = memory
        self._device = device
        self._mine = mine
        self._host = address_of(memory)
        self._there = device.publish(self._host, len(memory))
        self._count = 0
        try:
            count = self.queue()
            device.synchronize()
            if self.read(mine) != count:
                raise DeviceError("the GPU does not write to the memory that is shared")
        except DeviceError:
            self.close()
            raise

    def queue(self) -> int:
        """Count when all that this thread has queued on the device is done.

        Returns:
            What ``read`` gives from then on, at least.
        """
        self._count += 1
        self._device.signal(self._there + self._mine * _LINE, self._count)
        return self._count

    def read(self, which: int) -> int:
        """A counter now."""
        return int(ctypes.c_uint32.from_address(self._host + which * _LINE).value)

    def close(self) -> None:
        """Unmap. Idempotent; what was queued must be done."""
        if self._host:
            with suppress(DeviceError):
                self._device.unregister(self._host)
            self._host = 0
            with suppress(BufferError):
                self._memory.close()


class OwnCounters(Counters):
    """The sender's: it makes the page, whose name is gone as soon as all ranks have it mapped.

    Args:
        shm_dir: memory that is shared with the ranks.
        prefix: of the page's name.
        device: the sender's GPU.
        ranks: how many ranks there are in all.

    Raises:
        DeviceError: as above, or there is no room.
    """

    def __init__(self, shm_dir: Path, prefix: str, device: Device, ranks: int) -> None:
        try:
            self._segment = Segment.create(
                shm_dir, f"{prefix}{secrets.token_hex(8)}", (ranks + 1) * _LINE
            )
        except (RoomError, OSError) as error:
            raise DeviceError(f"no room for counters: {error}") from error
        self.name = self._segment.name
        self.hidden = False
        try:
            super().__init__(self._segment.map, device, SENDER)
        except DeviceError:
            self._segment.close()
            raise

    def hide(self) -> None:
        """No other process can map it from now on, and a killed one leaves nothing behind."""
        self._segment.path.unlink(missing_ok=True)
        self.hidden = True

    def close(self) -> None:
        """See ``Counters``."""
        super().close()
        self._segment.close()


def open_counters(shm_dir: Path, name: str, device: Device, rank: int) -> Counters:
    """A rank's view of a sender's page.

    Raises:
        AttachError, DeviceError: it cannot be mapped, or not be written to.
    """
    attach(shm_dir, name).close()  # the checks of a name
    with (shm_dir / name).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
    return Counters(memory, device, rank + 1)


def watch(done: Callable[[], bool], check: Callable[[], None]) -> None:
    """Look until ``done``: briefly often, then less so.

    Args:
        done: looks at a counter.
        check: called now and then; raises when there is no use in waiting.
    """
    slow_from = time.monotonic() + _SPINS_FOR_S
    check_at = 0.0
    with _sharp_sleep():
        while not done():
            now = time.monotonic()
            if now >= check_at:
                check()
                check_at = now + _CHECK_S
            # asleep, and not spinning: another thread has the interpreter for its messages
            time.sleep(_SPIN_S if now < slow_from else _SLOW_S)


def look_out(done: Callable[[], bool], check: Callable[[], None] = lambda: None) -> None:
    """``watch`` for what should come within milliseconds, for 50 of them at most; whoever has not
    seen it then waits asleep. A processor that slept for so long takes half a millisecond to come
    to itself, which is as much as all messages of an update take.
    """
    until = time.monotonic() + _SPINS_FOR_S
    watch(lambda: done() or time.monotonic() > until, check)


@contextmanager
def _sharp_sleep() -> Iterator[None]:
    """Let this thread's short sleeps be short: by default the kernel adds 50 microseconds."""
    _libc().prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1000))
    try:
        yield
    finally:
        _libc().prctl(_SET_TIMER_SLACK, ctypes.c_ulong(0))  # what it was when the thread began


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


__all__: Final = [
    "SENDER", "AttachError", "Counters", "OwnCounters", "look_out", "open_counters", "watch",
]  # fmt: skip

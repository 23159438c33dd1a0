"""Host memory that is pinned for a GPU, in pieces.

The driver takes no copy that touches two pieces. They are cut where addresses are multiples of
``PIN_BYTES``, so that a copy can be cut there too by whoever knows nothing but its address.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from rollout_pod.weights.copies import Copy, clip
from rollout_pod.weights.device import Device

PIN_BYTES: Final = 1 << 30
"""Pinned at a time: one call for all would hold the driver's lock for seconds."""


def pin(device: Device, address: int, nbytes: int, pinned: list[int]) -> None:
    """Pin in pieces; ``pinned`` gets the addresses of those that are.

    Raises:
        DeviceError: one cannot be pinned.
    """
    for start, size in runs(address, nbytes):
        device.register(start, size)
        pinned.append(start)


def unpin(device: Device, pinned: list[int]) -> None:
    """Undo ``pin``."""
    while pinned:
        device.unregister(pinned.pop())


def runs(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Memory as (address, bytes), each of which touches one piece only."""
    end = address + nbytes
    while address < end:
        stop = min(end, address - address % PIN_BYTES + PIN_BYTES)
        yield address, stop - address
        address = stop


def cut(copies: Iterable[Copy]) -> Iterator[Copy]:
    """The same copies out of pinned memory, each of which reads one piece only."""
    for copy in copies:
        end = copy.source + (copy.rows - 1) * copy.source_pitch + copy.width
        if copy.source // PIN_BYTES == (end - 1) // PIN_BYTES:
            yield copy
            continue
        for start, size in runs(copy.source, end - copy.source):
            for part in clip((copy,), start, start + size):
                yield part._replace(source=part.source + start)

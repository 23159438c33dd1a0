"""How the bytes of a version are cut into buckets, and the count that none is lost. Pure.

A version has one *layout*: every tensor starts at a multiple of ``ALIGN`` bytes, in the order of
the manifest. A bucket is a window of that layout, so that whoever holds the layout in shared
memory sends windows of it without a copy, and whoever does not fills buffers of bucket size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rollout_pod.weights.spec import TensorSpec

ALIGN: Final = 256
"""Bytes. Every tensor, and every piece of one, starts at a multiple of it."""

WINDOW: Final = 2
"""Buckets that may be on their way without an acknowledgement."""


class BucketError(ValueError):
    """A bucket that does not follow from the manifest and the buckets before it."""


class Entry(NamedTuple):
    """A piece of a tensor in a bucket; all but ``tensor`` (an index) in bytes."""

    tensor: int
    offset: int
    """From the start of the bucket."""
    tensor_offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """A window ``[start, start + length)`` of the layout."""

    seq: int
    start: int
    length: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Plan:
    """Where every tensor lies in the layout, and the buckets that cover it."""

    offsets: tuple[int, ...]
    nbytes: int
    """Of the layout, with its gaps."""
    buckets: tuple[Bucket, ...]


def align(position: int) -> int:
    """The next multiple of ``ALIGN``."""
    return -(-position // ALIGN) * ALIGN


def make_plan(tensors: Sequence[TensorSpec], bucket_bytes: int) -> Plan:
    """Lay out and cut. A tensor is split only if it is larger than a bucket.

    Raises:
        ValueError: ``bucket_bytes`` is less than ``ALIGN``.
    """
    room = bucket_bytes - bucket_bytes % ALIGN
    if room < ALIGN:
        raise ValueError(f"bucket_bytes {bucket_bytes}: must be at least {ALIGN}")
    offsets: list[int] = []
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    start = position = 0

    def cut() -> None:
        nonlocal start
        if entries:
            buckets.append(Bucket(len(buckets), start, position - start, tuple(entries)))
            entries.clear()

    for index, tensor in enumerate(tensors):
        aligned = align(position)
        if aligned + tensor.nbytes - start > room:
            cut()
        position = aligned
        if not entries:
            start = position
        offsets.append(position)
        done = 0
        while True:
            piece = min(tensor.nbytes - done, room - (position - start))
            entries.append(Entry(index, position - start, done, piece))
            position += piece
            done += piece
            if done == tensor.nbytes:
                break
            cut()
            start = position
    cut()
    return Plan(tuple(offsets), position, tuple(buckets))


class Account:
    """Checks buckets as they come: every byte of every tensor exactly once, in order."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self._tensors = tensors
        self._done: list[int | None] = [None] * len(tensors)  # None: not even its empty piece
        self._next = 0
        self._whole: int | None = None
        """Bytes of tensors that were counted without buckets, and in ``_taken`` their number."""
        self._taken = 0

    @property
    def buckets(self) -> int:
        """How many were taken."""
        return self._next

    @property
    def nbytes(self) -> int:
        """Bytes of tensors taken so far."""
        return sum(done or 0 for done in self._done) if self._whole is None else self._whole

    def take(self, seq: int, length: int, entries: Sequence[Entry]) -> None:
        """Count one bucket.

        Raises:
            BucketError: it is doubled, out of order, overlaps, leaves a gap or exceeds a tensor.
                Nothing is counted then.
        """
        if seq != self._next:
            what = "came before" if seq < self._next else f"came instead of bucket {self._next}"
            raise BucketError(f"bucket {seq} {what}")
        if not entries:
            raise BucketError(f"bucket {seq} is empty")
        if self._whole is not None:
            raise BucketError(f"bucket {seq}: tensors were read in place before")
        seen: dict[int, int] = {}
        end = 0
        for entry in entries:
            self._check(seq, length, end, entry, seen)
            end = entry.offset + entry.nbytes
            seen[entry.tensor] = entry.tensor_offset + entry.nbytes
        for tensor, done in seen.items():
            self._done[tensor] = done
        self._next += 1

    def take_whole(self, first: int, count: int | None) -> None:
        """Count the next tensors as one bucket: they are read where the sender has them.

        Args:
            first: the index of the first one.
            count: how many; None for all the rest.

        Raises:
            BucketError: after a bucket, not the next ones, or more than there are.
        """
        if self._next and self._whole is None:
            raise BucketError("direct: after a bucket")
        stop = len(self._tensors) if count is None else first + count
        if first != self._taken or not first <= stop <= len(self._tensors):
            raise BucketError(
                f"direct: tensors {first} to {stop}; the next is {self._taken} of "
                f"{len(self._tensors)}"
            )
        nbytes = sum(tensor.nbytes for tensor in self._tensors[first:stop])
        self._whole = (self._whole or 0) + nbytes
        self._taken = stop
        self._next += 1

    def _check(self, seq: int, length: int, end: int, entry: Entry, seen: dict[int, int]) -> None:
        where = f"bucket {seq}, tensor {entry.tensor}"
        if not 0 <= entry.tensor < len(self._tensors):
            raise BucketError(f"{where}: the manifest has {len(self._tensors)} tensors")
        tensor = self._tensors[entry.tensor]
        where = f"bucket {seq}, tensor {tensor.name!r}"
        done = seen.get(entry.tensor, self._done[entry.tensor])
        if done is not None and done == tensor.nbytes:
            raise BucketError(f"{where}: was complete before")
        if entry.tensor_offset != (done or 0):
            raise BucketError(f"{where}: piece at {entry.tensor_offset}, expected {done or 0}")
        if entry.nbytes < 0 or (entry.nbytes == 0 and tensor.nbytes > 0):
            raise BucketError(f"{where}: piece of {entry.nbytes} bytes")
        if entry.tensor_offset + entry.nbytes > tensor.nbytes:
            raise BucketError(f"{where}: piece ends beyond its {tensor.nbytes} bytes")
        if entry.offset % ALIGN:
            raise BucketError(f"{where}: offset {entry.offset} is no multiple of {ALIGN}")
        if entry.offset < end:
            raise BucketError(f"{where}: overlaps the piece before it")
        if entry.offset + entry.nbytes > length:
            raise BucketError(f"{where}: ends beyond the bucket's {length} bytes")

    def missing(self) -> list[str]:
        """Names of the tensors that are not complete."""
        if self._whole is not None:
            return [tensor.name for tensor in self._tensors[self._taken :]]
        return [
            tensor.name
            for tensor, done in zip(self._tensors, self._done, strict=True)
            if done is None or done != tensor.nbytes
        ]

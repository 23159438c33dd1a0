"""Which bytes of a tensor go where: the copy plan, and cutting it to the pieces that come. Pure.

Addresses and sizes are in bytes throughout.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

MAX_COPIES: Final = 65536
"""Of one copy between views; more is no layout that this is for (a transposed matrix, say)."""


MAX_ROWS: Final = 4 << 20
"""That ``uncovered`` looks at."""


class Copy(NamedTuple):
    """``rows`` pieces of ``width`` bytes; the pitches are from one to the next."""

    source: int
    """From the start of the checkpoint's tensor, or an address."""
    target: int
    width: int
    rows: int = 1
    source_pitch: int = 0
    target_pitch: int = 0

    @property
    def nbytes(self) -> int:
        """In all."""
        return self.width * self.rows

    @property
    def is_flat(self) -> bool:
        """The rows follow each other without a gap, on both sides."""
        return self.rows == 1 or self.source_pitch == self.target_pitch == self.width


class Layout(NamedTuple):
    """A view of some memory: byte offset of its first element, strides in elements."""

    offset: int
    strides: tuple[int, ...]


class UnplannableError(ValueError):
    """A copy between views that falls into too many pieces."""


def decompose(
    shape: Sequence[int], itemsize: int, source: Layout, target: Layout
) -> tuple[Copy, ...]:
    """The copy of one view onto another of the same shape and type, in as few pieces as it takes.

    Raises:
        UnplannableError: it takes more than ``MAX_COPIES``.
    """
    dims = [
        (size, s * itemsize, t * itemsize)
        for size, s, t in zip(shape, source.strides, target.strides, strict=True)
        if size != 1
    ]
    if any(size == 0 for size, _, _ in dims):
        return ()
    dims.sort(key=lambda dim: -dim[2])
    merged: list[tuple[int, int, int]] = []
    for size, s, t in dims:
        if merged and merged[-1][1] == s * size and merged[-1][2] == t * size:
            merged[-1] = (merged[-1][0] * size, s, t)
        else:
            merged.append((size, s, t))
    width = itemsize
    if merged and merged[-1][1:] == (itemsize, itemsize):
        width *= merged.pop()[0]
    rows, source_pitch, target_pitch = merged.pop() if merged else (1, 0, 0)
    count = 1
    for size, _, _ in merged:
        count *= size
    if count > MAX_COPIES:
        raise UnplannableError(f"{count} copies for one view of shape {tuple(shape)}")
    return tuple(
        Copy(
            source.offset + sum(i * s for i, (_, s, _) in zip(index, merged, strict=True)),
            target.offset + sum(i * t for i, (_, _, t) in zip(index, merged, strict=True)),
            width, rows, source_pitch, target_pitch,
        )
        for index in product(*(range(size) for size, _, _ in merged))
    )  # fmt: skip


def clip(copies: Iterable[Copy], start: int, stop: int) -> Iterator[Copy]:
    """What of ``copies`` reads bytes ``[start, stop)``, with sources counted from ``start``."""
    for copy in copies:
        if copy.rows == 1 or copy.source_pitch == 0:
            yield from _clip_row(copy, start, stop)
            continue
        # rows that lie inside as a whole, and the two that a cut may go through
        first = max(0, -(-(start - copy.source) // copy.source_pitch))
        last = min(copy.rows, (stop - copy.width - copy.source) // copy.source_pitch + 1)
        if first < last:
            yield copy._replace(
                source=copy.source + first * copy.source_pitch - start,
                target=copy.target + first * copy.target_pitch,
                rows=last - first,
            )
        else:
            last = first
        for row in {first - 1, last} - set(range(first, last)):
            if 0 <= row < copy.rows:
                yield from _clip_row(_row(copy, row), start, stop)


def parts(copies: Iterable[Copy], most: int) -> Iterator[Copy]:
    """The same copies, each of ``most`` bytes at most; a row of a strided one stays whole."""
    for copy in copies:
        if copy.nbytes <= most:
            yield copy
        elif copy.is_flat:
            for at in range(0, copy.nbytes, most):
                yield Copy(copy.source + at, copy.target + at, min(most, copy.nbytes - at))
        else:
            step = max(1, most // copy.width)
            for row in range(0, copy.rows, step):
                yield copy._replace(
                    source=copy.source + row * copy.source_pitch,
                    target=copy.target + row * copy.target_pitch,
                    rows=min(step, copy.rows - row),
                )


def _row(copy: Copy, row: int) -> Copy:
    return Copy(
        copy.source + row * copy.source_pitch, copy.target + row * copy.target_pitch, copy.width
    )


def _clip_row(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    begin = max(copy.source, start)
    end = min(copy.source + copy.width, stop)
    if begin < end:
        yield copy._replace(
            source=begin - start, target=copy.target + begin - copy.source, width=end - begin
        )


@dataclass(frozen=True)
class CopyPlan:
    """What a load does with the tensors it covers.

    Args:
        copies: by the checkpoint's names; ``target`` is an address of this process. A name without
            copies is one that this rank has no use for.
        full: whether every byte of every parameter is written.
        reasons: why some names are not covered; empty if all are.
    """

    copies: Mapping[str, tuple[Copy, ...]]
    full: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Written by one load."""
        return sum(copy.nbytes for copies in self.copies.values() for copy in copies)


class Piece(NamedTuple):
    """A part of a checkpoint's tensor that lies in memory; addresses are this process'."""

    name: str
    start: int
    nbytes: int
    address: int


def place(plan: CopyPlan, pieces: Iterable[Piece]) -> list[Copy]:
    """The copies that put ``pieces`` where they belong; ``source`` is an address too."""
    return [
        copy._replace(source=copy.source + piece.address)
        for piece in pieces
        for copy in clip(plan.copies[piece.name], piece.start, piece.start + piece.nbytes)
    ]


def uncovered(ranges: Iterable[tuple[int, int]], copies: Sequence[Copy]) -> int | None:
    """How many bytes of ``ranges`` (start, stop) no copy writes; None if that is too much to
    count (rows of very many slices).
    """
    written: list[tuple[int, int]] = []
    if sum(copy.rows for copy in copies) > MAX_ROWS:
        return None
    for copy in copies:
        if copy.rows == 1 or copy.target_pitch == copy.width:
            written.append((copy.target, copy.target + copy.nbytes))
        else:
            starts = range(copy.target, copy.target + copy.rows * copy.target_pitch,
                           copy.target_pitch)  # fmt: skip
            written.extend((start, start + copy.width) for start in starts)
    written.sort()
    missing = 0
    position = 0
    for start, stop in sorted(ranges):
        at = start
        while position < len(written) and written[position][1] <= at:
            position += 1
        index = position
        while index < len(written) and written[index][0] < stop:
            begin, end = written[index]
            missing += max(0, begin - at)
            at = max(at, end)
            index += 1
        missing += max(0, stop - at)
    return missing

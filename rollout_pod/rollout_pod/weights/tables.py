"""Copies as the tables that one launch of the kernel works on. Pure: numpy only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rollout_pod.weights.copies import Copy

Array = npt.NDArray[Any]

WORDS: Final = (8, 4, 2, 1)
"""Bytes of a word: the largest that addresses and lengths allow."""
_MOST_WORDS: Final = 1 << 30
"""Of one entry: the kernel counts in 32 bits."""


@dataclass(frozen=True)
class Table:
    """One launch. ``entries`` and ``blocks`` say of each program which copy it works on, and
    which block of it; the rest is one row for each copy, sizes in words.
    """

    word: int
    strided: bool
    sources: Array
    targets: Array
    lengths: Array
    widths: Array
    source_pitches: Array
    target_pitches: Array
    entries: Array
    blocks: Array


def make_tables(copies: Sequence[Copy], block: int) -> list[Table]:
    """Group copies by size of word and by shape; no program has more than ``block`` words."""
    if not copies:
        return []
    array = np.array(copies, dtype=np.int64).reshape(-1, 6)
    array = array[(array[:, 2] > 0) & (array[:, 3] > 0)]
    source, target, width, rows, source_pitch, target_pitch = array.T
    flat = (rows == 1) | ((source_pitch == width) & (target_pitch == width))
    bits = source | target | width | np.where(flat, 0, source_pitch | target_pitch)
    found: list[Table] = []
    for index, word in enumerate(WORDS):
        fits = bits % word == 0
        if index:
            fits &= bits % WORDS[index - 1] != 0
        for strided in (False, True):
            chosen = array[fits & (flat != strided)]
            if len(chosen):
                found.extend(_tables(chosen, word, strided, block))
    return found


def _tables(array: Array, word: int, strided: bool, block: int) -> Iterator[Table]:
    array = _split(array, word, strided)
    source, target, width, rows, source_pitch, target_pitch = array.T
    lengths = width * rows // word
    counts = -(-lengths // block)
    entries = np.repeat(np.arange(len(array)), counts)
    blocks = np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts)
    yield Table(
        word=word,
        strided=strided,
        sources=np.ascontiguousarray(source),
        targets=np.ascontiguousarray(target),
        lengths=lengths.astype(np.int32),
        widths=(width // word).astype(np.int32),
        source_pitches=source_pitch // word,
        target_pitches=target_pitch // word,
        entries=entries.astype(np.int32),
        blocks=blocks.astype(np.int32),
    )


def _split(array: Array, word: int, strided: bool) -> Array:
    """Cut entries that are too long to be counted."""
    most = _MOST_WORDS * word
    if not ((array[:, 2] * array[:, 3]) > most).any():
        return array
    parts: list[tuple[int, ...]] = []
    for source, target, width, rows, source_pitch, target_pitch in array.tolist():
        if strided:
            step = max(1, most // width)
            parts.extend(
                (source + row * source_pitch, target + row * target_pitch, width,
                 min(step, rows - row), source_pitch, target_pitch)
                for row in range(0, rows, step)
            )  # fmt: skip
        else:
            total = width * rows
            parts.extend(
                (source + at, target + at, min(most, total - at), 1, 0, 0)
                for at in range(0, total, most)
            )
    return np.array(parts, dtype=np.int64)

"""From ranges of files to where their tensors go. Pure, but for the memory that is written."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout_pod.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a file; tensors may begin and end anywhere in it."""

    file: int
    """Index into ``Checkpoint.files``."""
    start: int
    stop: int


@dataclass
class Places:
    """Where the bytes of one file go: tensors follow each other in the file, not in the target."""

    begins: list[int]
    """In the file, ascending."""
    ends: list[int]
    offsets: list[int]
    """In the target."""

    def put(self, position: int, chunk: bytes, target: memoryview) -> None:
        """Scatter bytes that begin at ``position`` of the file, all of them tensors'."""
        with memoryview(chunk) as source:
            at = 0
            number = bisect_right(self.begins, position) - 1
            while at < len(source):
                take = min(len(source) - at, self.ends[number] - position - at)
                begin = self.offsets[number] + position + at - self.begins[number]
                target[begin : begin + take] = source[at : at + take]
                at += take
                number += 1


def places_of(checkpoint: Checkpoint, offsets: Sequence[int]) -> list[Places]:
    """Of every file; ``offsets`` says where each tensor goes, in the order of the checkpoint's."""
    places = [Places([], [], []) for _ in checkpoint.files]
    for tensor, offset in zip(checkpoint.tensors, offsets, strict=True):
        if tensor.spec.nbytes:
            place = places[tensor.file]
            place.begins.append(tensor.position)
            place.ends.append(tensor.position + tensor.spec.nbytes)
            place.offsets.append(offset)
    return places


def pieces_of(sizes: Sequence[int], places: Sequence[Places], nbytes: int) -> Iterator[Piece]:
    """All tensor bytes in pieces of at most ``nbytes``; ``sizes`` are those of the files."""
    for number, (size, place) in enumerate(zip(sizes, places, strict=True)):
        if place.begins:
            for start in range(place.begins[0], size, nbytes):
                yield Piece(number, start, min(start + nbytes, size))

"""Whole tensors, or pieces of them, out of what a sender announces."""

from collections.abc import Collection, Iterator, Sequence
from typing import cast

import torch

from rollout_pod.weights.buckets import BucketError, Entry
from rollout_pod.weights.copies import Piece
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.memory import Memories, Source
from rollout_pod.weights.spec import TensorSpec
from rollout_pod.weights.wire import BucketReady, Direct

Tensors = list[tuple[str, torch.Tensor]]


class Assembler:
    """One load: takes buckets in order, gives whole tensors.

    A tensor that lies in one bucket is a view of it, valid until the bucket is acknowledged; the
    pieces of a larger one are gathered in memory of their own.

    Args:
        manifest: of the session.
        memories: of its sender.
        pieces: names of tensors that are not wanted whole.
    """

    def __init__(
        self, manifest: Manifest, memories: Memories, pieces: Collection[str] = ()
    ) -> None:
        self._tensors = manifest.tensors
        self._aliases: dict[str, list[str]] = {}
        for alias, name in manifest.aliases:
            self._aliases.setdefault(name, []).append(alias)
        self._memories = memories
        self._pieces = frozenset(pieces)
        self.wanted = not manifest.within(self._pieces)
        """Whether any tensor is wanted whole."""
        self._parts: dict[int, torch.Tensor] = {}

    def find(self, bucket: BucketReady) -> Source:
        """The memory of a bucket, as the sender left it.

        Raises:
            AttachError: no such segment.
            BucketError: it ends before the bucket does.
        """
        source = self._memories.get(bucket.segment)
        if bucket.base + bucket.length > source.size:
            raise BucketError(
                f"bucket {bucket.seq} ends at {bucket.base + bucket.length}, its segment "
                f"{bucket.segment} at {source.size}"
            )
        source.refresh(bucket.base, bucket.length)
        return source

    def take(self, bucket: BucketReady, source: Source) -> Tensors:
        """The tensors that this bucket completes, with their aliases, without those of which
        only pieces are wanted.
        """
        whole: Tensors = []
        for entry in bucket.pieces() if self.wanted else ():
            spec = self._tensors[entry.tensor]
            if spec.name in self._pieces:
                continue
            tensor = self._piece(source, bucket.base, entry, spec)
            if tensor is not None:
                whole.extend((name, tensor) for name in self._names(spec))
        return whole

    def completed(self, bucket: BucketReady) -> list[str]:
        """Names, without aliases, of tensors whose last byte is in this bucket."""
        return [
            spec.name
            for entry in bucket.pieces()
            if entry.tensor_offset + entry.nbytes == (spec := self._tensors[entry.tensor]).nbytes
        ]

    def cut(self, bucket: BucketReady, source: Source) -> list[Piece]:
        """The pieces in this bucket of tensors that are not wanted whole."""
        start = source.address + bucket.base
        return [
            Piece(name, entry.tensor_offset, entry.nbytes, start + entry.offset)
            for entry in bucket.pieces()
            if (spec := self._tensors[entry.tensor]).name in self._pieces
            for name in self._names(spec)
        ]

    # --- many at once, where the sender has them ---

    def _part(self, message: Direct) -> Iterator[tuple[TensorSpec, tuple[int, int]]]:
        first = message.first
        stop = len(self._tensors) if message.count is None else first + message.count
        return zip(self._tensors[first:stop], message.places[first:stop], strict=True)

    def ends(self, message: Direct) -> bool:
        """Whether the last tensor is among those of ``message``."""
        return message.count is None or message.first + message.count == len(self._tensors)

    def regions(self, message: Direct) -> list[Source]:
        """The memory that ``message`` speaks of.

        Raises:
            AttachError, BucketError: a region is not there.
        """
        sources = [self._memories.get(name) for name in message.regions]
        if not all(source.on_device for source in sources):
            raise BucketError("direct: a region is not the GPU's memory")
        return sources

    def check(self, message: Direct, sources: Sequence[Source]) -> None:
        """Raise ``BucketError`` if a tensor lies outside of its region."""
        for spec, (region, offset) in self._part(message):
            if region >= len(sources) or offset + spec.nbytes > sources[region].size:
                raise BucketError(f"direct: tensor {spec.name!r} lies outside of its region")

    def views(self, message: Direct, sources: Sequence[Source]) -> Tensors:
        """Those that are wanted whole, with their aliases; views of the sender's memory."""
        whole: Tensors = []
        for spec, (region, offset) in self._part(message):
            if spec.name not in self._pieces:
                if spec.nbytes:
                    view = sources[region].view(offset, spec.nbytes)
                    tensor = view.view(_dtype(spec)).reshape(spec.shape)
                else:
                    tensor = torch.empty(spec.shape, dtype=_dtype(spec))
                whole.extend((name, tensor) for name in self._names(spec))
        return whole

    def places(self, message: Direct, sources: Sequence[Source]) -> list[Piece]:
        """Those that are not wanted whole, each as one piece."""
        return [
            Piece(name, 0, spec.nbytes, sources[region].address + offset)
            for spec, (region, offset) in self._part(message)
            if spec.name in self._pieces
            for name in self._names(spec)
        ]

    def _names(self, spec: TensorSpec) -> list[str]:
        return [spec.name, *self._aliases.get(spec.name, ())]

    def _piece(
        self, source: Source, base: int, entry: Entry, spec: TensorSpec
    ) -> torch.Tensor | None:
        if spec.nbytes == 0:
            return torch.empty(spec.shape, dtype=_dtype(spec))
        data = source.view(base + entry.offset, entry.nbytes)
        if entry.nbytes < spec.nbytes:
            part = self._parts.get(entry.tensor)
            if part is None:
                part = torch.empty(spec.nbytes, dtype=torch.uint8, device=data.device)
                self._parts[entry.tensor] = part
            end = entry.tensor_offset + entry.nbytes
            part[entry.tensor_offset : end].copy_(data)
            if end < spec.nbytes:
                return None
            data = self._parts.pop(entry.tensor)
        return data.view(_dtype(spec)).reshape(spec.shape)


def _dtype(spec: TensorSpec) -> torch.dtype:
    return cast("torch.dtype", getattr(torch, spec.dtype))

"""Whole tensors out of buckets, in the process that loads them."""

from pathlib import Path
from typing import cast

import torch

from rollout_pod.weights.buckets import BucketError, Entry
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.segment import Attached, attach
from rollout_pod.weights.spec import TensorSpec
from rollout_pod.weights.wire import BucketReady


class Mappings:
    """Segments by name, each mapped once in a load and unmapped after it: a mapping that
    outlived its segment's removal would keep the sender from getting the memory back.
    """

    def __init__(self, shm_dir: Path) -> None:
        self._shm_dir = shm_dir
        self._open: dict[str, Attached] = {}

    def get(self, name: str) -> Attached:
        """Map a segment, or find it mapped.

        Raises:
            AttachError: see ``segment.attach``.
        """
        found = self._open.get(name)
        if found is None:
            found = self._open[name] = attach(self._shm_dir, name)
        return found

    def close(self) -> None:
        """Unmap all."""
        for mapping in self._open.values():
            mapping.close()
        self._open.clear()


class Assembler:
    """One load: takes buckets in order, gives whole tensors.

    A tensor that lies in one bucket is a view of it, valid until the bucket is acknowledged; the
    pieces of a larger one are gathered in memory of their own.
    """

    def __init__(self, manifest: Manifest, mappings: Mappings) -> None:
        self._tensors = manifest.tensors
        self._aliases: dict[str, list[str]] = {}
        for alias, name in manifest.aliases:
            self._aliases.setdefault(name, []).append(alias)
        self._mappings = mappings
        self._parts: dict[int, torch.Tensor] = {}

    def take(self, bucket: BucketReady) -> list[tuple[str, torch.Tensor]]:
        """The tensors that this bucket completes, with their aliases.

        Raises:
            AttachError: no such segment.
            BucketError: the segment ends before the bucket does.
        """
        mapped = self._mappings.get(bucket.segment)
        if bucket.base + bucket.length > mapped.size:
            raise BucketError(
                f"bucket {bucket.seq} ends at {bucket.base + bucket.length}, its segment "
                f"{bucket.segment} at {mapped.size}"
            )
        mapped.refresh(bucket.base, bucket.length)
        whole: list[tuple[str, torch.Tensor]] = []
        for entry in bucket.pieces():
            spec = self._tensors[entry.tensor]
            tensor = self._piece(mapped, bucket.base, entry, spec)
            if tensor is not None:
                whole.append((spec.name, tensor))
                whole.extend((alias, tensor) for alias in self._aliases.get(spec.name, ()))
        return whole

    def _piece(
        self, mapped: Attached, base: int, entry: Entry, spec: TensorSpec
    ) -> torch.Tensor | None:
        if spec.nbytes == 0:
            return torch.empty(spec.shape, dtype=_dtype(spec))
        data = torch.frombuffer(
            mapped.map, dtype=torch.uint8, count=entry.nbytes, offset=base + entry.offset
        )
        if entry.nbytes < spec.nbytes:
            part = self._parts.get(entry.tensor)
            if part is None:
                part = self._parts[entry.tensor] = torch.empty(spec.nbytes, dtype=torch.uint8)
            end = entry.tensor_offset + entry.nbytes
            part[entry.tensor_offset : end].copy_(data)
            if end < spec.nbytes:
                return None
            data = self._parts.pop(entry.tensor)
        return data.view(_dtype(spec)).reshape(spec.shape)


def _dtype(spec: TensorSpec) -> torch.dtype:
    return cast("torch.dtype", getattr(torch, spec.dtype))

"""Buckets for whoever holds tensors: memory for two, and what fills them."""

import functools
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import torch

from rollout_pod.weights.buckets import WINDOW, Bucket, align
from rollout_pod.weights.copies import Copy
from rollout_pod.weights.device import Device, DeviceError, Exported
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.pinned import pin, runs, unpin
from rollout_pod.weights.progress import SENDER, Counters
from rollout_pod.weights.replay import HostReplayer, KernelReplayer, Prepared, Replayer
from rollout_pod.weights.segment import Segment, address_of, remove_orphans
from rollout_pod.weights.spec import TensorSpec


class SourceChangedError(Exception):
    """The tensors are not what the manifest says."""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a manifest says of a tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    return TensorSpec(name, _dtype_name(tensor.dtype), tuple(tensor.shape), nbytes)


def fits(spec: TensorSpec, name: str, tensor: torch.Tensor) -> bool:
    """Whether ``spec_of`` would say the same; for thousands in a row."""
    if name != spec.name or tensor.shape != spec.shape:
        return False
    return _dtype_name(tensor.dtype) == spec.dtype


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Ring(Protocol):
    """Memory of two buckets, used in turn."""

    name: str
    size: int
    """Of one bucket."""
    tables: "Tables | None"
    """Fills it by one kernel, out of tensors on the same device; None where torch copies."""
    counters: Counters | None
    """Where it is counted what is filled; None where ``wait`` comes before a bucket is told of."""

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes, as ``uint8``."""

    def wait(self) -> None:
        """Until everything that was written is there for others to read."""

    def close(self) -> None:
        """Give the memory back."""


class Tables:
    """The copies that fill each bucket, kept ready while their addresses are the same.

    Args:
        address: of the ring.
        where: the ring's device.
    """

    def __init__(self, address: int, where: torch.device) -> None:
        self.address = address
        self.where = where
        self._replayer: Replayer = (
            KernelReplayer(str(where)) if where.type == "cuda" else HostReplayer()
        )
        self._ready: dict[int, tuple[list[Copy], Prepared]] = {}

    def run(self, seq: int, copies: list[Copy]) -> None:
        """Queue the copies of one bucket."""
        known = self._ready.get(seq)
        if known is None or known[0] != copies:
            known = self._ready[seq] = (copies, self._replayer.prepare(copies))
        self._replayer.run(known[1])


class SegmentRing:
    """In shared memory; pinned if tensors come from a GPU.

    Raises:
        RoomError: not enough of it.
    """

    def __init__(self, shm_dir: Path, prefix: str, size: int, device: Device | None = None) -> None:
        self.size = align(size)
        remove_orphans(shm_dir, prefix)  # a sender before this one may have been killed
        self.segment = Segment.create(
            shm_dir, f"{prefix}{secrets.token_hex(8)}", WINDOW * self.size
        )
        self.name = self.segment.name
        self.tables: Tables | None = None
        self.counters: Counters | None = None
        self._device = device
        self._pinned: list[int] = []
        if device is not None:
            try:
                pin(device, address_of(self.segment.map), self.segment.size, self._pinned)
            except DeviceError:
                self.close()
                raise

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """See ``Ring``."""
        return torch.frombuffer(self.segment.map, dtype=torch.uint8, count=nbytes, offset=offset)

    def wait(self) -> None:
        """See ``Ring``."""
        if self._device is not None:
            self._device.synchronize()

    def close(self) -> None:
        """See ``Ring``."""
        if self._device is not None:
            unpin(self._device, self._pinned)
        self.segment.close()


class DeviceRing:
    """In GPU memory that an IPC handle can carry.

    Raises:
        DeviceError: not enough of it.
    """

    def __init__(self, device: Device, prefix: str, size: int) -> None:
        self.size = align(size)
        self.name = f"{prefix}{secrets.token_hex(8)}"
        self._device = device
        self._address = device.allocate(WINDOW * self.size)
        self.exported: Exported = device.export(self._address)
        self._memory = device.tensor(self._address, WINDOW * self.size)
        self.tables: Tables | None = Tables(self._address, self._memory.device)
        self.counters: Counters | None = None

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """See ``Ring``."""
        return self._memory[offset : offset + nbytes]

    def wait(self) -> None:
        """See ``Ring``."""
        self._device.synchronize()

    def close(self) -> None:
        """See ``Ring``; the ranks must have unmapped it."""
        address, self._address = self._address, 0
        if address:
            with suppress(DeviceError):
                self._device.free(address)


class Filler:
    """Takes tensors off the iterator when the first piece of one is needed.

    Args:
        tensors: in the order of ``manifest``.
        manifest: what they must be.
        ring: where they go.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: Manifest, ring: Ring
    ) -> None:
        self._tensors: Iterator[tuple[str, torch.Tensor]] = iter(tensors)
        self._manifest = manifest
        self._ring = ring
        self._tensor = torch.empty(0)
        self._alive: deque[tuple[int, list[torch.Tensor]]] = deque()
        """What queued copies read, and the count at which they are done."""
        self._ahead: dict[int, int] = {}
        """By bucket that is filled already: what ``fill`` returns."""
        self.counters = ring.counters
        """By which it counts."""

    def fill(self, bucket: Bucket, base: int) -> int:
        """Put a bucket at ``base``, of which nobody reads any more.

        Returns:
            All of it is there when the ring's own counter has come to this; 0 if it is there now.

        Raises:
            SourceChangedError: the tensors differ from the manifest.
        """
        done = self._ahead.pop(bucket.seq, None)
        return self._fill(bucket, base) if done is None else done

    def _fill(self, bucket: Bucket, base: int) -> int:
        alive: list[torch.Tensor] = []  # what queued copies read
        counters = self.counters
        while counters and self._alive and counters.read(SENDER) >= self._alive[0][0]:
            self._alive.popleft()
        copies: list[Copy] = []
        tables = self._ring.tables
        for index, offset, start, nbytes in bucket.entries:
            if start == 0:
                self._tensor = self._next(index)
            tensor = self._tensor
            if not nbytes:
                continue
            if tables is not None and tensor.device == tables.where:
                alive.append(tensor)
                target = tables.address + base + offset
                copies.append(Copy(tensor.data_ptr() + start, target, nbytes))
            else:
                if tensor.is_cuda:  # else it is copied at once: a bucket of them would be held
                    alive.append(tensor)
                data = tensor.detach().reshape(-1).view(torch.uint8)[start : start + nbytes]
                _copy(self._ring.view(base + offset, nbytes), data)
        if copies and tables is not None:
            tables.run(bucket.seq, copies)
        if counters is not None:
            filled = counters.queue()
            self._alive.append((filled, alive))
            return filled
        self._ring.wait()
        return 0

    def ahead(self, buckets: Sequence[Bucket]) -> None:
        """Begin to fill the first bucket; ``fill`` finds it done. The second would take longer than
        the answer that is waited for.

        Raises:
            SourceChangedError: as ``fill``.
        """
        for bucket in buckets[:1]:
            self._ahead[bucket.seq] = self._fill(bucket, bucket.seq % WINDOW * self._ring.size)

    def end(self) -> None:
        """Raise ``SourceChangedError`` if there are more tensors."""
        for name, _ in self._tensors:
            raise SourceChangedError(f"tensor {name!r} comes after all of the manifest")

    def _next(self, index: int) -> torch.Tensor:
        want = self._manifest.tensors[index]
        name, tensor = next(self._tensors, ("(no more tensors)", torch.empty(0)))
        if not fits(want, name, tensor):
            raise SourceChangedError(f"the tensor is {spec_of(name, tensor)}, manifest: {want}")
        return tensor if tensor.is_contiguous() else tensor.contiguous()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    at = 0
    for _, size in runs(target.data_ptr(), len(target)):
        target[at : at + size].copy_(source[at : at + size], non_blocking=True)
        at += size


__all__: Final = [
    "DeviceRing", "Filler", "Ring", "SegmentRing", "SourceChangedError", "Tables",
    "fits", "spec_of",
]  # fmt: skip

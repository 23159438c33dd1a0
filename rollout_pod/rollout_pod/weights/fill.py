"""Buckets for whoever holds tensors: memory for two, and what fills them."""

import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import torch

from rollout_pod.weights.buckets import WINDOW, Bucket, Entry, align
from rollout_pod.weights.copies import Copy
from rollout_pod.weights.device import Device, DeviceError, Exported
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.memory import address_of
from rollout_pod.weights.pinned import pin, runs, unpin
from rollout_pod.weights.replay import KernelReplayer
from rollout_pod.weights.segment import Segment
from rollout_pod.weights.spec import TensorSpec


class SourceChangedError(Exception):
    """The tensors are not what the manifest says."""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a manifest says of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size())


class Ring(Protocol):
    """Memory of two buckets, used in turn."""

    name: str
    size: int
    """Of one bucket."""

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes, as ``uint8``."""

    def wait(self) -> None:
        """Until everything that was written is there for others to read."""

    def close(self) -> None:
        """Give the memory back."""


class SegmentRing:
    """In shared memory; pinned if tensors come from a GPU.

    Raises:
        RoomError: not enough of it.
    """

    def __init__(self, shm_dir: Path, prefix: str, size: int, device: Device | None = None) -> None:
        self.size = align(size)
        self.segment = Segment.create(
            shm_dir, f"{prefix}{secrets.token_hex(8)}", WINDOW * self.size
        )
        self.name = self.segment.name
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
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._kernel: KernelReplayer | None = None

    def fill(self, bucket: Bucket, base: int) -> None:
        """Put a bucket at ``base``; all of it is there when this returns.

        Raises:
            SourceChangedError: the tensors differ from the manifest.
        """
        alive: list[torch.Tensor] = []  # what queued copies read
        copies: list[Copy] = []
        for entry in bucket.entries:
            data = self._take(entry)
            if not entry.nbytes:
                continue
            target = self._ring.view(base + entry.offset, entry.nbytes)
            if data.is_cuda and target.is_cuda and data.device == target.device:
                alive.append(data)
                copies.append(Copy(data.data_ptr(), target.data_ptr(), entry.nbytes))
            else:
                alive.append(data)
                at = 0
                for _, size in runs(target.data_ptr(), entry.nbytes):
                    target[at : at + size].copy_(data[at : at + size], non_blocking=True)
                    at += size
        if copies:
            if self._kernel is None:
                self._kernel = KernelReplayer(str(alive[0].device))
            self._kernel.run(self._kernel.prepare(copies))
        self._ring.wait()

    def end(self) -> None:
        """Raise ``SourceChangedError`` if there are more tensors."""
        for name, _ in self._tensors:
            raise SourceChangedError(f"tensor {name!r} comes after all of the manifest")

    def _take(self, entry: Entry) -> torch.Tensor:
        if entry.tensor_offset == 0:
            want = self._manifest.tensors[entry.tensor]
            name, tensor = next(self._tensors, ("(no more tensors)", torch.empty(0)))
            if spec_of(name, tensor) != want:
                raise SourceChangedError(f"the tensor is {spec_of(name, tensor)}, manifest: {want}")
            self._bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return self._bytes[entry.tensor_offset : entry.tensor_offset + entry.nbytes]


__all__: Final = [
    "DeviceRing", "Filler", "Ring", "SegmentRing", "SourceChangedError", "spec_of",
]  # fmt: skip

"""A sender's memory, as the process that loads sees it: mapped once, kept while it is of use."""

import itertools
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from rollout_pod.weights.device import Device, DeviceError
from rollout_pod.weights.pinned import pin, runs, unpin
from rollout_pod.weights.progress import Counters, open_counters
from rollout_pod.weights.segment import Attached, AttachError, address_of, attach

log = logging.getLogger(__name__)

_serials = itertools.count(1)


class Source(Protocol):
    """Memory that buckets lie in."""

    serial: int
    """Of this mapping; 0 if addresses in it must not be remembered."""
    on_device: bool

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def address(self) -> int:
        """Of its first byte, here."""

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes as a ``uint8`` tensor; what is written there may reach the sender."""

    def refresh(self, start: int, length: int) -> None:
        """Show what the sender has written there by now."""


@dataclass
class PrivateMapping:
    """A segment for one load: writes stay here."""

    attached: Attached
    serial: int = 0
    on_device: bool = False

    @property
    def address(self) -> int:
        """Of its first byte."""
        return address_of(self.attached.map)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.attached.size

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """See ``Source``."""
        return torch.frombuffer(self.attached.map, dtype=torch.uint8, count=nbytes, offset=offset)

    def refresh(self, start: int, length: int) -> None:
        """See ``Source``."""
        self.attached.refresh(start, length)


@dataclass
class PinnedMapping:
    """A segment that stays mapped and pinned over many loads."""

    path: Path
    inode: int
    size: int
    map: mmap.mmap = field(repr=False)
    address: int
    device: Device = field(repr=False)
    pinned: list[int] = field(default_factory=list, repr=False)
    serial: int = field(default_factory=lambda: next(_serials))
    on_device: bool = False

    @classmethod
    def open(cls, shm_dir: Path, name: str, device: Device) -> "PinnedMapping":
        """Map and pin.

        Raises:
            AttachError: there is no such segment.
            DeviceError: it cannot be pinned.
        """
        attach(shm_dir, name).close()  # the checks of a name
        path = shm_dir / name
        with path.open("r+b") as file:
            status = os.fstat(file.fileno())
            mapped = mmap.mmap(file.fileno(), status.st_size)
        address = address_of(mapped)
        made = cls(path, status.st_ino, status.st_size, mapped, address, device)
        try:
            pin(device, address, status.st_size, made.pinned)
        except DeviceError:
            made.close()
            raise
        return made

    @property
    def stale(self) -> bool:
        """The segment was removed, or another has its name."""
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return True
        return (status.st_ino, status.st_size) != (self.inode, self.size)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """See ``Source``."""
        view = torch.frombuffer(self.map, dtype=torch.uint8, count=nbytes, offset=offset)
        # whoever is given the view copies it as a whole, which the driver refuses across pieces
        one = len(list(runs(self.address + offset, nbytes))) < 2
        return view if one else view.clone()

    def refresh(self, start: int, length: int) -> None:
        """See ``Source``: the mapping is shared."""

    def close(self) -> None:
        """Unpin and unmap."""
        unpin(self.device, self.pinned)
        with suppress(BufferError):
            self.map.close()


@dataclass
class Region:
    """An allocation of the sender's on this GPU."""

    handle: bytes
    size: int
    address: int
    device: Device = field(repr=False)
    serial: int = field(default_factory=lambda: next(_serials))
    on_device: bool = True

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """See ``Source``."""
        return self.device.tensor(self.address + offset, nbytes)

    def refresh(self, start: int, length: int) -> None:
        """See ``Source``: there is one memory."""

    def close(self) -> None:
        """Unmap."""
        self.device.close(self.address)


class Memories:
    """All that is mapped of one sender. ``lock`` is held by a load, so that nothing it uses is
    unmapped; all others that want it do not wait.

    Args:
        shm_dir: where the sender's segments are mounted here.
        device: None if the rank has no GPU.
    """

    def __init__(self, shm_dir: Path, device: Device | None) -> None:
        self.shm_dir = shm_dir
        self.device = device
        self.lock = threading.Lock()
        self._private: dict[str, PrivateMapping] = {}
        self._kept: dict[str, PinnedMapping | Region] = {}
        self._by_handle: dict[bytes, Region] = {}
        self.generation = next(_serials)
        """Changes whenever something that outlives a load is mapped or unmapped."""
        self.counters: Counters | None = None
        """Of the sender; None where each side waits for its own copies before it speaks."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of what outlives a load."""
        return tuple(self._kept)

    def map(self, device: "dict[str, tuple[bytes, int]]", segments: "set[str]") -> str:
        """Map what is named, unmap what is not. Regions are by name (handle, bytes).

        Returns:
            Why a segment cannot be pinned, which is no error: it is mapped for each load, and
            copied from at a tenth of the speed.

        Raises:
            AttachError, DeviceError: one cannot be mapped, or a load is on.
        """
        unpinned = ""
        with self._idle():
            for name, held in list(self._kept.items()):
                if isinstance(held, Region):
                    gone = device.get(name) != (held.handle, held.size)
                else:
                    gone = name not in segments or held.stale
                if gone:
                    self._drop(name)
            if self.device is None:
                if device:
                    raise DeviceError("this rank has no GPU")
                return ""  # there is nothing to pin memory for
            for name, (handle, nbytes) in device.items():
                if name not in self._kept:
                    address = self.device.open(handle)
                    self._keep(name, Region(handle, nbytes, address, self.device))
            for name in segments:
                if name not in self._kept:
                    try:
                        self._keep(name, PinnedMapping.open(self.shm_dir, name, self.device))
                    except DeviceError as error:
                        unpinned = f"segment {name} cannot be pinned: {error}"
                        log.warning("%s", unpinned)
        return unpinned

    def count(self, name: str | None, rank: int) -> str:
        """Map a sender's counters, instead of what there was of them.

        Returns:
            Why that does not work; empty if it does, or if there are none.
        """
        with self._idle():
            self._drop_counters()
            if name is None or self.device is None:
                return ""
            try:
                self.counters = open_counters(self.shm_dir, name, self.device, rank)
            except (AttachError, DeviceError) as error:
                return str(error) or repr(error)
            return ""

    def probe(self, handle: bytes, offset: int, nbytes: int) -> bytes:
        """Read a few bytes of a sender's allocation.

        Raises:
            DeviceError: it cannot be opened here, or a load is on.
        """
        if self.device is None:
            raise DeviceError("this rank has no GPU")
        with self._idle():
            # a handle that is open already cannot be opened once more
            held = self._by_handle.get(handle)
            if held is not None:
                return self.device.read(held.address + offset, nbytes)
            address = self.device.open(handle)
            try:
                return self.device.read(address + offset, nbytes)
            finally:
                self.device.close(address)

    def get(self, name: str) -> Source:
        """What a bucket lies in; a segment that is not kept is mapped for this load.

        Raises:
            AttachError: see ``segment.attach``.
        """
        kept = self._kept.get(name)
        if kept is not None and not (isinstance(kept, PinnedMapping) and kept.stale):
            return kept
        found = self._private.get(name)
        if found is None:
            found = self._private[name] = PrivateMapping(attach(self.shm_dir, name))
        return found

    def end_load(self) -> None:
        """Unmap what was mapped for one load: a mapping that outlives its segment's removal keeps
        the sender from getting the memory back.
        """
        for mapping in self._private.values():
            mapping.attached.close()
        self._private.clear()

    def forget(self) -> bool:
        """Unmap the GPU memory of a sender that is gone; False if a load is on. Segments stay
        pinned while they exist: the next sender may be the same one, connected anew.
        """
        try:
            with self._idle():
                self._drop_counters()
                for name, held in list(self._kept.items()):
                    if isinstance(held, Region) or held.stale:
                        self._drop(name)
        except DeviceError:
            return False
        return True

    def close(self) -> None:
        """Unmap everything. Waits for a load."""
        with self.lock:
            self._drop_counters()
            for name in list(self._kept):
                self._drop(name)

    def sweep(self) -> None:
        """Unmap segments that were removed, unless a load is on."""
        with suppress(DeviceError), self._idle():
            for name, held in list(self._kept.items()):
                if isinstance(held, PinnedMapping) and held.stale:
                    self._drop(name)

    @contextmanager
    def _idle(self) -> Iterator[None]:
        if not self.lock.acquire(blocking=False):
            raise DeviceError("a load is using the memory of its sender")
        try:
            yield
        finally:
            self.lock.release()

    def _drop_counters(self) -> None:
        counters, self.counters = self.counters, None
        if counters is not None:
            counters.close()

    def _keep(self, name: str, held: "PinnedMapping | Region") -> None:
        self._kept[name] = held
        self.generation = next(_serials)
        if isinstance(held, Region):
            self._by_handle[held.handle] = held

    def _drop(self, name: str) -> None:
        held = self._kept.pop(name)
        self.generation = next(_serials)
        if isinstance(held, Region):
            self._by_handle.pop(held.handle, None)
        try:
            held.close()
        except DeviceError:
            log.exception("%s cannot be unmapped", name)

"""A GPU whose memory is files: all of the protocol around CUDA IPC, without CUDA.

Two of them with one folder and one uuid are two processes on one GPU.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rollout_pod.weights.device import HANDLE_BYTES, DeviceError, Exported, NotExportableError


class FakeDevice:
    """``calls`` counts what is expensive on a real one. Real tensors of ``give`` live in it."""

    def __init__(self, folder: Path, uuid: str = "GPU-fake") -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._uuid = uuid
        self.calls: dict[str, int] = {}
        self.pinned: dict[int, int] = {}
        self.poolish: set[int] = set()
        """Addresses of allocations that no handle can carry."""
        self.held: list[tuple[int, int]] | None = None
        """Signals that are queued and not done; None: each is done at once."""
        self._made: dict[int, tuple[str, mmap.mmap, int]] = {}
        self._opened: dict[int, mmap.mmap] = {}

    @property
    def uuid(self) -> str:
        return self._uuid

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        yield

    @property
    def in_use(self) -> int:
        """Allocations and mappings that were not given back."""
        return len(self._made) + len(self._opened) + len(self.pinned)

    def owns(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or self._find(tensor.data_ptr()) is not None

    def give(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors, all in one allocation here."""
        room = sum(t.numel() * t.element_size() + 256 for t in tensors.values())
        memory = self.tensor(self.allocate(room), room)
        made, at = {}, 0
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            target = memory[at : at + size].view(tensor.dtype).reshape(tensor.shape)
            made[name] = target.copy_(tensor) if size else tensor
            at += -(-size // 64) * 64
        return made

    def allocate(self, nbytes: int) -> int:
        self._count("allocate")
        name = f"gpu-{id(self):x}-{self.calls['allocate']}"
        path = self.folder / name
        path.write_bytes(bytes(nbytes))
        address, mapped = self._map(path)
        self._made[address] = (name, mapped, self.calls["allocate"])
        return address

    def free(self, address: int) -> None:
        self._count("free")
        name, _, _ = self._made.pop(address)
        (self.folder / name).unlink()

    def export(self, address: int) -> Exported:
        self._count("export")
        start = self._find(address)
        if start is None or start in self.poolish:
            raise NotExportableError("the memory comes from a pool")
        name, mapped, identity = self._made[start]
        handle = name.encode().ljust(HANDLE_BYTES, b"\0")
        return Exported(handle, start, len(mapped), identity)

    def identities(self, addresses: Sequence[int]) -> list[int]:
        starts = map(self._find, addresses)
        return [0 if start is None else self._made[start][2] for start in starts]

    def released(self) -> int | None:
        return self.calls.get("free", 0)

    def open(self, handle: bytes) -> int:
        self._count("open")
        path = self.folder / handle.rstrip(b"\0").decode()
        if not path.is_file():
            raise DeviceError("invalid handle")
        address, mapped = self._map(path)
        self._opened[address] = mapped
        return address

    def close(self, address: int) -> None:
        del self._opened[address]

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def register(self, address: int, nbytes: int) -> None:
        self._count("register")
        self.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        size = self.pinned.pop(address)
        if self.held:
            self.held = [each for each in self.held if not 0 <= each[0] - address < size]

    def publish(self, address: int, nbytes: int) -> int:
        self._count("publish")
        self.pinned[address] = nbytes
        return address

    def signal(self, address: int, value: int) -> None:
        self._count("signal")
        if self.held is not None:
            self.held.append((address, value))
        else:
            ctypes.c_uint32.from_address(address).value = value

    def hold(self) -> None:
        """The GPU is busy from now on."""
        self.held = []

    def catch_up(self) -> None:
        """All that was queued is done, and nothing is queued any more."""
        self._finish()
        self.held = None

    def _finish(self) -> None:
        held, self.held = self.held or [], None if self.held is None else []
        for address, value in held:
            ctypes.c_uint32.from_address(address).value = value

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def copy_to_device(
        self, target: int, source: int, *, width: int, rows: int, target_pitch: int,
        source_pitch: int,
    ) -> None:  # fmt: skip
        end = source + (rows - 1) * source_pitch + width
        pieces = [at for at, size in self.pinned.items() if at < end and source < at + size]
        if len(pieces) > 1:
            raise DeviceError("a copy touches two pinned pieces: invalid argument")
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def synchronize(self) -> None:
        self._count("synchronize")
        self._finish()

    def drain(self) -> None:
        self._count("drain")
        self._finish()

    def _find(self, address: int) -> int | None:
        for start, (_, mapped, _) in self._made.items():
            if start <= address < start + len(mapped):
                return start
        return None

    def _map(self, path: Path) -> tuple[int, mmap.mmap]:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(mapped)), mapped

    def _count(self, what: str) -> None:
        self.calls[what] = self.calls.get(what, 0) + 1

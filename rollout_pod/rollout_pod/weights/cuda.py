"""The GPU by the driver's own library: what torch has no safe call for.

Raw handles instead of torch's: those are pickles, one for each tensor. Nothing here needs a
compiler or a package beside torch.
"""

import contextlib
import ctypes
import functools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn

import torch

from rollout_pod.weights.device import HANDLE_BYTES, DeviceError, Exported, NotExportableError

_BUFFER_ID: Final = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LEGACY_IPC: Final = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_*
_GRANULE: Final = 2 << 20
"""Smaller allocations share a block, and a handle opens the block."""
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_*


class _Handle(ctypes.Structure):
    """Passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = [
        ("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p), ("src_device", ctypes.c_void_p),
        ("src_array", ctypes.c_void_p), ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t), ("dst_y", ctypes.c_size_t), ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p), ("dst_device", ctypes.c_void_p),
        ("dst_array", ctypes.c_void_p), ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


class _Array:
    """Foreign device memory, in the form that torch takes without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"there is no NVIDIA driver here: {error}") from error


def _call(name: str, *args: Any) -> None:
    try:
        function = getattr(_driver(), name)
    except AttributeError:
        raise DeviceError(f"{name}: this driver is too old for it") from None
    status = function(*args)
    if status:
        _failed(name, status)


def _failed(name: str, status: int) -> NoReturn:
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(text))
    raise DeviceError(f"{name}: {(text.value or b'error').decode()} ({status})")


@functools.cache
def _attribute() -> Any:
    """``cuPointerGetAttribute``, made once: with the types given, numbers need no wrapping."""
    ask = ctypes.PyDLL("libcuda.so.1").cuPointerGetAttribute
    ask.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    ask.restype = ctypes.c_int
    return ask


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def _address(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


class Cuda:
    """See ``Device``.

    Args:
        ordinal: torch's number of the GPU; its context is the one that is used.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it out
        with torch.cuda.device(ordinal):
            torch.cuda.current_stream().synchronize()  # the context exists from here on
        device = ctypes.c_int()
        _call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._context = ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        raw = (ctypes.c_ubyte * 16)()
        _call("cuDeviceGetUuid_v2", raw, device)
        self._uuid = f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    @property
    def uuid(self) -> str:
        """See ``Device``."""
        return self._uuid

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """See ``Device``."""
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def owns(self, tensor: torch.Tensor) -> bool:
        """See ``Device``."""
        return tensor.is_cuda and tensor.get_device() == self.ordinal

    def allocate(self, nbytes: int) -> int:
        """See ``Device``."""
        found = ctypes.c_uint64()
        nbytes = -(-nbytes // _GRANULE) * _GRANULE
        with self.current():
            _call("cuMemAlloc_v2", ctypes.byref(found), _size(nbytes))
        return found.value

    def free(self, address: int) -> None:
        """See ``Device``."""
        with self.current():
            _call("cuMemFree_v2", _address(address))

    def export(self, address: int) -> Exported:
        """See ``Device``."""
        legacy = ctypes.c_int()  # a bool, but the driver's header leaves its width open
        start, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self.current():
            _call("cuPointerGetAttribute", ctypes.byref(legacy), _LEGACY_IPC, _address(address))
            if not legacy.value & 0xFF:
                raise NotExportableError(
                    "the memory comes from a pool or from expandable segments, which no IPC "
                    "handle carries (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)"
                )
            _call(
                "cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size),
                _address(address),
            )  # fmt: skip
            try:
                _call("cuIpcGetMemHandle", ctypes.byref(handle), start)
            except DeviceError as error:
                raise NotExportableError(str(error)) from error
            (identity,) = self.identities([address])
        return Exported(bytes(handle.reserved), start.value, size.value, identity)

    def identities(self, addresses: Sequence[int]) -> list[int]:
        """See ``Device``."""
        # thousands in each update of a model of experts: as little as possible for one
        ask = _attribute()
        word = ctypes.c_uint64()
        where = ctypes.byref(word)
        found = []
        with self.current():
            for address in addresses:
                status = ask(where, _BUFFER_ID, address)
                if status:
                    _failed("cuPointerGetAttribute", status)
                found.append(word.value)
        return found

    def released(self) -> int | None:
        """See ``Device``."""
        try:
            stats = torch.cuda.memory_stats_as_nested_dict(self.ordinal)
            return int(stats["segment"]["all"]["freed"])
        except (RuntimeError, KeyError):  # another allocator is in torch's place
            return None

    def open(self, handle: bytes) -> int:
        """See ``Device``."""
        found, raw = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        with self.current():
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(found), raw, _LAZY_PEER_ACCESS)
        return found.value

    def close(self, address: int) -> None:
        """See ``Device``."""
        with self.current():
            _call("cuIpcCloseMemHandle", _address(address))

    def read(self, address: int, nbytes: int) -> bytes:
        """See ``Device``."""
        target = ctypes.create_string_buffer(nbytes)
        with self.current():
            _call("cuMemcpyDtoH_v2", target, _address(address), _size(nbytes))
        return target.raw

    def write(self, address: int, data: bytes) -> None:
        """See ``Device``."""
        with self.current():
            _call("cuMemcpyHtoD_v2", _address(address), data, _size(len(data)))
            # it returns when the bytes are on their way: another process might see the old ones
            _call("cuStreamSynchronize", ctypes.c_void_p(0))

    def register(self, address: int, nbytes: int) -> None:
        """See ``Device``."""
        with self.current():
            _call("cuMemHostRegister_v2", ctypes.c_void_p(address), _size(nbytes), _PORTABLE)

    def unregister(self, address: int) -> None:
        """See ``Device``."""
        with self.current():
            _call("cuMemHostUnregister", ctypes.c_void_p(address))

    def publish(self, address: int, nbytes: int) -> int:
        """See ``Device``."""
        found = ctypes.c_uint64()
        host = ctypes.c_void_p(address)
        with self.current():
            _call("cuMemHostRegister_v2", host, _size(nbytes), _PORTABLE | _MAPPED)
            try:
                _call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), host, 0)
            except DeviceError:
                _call("cuMemHostUnregister", host)
                raise
        return found.value

    def signal(self, address: int, value: int) -> None:
        """See ``Device``."""
        # without a flag the driver puts a fence for the whole system before the write
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.ordinal).cuda_stream)
        with self.current():
            _call(
                "cuStreamWriteValue32_v2", stream, _address(address), ctypes.c_uint32(value),
                ctypes.c_uint(0),
            )  # fmt: skip

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """See ``Device``."""
        with torch.cuda.device(self.ordinal):
            return torch.as_tensor(_Array(address, nbytes), device=f"cuda:{self.ordinal}")

    def copy_to_device(
        self, target: int, source: int, *, width: int, rows: int, target_pitch: int,
        source_pitch: int,
    ) -> None:  # fmt: skip
        """See ``Device``."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.ordinal).cuda_stream)
        with self.current():
            if rows == 1:
                _call(
                    "cuMemcpyHtoDAsync_v2", _address(target), ctypes.c_void_p(source),
                    _size(width), stream,
                )  # fmt: skip
                return
            what = _Copy2D(
                src_type=_HOST, src_host=source, src_pitch=source_pitch, dst_type=_DEVICE,
                dst_device=target, dst_pitch=target_pitch, width=width, height=rows,
            )  # fmt: skip
            # the other call wants pitches that the driver itself chose
            name = "cuMemcpy2DAsync_v2"
            _call(name, ctypes.byref(what), stream)

    def synchronize(self) -> None:
        """See ``Device``."""
        torch.cuda.current_stream(self.ordinal).synchronize()

    def drain(self) -> None:
        """See ``Device``."""
        torch.cuda.synchronize(self.ordinal)

"""Makes the copies of a plan, on the host or with one kernel on the GPU."""

import ctypes
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from rollout_pod.weights.copies import Copy, parts
from rollout_pod.weights.device import Device
from rollout_pod.weights.pinned import cut
from rollout_pod.weights.tables import Table, make_tables

_TABLE_ALIGN: Final = 256

Prepared = Any
"""What ``run`` takes; may be kept and run again while its addresses are good."""


class Replayer(Protocol):
    """Makes copies between addresses of one kind."""

    def prepare(self, copies: Sequence[Copy]) -> Prepared:
        """All that can be done before the bytes are there."""

    def run(self, prepared: Prepared) -> None:
        """Copy, or queue it: ``wait`` says when it is done."""

    def wait(self) -> None:
        """Until everything queued is done."""


class HostReplayer:
    """Plain memory to plain memory."""

    def prepare(self, copies: Sequence[Copy]) -> Prepared:
        """See ``Replayer``."""
        return tuple(copies)

    def run(self, prepared: Prepared) -> None:
        """See ``Replayer``."""
        for copy in prepared:
            if copy.is_flat:
                ctypes.memmove(copy.target, copy.source, copy.nbytes)
            else:
                _rows(copy.target, copy.target_pitch, copy)[:] = _rows(
                    copy.source, copy.source_pitch, copy
                )

    def wait(self) -> None:
        """See ``Replayer``: nothing is ever queued."""


def _rows(address: int, pitch: int, copy: Copy) -> Any:
    size = (copy.rows - 1) * pitch + copy.width
    memory = (ctypes.c_ubyte * size).from_address(address)
    base = np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(base, (copy.rows, copy.width), (pitch, 1))


class KernelReplayer:
    """Device memory to memory of the same device.

    Args:
        where: what the tables are kept on, as torch names it.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def prepare(self, copies: Sequence[Copy]) -> Prepared:
        """See ``Replayer``."""
        from rollout_pod.weights.copy_kernel import BLOCK

        return [(table, self._upload(table)) for table in make_tables(copies, BLOCK)]

    def run(self, prepared: Prepared) -> None:
        """See ``Replayer``."""
        import triton.language as tl

        from rollout_pod.weights.copy_kernel import BLOCK, WARPS, copy_kernel

        words = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
        for table, arrays in prepared:
            copy_kernel[(len(table.entries),)](
                *arrays, word=words[table.word], strided=table.strided, block=BLOCK,
                num_warps=WARPS,
            )  # fmt: skip

    def wait(self) -> None:
        """See ``Replayer``."""
        if self._where != "cpu":
            torch.cuda.current_stream(self._where).synchronize()

    def _upload(self, table: Table) -> tuple[torch.Tensor, ...]:
        arrays = (
            table.sources, table.targets, table.lengths, table.widths, table.source_pitches,
            table.target_pitches, table.entries, table.blocks,
        )  # fmt: skip
        # one upload for all: each by itself waits for the device
        starts = [0]
        for array in arrays:
            starts.append(-(-(starts[-1] + array.nbytes) // _TABLE_ALIGN) * _TABLE_ALIGN)
        packed = np.empty(starts[-1], dtype=np.uint8)
        for start, array in zip(starts, arrays, strict=False):
            packed[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
        there = torch.from_numpy(packed).to(self._where)
        return tuple(
            there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
            for start, array in zip(starts, arrays, strict=False)
        )


class UploadReplayer:
    """Host memory to device memory by the copy engines; at the speed of the bus if pinned.

    Args:
        device: the GPU.
        at_a_time: bytes that are queued before it waits for them; None: all. An engine that decodes
            sends its own few bytes through the same copy engine in each step, behind whatever is
            queued there.
    """

    def __init__(self, device: Device, *, at_a_time: int | None = None) -> None:
        self._device = device
        self._at_a_time = at_a_time

    def prepare(self, copies: Sequence[Copy]) -> Prepared:
        """See ``Replayer``."""
        if self._at_a_time is None:
            return tuple(cut(copies))
        return tuple(parts(cut(copies), self._at_a_time))

    def run(self, prepared: Prepared) -> None:
        """See ``Replayer``."""
        queued = 0
        with self._device.current():
            for copy in prepared:
                if self._at_a_time is not None and queued + copy.nbytes > self._at_a_time:
                    self._device.synchronize()
                    queued = 0
                queued += copy.nbytes
                self._device.copy_to_device(
                    copy.target, copy.source,
                    width=copy.nbytes if copy.is_flat else copy.width,
                    rows=1 if copy.is_flat else copy.rows,
                    target_pitch=copy.target_pitch, source_pitch=copy.source_pitch,
                )  # fmt: skip

    def wait(self) -> None:
        """See ``Replayer``."""
        self._device.synchronize()

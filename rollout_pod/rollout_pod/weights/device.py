"""What the weight protocol asks of a GPU: memory that another process can open, and copies.

``cuda.Cuda`` is the real one; tests bring one whose memory is files.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:  # the agent needs the size of a handle, and no torch
    import torch

HANDLE_BYTES: Final = 64
"""Of a legacy CUDA IPC handle."""


class DeviceError(Exception):
    """The device does not do what is asked; the message says what and why."""


class NotExportableError(DeviceError):
    """A legacy IPC handle cannot carry this memory."""


@dataclass(frozen=True)
class Exported:
    """An allocation that another process on the same GPU can open.

    ``identity`` is never given to another allocation of the process, unlike ``address``.
    """

    handle: bytes
    address: int
    nbytes: int
    identity: int


class Device(Protocol):
    """One GPU, in one process. Calls may come from any thread. All but ``current`` may raise
    ``DeviceError``; sizes are in bytes.
    """

    @property
    def uuid(self) -> str:
        """The same in every process that sees this GPU, whatever number it has there."""

    def current(self) -> AbstractContextManager[None]:
        """Makes many calls in a row cheaper."""

    def owns(self, tensor: "torch.Tensor") -> bool:
        """Whether a tensor lies in this GPU's memory."""

    def allocate(self, nbytes: int) -> int:
        """Memory that ``export`` can carry, outside of any pool. Returns its address."""

    def free(self, address: int) -> None:
        """Give back what ``allocate`` gave."""

    def export(self, address: int) -> Exported:
        """The whole allocation around an address, however it was made.

        Raises:
            NotExportableError: made by ``cuMemCreate`` (PyTorch's expandable segments, pools).
        """

    def identities(self, addresses: Sequence[int]) -> list[int]:
        """Of the allocations around these; see ``Exported``."""

    def released(self) -> int | None:
        """A count that rises whenever torch's allocator gives memory back to the driver; None if
        it does not say.
        """

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process. Returns its address here."""

    def close(self, address: int) -> None:
        """Unmap what ``open`` gave."""

    def read(self, address: int, nbytes: int) -> bytes:
        """A few bytes to the host, at once."""

    def write(self, address: int, data: bytes) -> None:
        """A few bytes from the host; all processes see them when this returns."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that copies run at the speed of the bus."""

    def unregister(self, address: int) -> None:
        """Undo ``register``."""

    def publish(self, address: int, nbytes: int) -> int:
        """Pin host memory that the GPU shall write to; ``unregister`` undoes it. Returns where it
        is for ``signal``.
        """

    def signal(self, address: int, value: int) -> None:
        """Queue that 32 bits are written there, when all that this thread queued before is done
        and can be seen by other processes.
        """

    def tensor(self, address: int, nbytes: int) -> "torch.Tensor":
        """Device memory as a ``uint8`` tensor that owns nothing."""

    def copy_to_device(
        self, target: int, source: int, *, width: int, rows: int, target_pitch: int,
        source_pitch: int,
    ) -> None:  # fmt: skip
        """Queue a copy from registered host memory: ``rows`` pieces of ``width`` bytes."""

    def synchronize(self) -> None:
        """Wait until all that this thread queued is done."""

    def drain(self) -> None:
        """Wait until all that this process queued is done."""

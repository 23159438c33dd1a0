"""What an update needs beside the model: memory of the device and of the host."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from benchmarks.rank import SHM

MB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes in use at one moment."""

    device: int
    """Of the first GPU, by all processes."""
    private: int
    """Of the processes that were named, without what they share with others."""
    shared: int
    """Segments."""

    @classmethod
    def of(cls, processes: Sequence[int]) -> "Memory":
        """Now; of this process and of ``processes``, by their ids."""
        free, total = torch.cuda.mem_get_info(0)
        private = sum(
            each.memory_full_info().uss
            for each in (psutil.Process(), *map(psutil.Process, processes))
        )
        return cls(total - free, private, shutil.disk_usage(SHM).used)

    def since(self, before: "Memory", what: str) -> dict[str, float]:
        """By how much it is more than ``before``: cells of a table."""
        host = self.private + self.shared - before.private - before.shared
        return {f"{what}, device MB": (self.device - before.device) / MB,
                f"{what}, host MB": host / MB}  # fmt: skip

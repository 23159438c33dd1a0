"""See ``benchmarks.update``."""

from benchmarks.update import shm as run

__all__ = ["run"]

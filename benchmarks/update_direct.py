"""See ``benchmarks.update``."""

from benchmarks.update import direct as run

__all__ = ["run"]

"""See ``benchmarks.update``."""

from benchmarks.update import moe as run

__all__ = ["run"]

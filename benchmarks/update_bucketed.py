"""See ``benchmarks.update``."""

from benchmarks.update import bucketed as run

__all__ = ["run"]

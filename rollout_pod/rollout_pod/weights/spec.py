"""What a checkpoint consists of: names, types and sizes, without any byte of it."""

from collections.abc import Mapping
from dataclasses import dataclass


class UpdatesUnsupportedError(Exception):
    """No manifest fits this engine, ever; the message says why, and what to start it with."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    ``dtype`` is torch's name without the prefix (``bfloat16``, ``float8_e4m3fn``); ``nbytes`` is
    the size of the contiguous tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Expected:
    """What the boot load of one rank was given: the yardstick of every later manifest."""

    tensors: Mapping[str, TensorSpec]
    optional: frozenset[str] = frozenset()
    """Names that an update may leave out: the other names of tied tensors."""

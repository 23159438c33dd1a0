"""The header of a safetensors file, believed only after it adds up."""

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from rollout_pod.weights.manifest import ITEM_BYTES
from rollout_pod.weights.spec import TensorSpec

HEADER_MAX_BYTES: Final = 100_000_000
"""The limit of the format."""
NAME_CHARS: Final = 4096
"""The longest name that a manifest can carry."""
DIMENSIONS: Final = 64
"""More than any tensor has; the product of the sizes stays a number that can be printed."""

DTYPES: Final[Mapping[str, str]] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64",
    "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip


class SourceError(Exception):
    """A checkpoint that cannot be used; the message names the file and the remedy.

    ``retryable``: it may become whole by itself, as one that is still being written does.
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        # file names may hold what no message can carry
        super().__init__(message.encode(errors="backslashreplace").decode())
        self.retryable = retryable


def read_header(
    file: Path | str, size: int, read: Callable[[int], bytes]
) -> Iterable[tuple[TensorSpec, int]]:
    """The tensors of a file of ``size`` bytes, each with where its bytes begin in the file.

    Raises:
        SourceError: the file is truncated, contradicts itself or has a type that torch lacks.
    """
    return list(_tensors(file, size, *_header(file, size, read)))


def _header(
    file: Path | str, size: int, read: Callable[[int], bytes]
) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the header."""
    prefix = read(8)
    if len(prefix) < 8:
        raise SourceError(f"{file}: truncated, {size} bytes; copy it again", retryable=True)
    length = int.from_bytes(prefix, "little")
    if length > HEADER_MAX_BYTES:
        raise SourceError(
            f"{file}: header of {length} bytes is impossible; this is no safetensors file",
            retryable=False,
        )
    raw = read(length)
    if len(raw) < length:
        raise SourceError(
            f"{file}: truncated within its header, {size} of at least {8 + length} bytes; "
            "copy it again",
            retryable=True,
        )
    try:
        header = json.loads(raw, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{file}: bad header ({error}); write it anew", retryable=False
        ) from error
    if not isinstance(header, dict):
        raise SourceError(f"{file}: its header is no JSON object", retryable=False)
    return 8 + length, header


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{double!r} is there twice")
    return found


def _tensors(
    file: Path | str, size: int, data: int, header: dict[str, Any]
) -> Iterable[tuple[TensorSpec, int]]:
    """Specs in the order of their bytes, which must follow each other without a gap."""
    found = [_tensor(file, name, entry) for name, entry in header.items() if name != "__metadata__"]
    found.sort(key=lambda item: (item[1], item[1] + item[0].nbytes))
    end = 0
    for spec, begin in found:
        if begin != end:
            what = "overlaps the one before" if begin < end else "leaves a gap"
            raise SourceError(
                f"{file}: tensor {spec.name!r} at byte {begin} {what}, expected {end}; "
                "write it anew",
                retryable=False,
            )
        end = begin + spec.nbytes
        yield spec, data + begin
    if size < data + end:
        raise SourceError(
            f"{file}: truncated, {size} of {data + end} bytes; copy it again", retryable=True
        )
    if size > data + end:
        raise SourceError(
            f"{file}: {size} bytes, its header accounts for {data + end}; write it anew",
            retryable=True,
        )


def _tensor(file: Path | str, name: str, entry: Any) -> tuple[TensorSpec, int]:
    if not 0 < len(name) <= NAME_CHARS or not _is_text(name):
        raise SourceError(
            f"{file}: a tensor's name {name[:64]!r} is empty, longer than {NAME_CHARS} characters "
            "or no text; write it anew",
            retryable=False,
        )
    bad = SourceError(
        f"{file}: tensor {name!r} has a bad header entry; write it anew", retryable=False
    )
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise bad from None
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > DIMENSIONS:
        raise bad
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in [*shape, begin, end]):
        raise bad
    if dtype not in DTYPES:
        raise SourceError(
            f"{file}: tensor {name!r} has dtype {dtype[:64]!r}, known are {', '.join(DTYPES)}",
            retryable=False,
        )
    nbytes = ITEM_BYTES[DTYPES[dtype]] * prod(shape)
    if end - begin != nbytes:
        raise SourceError(
            f"{file}: tensor {name!r} has {end - begin} bytes, {dtype} {shape} takes {nbytes}",
            retryable=False,
        )
    return TensorSpec(name, DTYPES[dtype], tuple(shape), nbytes), begin


def _is_text(name: str) -> bool:
    """JSON can hold halves of surrogate pairs, which no message can carry."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

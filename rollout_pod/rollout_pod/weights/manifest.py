"""The manifest of a version, and its comparison with what a rank was booted with. Pure."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

import msgpack

from rollout_pod.weights.buckets import Plan, make_plan
from rollout_pod.weights.spec import Expected, TensorSpec

ITEM_BYTES: Final[Mapping[str, int]] = {
    "bool": 1, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip
"""Bytes of one element, by torch's name of the type."""


@dataclass(frozen=True)
class Manifest:
    """All that a version consists of, in the order in which it is sent.

    ``aliases`` are pairs ``(alias, name)``: the loader is given the tensor ``name`` once more under
    the other name, its bytes travel once.
    """

    version: str
    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    hashes: tuple[bytes, ...] = ()
    """Of each tensor, as in ``hashes``; none at all where nobody compares."""

    @cached_property
    def digest(self) -> str:
        """Of everything but version and hashes: equal ones can stand for each other."""
        tensors = [(t.name, t.dtype, t.shape, t.nbytes) for t in self.tensors]
        return digest_of((tensors, self.aliases))

    @property
    def mark(self) -> str:
        """``digest``, and of the contents as far as they were hashed: what two ranks compare."""
        return digest_of((self.digest, self.hashes)) if self.hashes else self.digest

    def renamed(self, version: str) -> "Manifest":
        """The same tensors as another version, whose bytes nobody has hashed yet."""
        return self._like(version, ())

    def with_hashes(self, hashes: Sequence[bytes]) -> "Manifest":
        """The same version with hashes.

        Raises:
            ValueError: there are not as many as tensors.
        """
        if len(hashes) != len(self.tensors):
            raise ValueError(f"{len(hashes)} hashes for {len(self.tensors)} tensors")
        return self._like(self.version, tuple(hashes))

    def _like(self, version: str, hashes: tuple[bytes, ...]) -> "Manifest":
        made = Manifest(version, self.tensors, self.aliases, hashes)
        # what was computed of the tensors, which can be tens of thousands, holds there too
        made.__dict__.update(digest=self.digest, nbytes=self.nbytes, names=self.names)
        made.__dict__.update(_plans=self._plans)
        return made

    @cached_property
    def _plans(self) -> dict[int, Plan]:
        return {}

    def plan(self, bucket_bytes: int) -> Plan:
        """See ``make_plan``; made once for all versions of the same tensors."""
        if bucket_bytes not in self._plans:
            self._plans[bucket_bytes] = make_plan(self.tensors, bucket_bytes)
        return self._plans[bucket_bytes]

    @cached_property
    def names(self) -> frozenset[str]:
        """Of the tensors, without aliases."""
        return frozenset(tensor.name for tensor in self.tensors)

    def within(self, names: frozenset[str]) -> bool:
        """Whether all names are among these; no time at all if they are the very same."""
        return names is self.names or self.names <= names

    @cached_property
    def nbytes(self) -> int:
        """Sum over all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


def digest_of(value: object) -> str:
    """Of anything that msgpack can carry."""
    return hashlib.blake2b(msgpack.packb(value), digest_size=20).hexdigest()


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a contiguous tensor.

    Raises:
        ValueError: the type is unknown.
    """
    try:
        return ITEM_BYTES[dtype] * prod(shape)
    except KeyError:
        raise ValueError(
            f"dtype {dtype!r} is not supported (known: {', '.join(ITEM_BYTES)})"
        ) from None


def check_manifest(manifest: Manifest, expected: Expected) -> list[str]:
    """Compare what is offered with what the rank was booted with.

    Returns:
        Every problem as one sentence that names the tensor; an empty list is acceptance.
    """
    problems = list(_contradictions(manifest))
    by_name = {tensor.name: tensor for tensor in manifest.tensors}
    offered = by_name | {
        alias: by_name[name] for alias, name in manifest.aliases if name in by_name
    }
    for name, tensor in offered.items():
        want = expected.tensors.get(name)
        if want is None:
            problems.append(f"tensor {name!r}: unknown to the engine; is it another model?")
        else:
            problems.extend(_differences(name, tensor, want))
    problems.extend(
        f"tensor {name!r}: missing; the engine was booted with it, so the source is incomplete"
        for name in expected.tensors
        if name not in offered and name not in expected.optional
    )
    return problems


def _contradictions(manifest: Manifest) -> Iterable[str]:
    names = Counter(tensor.name for tensor in manifest.tensors)
    names.update(alias for alias, _ in manifest.aliases)
    for name, count in names.items():
        if count > 1:
            yield f"tensor {name!r}: named {count} times"
    for alias, name in manifest.aliases:
        if name not in names:
            yield f"alias {alias!r}: stands for {name!r}, which the manifest does not have"
    for tensor in manifest.tensors:
        if any(size < 0 for size in tensor.shape):
            yield f"tensor {tensor.name!r}: negative size in shape {list(tensor.shape)}"
            continue
        try:
            nbytes = tensor_nbytes(tensor.dtype, tensor.shape)
        except ValueError as error:
            yield f"tensor {tensor.name!r}: {error}"
            continue
        if nbytes != tensor.nbytes:
            yield (
                f"tensor {tensor.name!r}: nbytes {tensor.nbytes}, but {tensor.dtype} "
                f"{list(tensor.shape)} takes {nbytes}"
            )


def _differences(name: str, tensor: TensorSpec, want: TensorSpec) -> Iterable[str]:
    if tensor.shape != want.shape:
        yield f"tensor {name!r}: shape {list(tensor.shape)}, expected {list(want.shape)}"
    if tensor.dtype != want.dtype:
        yield f"tensor {name!r}: dtype {tensor.dtype}, expected {want.dtype}; convert the source"
    if tensor.shape == want.shape and tensor.dtype == want.dtype and tensor.nbytes != want.nbytes:
        yield f"tensor {name!r}: nbytes {tensor.nbytes}, expected {want.nbytes}"


def shorten(problems: Sequence[str], limit: int) -> tuple[str, ...]:
    """The first ``limit`` problems, and how many more there are."""
    if len(problems) <= limit:
        return tuple(problems)
    return (*problems[:limit], f"and {len(problems) - limit} more")

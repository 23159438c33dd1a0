"""The headers of a version's files, all checked, wherever they lie. Pure."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollout_pod.weights.files import is_plain_name
from rollout_pod.weights.headers import SourceError
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.spec import TensorSpec

INDEX: Final = "model.safetensors.index.json"
INDEX_MAX_BYTES: Final = 100_000_000
SUMS: Final = "SHA256SUMS"
SUMS_MAX_BYTES: Final = 10_000_000
_SUM: Final = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")
_HASH_BYTES: Final = 4 << 20

Fingerprint = tuple[tuple[str | int, ...], ...]
"""What changes when a file does: for each file its name, its size and its inode and mtime (ns), or
what a server calls its content (an ETag)."""


@dataclass(frozen=True)
class Located:
    """A tensor and where its bytes lie."""

    spec: TensorSpec
    file: int
    """Index into ``Checkpoint.files``."""
    position: int
    """In the file, in bytes."""


@dataclass(frozen=True)
class Sum:
    """What a file's bytes must add up to."""

    sha256: str
    """Hexadecimal, lower case."""
    header: bytes
    """The file's first bytes, up to its tensors."""


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a version's files, all checked."""

    where: str
    """Folder or URL."""
    files: tuple[str, ...]
    """Names in it."""
    tensors: tuple[Located, ...]
    fingerprint: Fingerprint
    sums: tuple[Sum | None, ...] = ()
    """Of each file, None where none is known; empty if none of any is."""

    def manifest(self, version: str) -> Manifest:
        """The manifest, in file order."""
        return Manifest(version, tuple(tensor.spec for tensor in self.tensors))


def gather(
    where: str,
    files: Sequence[str],
    headers: Iterable[Iterable[tuple[TensorSpec, int]]],
    placed: Mapping[str, str],
) -> tuple[Located, ...]:
    """All tensors of all files.

    Args:
        where: folder or URL.
        files: names in it.
        headers: of each file the tensors with where their bytes begin.
        placed: the file of each tensor by the index; empty without one.

    Raises:
        SourceError: a tensor is there twice, or not where the index places it; or there is none.
    """
    tensors: dict[str, Located] = {}
    for number, header in enumerate(headers):
        for spec, position in header:
            if spec.name in tensors:
                other = files[tensors[spec.name].file]
                raise SourceError(
                    f"{where}/{files[number]}: tensor {spec.name!r} is in {other} too; "
                    "remove one of them",
                    retryable=False,
                )
            tensors[spec.name] = Located(spec, number, position)
    for name, shard in placed.items():
        if name not in tensors or files[tensors[name].file] != shard:
            raise SourceError(
                f"{where}/{shard}: lacks tensor {name!r}, which {INDEX} places there; "
                "write index and shards anew",
                retryable=True,
            )
    if not tensors:
        raise SourceError(f"{where}: its files hold no tensor", retryable=True)
    return tuple(tensors.values())


def parse_index(index: str, raw: bytes) -> dict[str, str]:
    """The file of each tensor, from the bytes of ``index``.

    Raises:
        SourceError: it is too long, no JSON, or places tensors in what is no file's name.
    """
    try:
        if len(raw) > INDEX_MAX_BYTES:
            raise ValueError(f"more than {INDEX_MAX_BYTES} bytes")
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{index}: cannot be read ({error}); write it anew", retryable=True
        ) from error
    placed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise SourceError(f"{index}: has no weight_map; write it anew", retryable=False)
    for name, shard in placed.items():
        if not is_plain_name(shard):
            raise SourceError(
                f"{index}: places {name[:64]!r} in {str(shard)[:64]!r}, which is no plain file "
                "name; write it anew",
                retryable=False,
            )
    return placed


def parse_sums(file: str, raw: bytes) -> dict[str, str]:
    """The SHA-256 of files by name, from what ``sha256sum`` writes.

    Raises:
        SourceError: it is too long, or a line is something else.
    """
    sums: dict[str, str] = {}
    if len(raw) > SUMS_MAX_BYTES:
        raise SourceError(f"{file}: more than {SUMS_MAX_BYTES} bytes", retryable=False)
    for number, line in enumerate(raw.decode(errors="replace").splitlines(), 1):
        found = _SUM.fullmatch(line)
        if found:
            sums[found[2]] = found[1].lower()
        elif line.strip():
            raise SourceError(
                f"{file}: line {number} is none of sha256sum's; write it anew", retryable=False
            )
    return sums


def verify(
    checkpoint: Checkpoint,
    target: memoryview,
    offsets: Sequence[int],
    file: int,
    *,
    cancelled: Callable[[], bool],
) -> None:
    """Compare the SHA-256 of one file with what is known of it; nothing where none is.

    Args:
        checkpoint: whose tensors were read.
        target: that they were read to.
        offsets: where each lies in it.
        file: index into ``checkpoint.files``.
        cancelled: ends it early.

    Raises:
        SourceError: they differ; or cancelled.
    """
    known = checkpoint.sums[file] if checkpoint.sums else None
    if known is None:
        return
    digest = hashlib.sha256(known.header)
    for tensor, offset in zip(checkpoint.tensors, offsets, strict=True):
        if tensor.file != file:
            continue
        for start in range(offset, offset + tensor.spec.nbytes, _HASH_BYTES):
            if cancelled():
                raise SourceError("reading was cancelled", retryable=True)
            with target[start : min(start + _HASH_BYTES, offset + tensor.spec.nbytes)] as part:
                digest.update(part)
    if digest.hexdigest() != known.sha256:
        raise SourceError(
            f"{checkpoint.where}/{checkpoint.files[file]}: wrong bytes, SHA-256 is "
            f"{digest.hexdigest()}, expected {known.sha256}; copy it again",
            retryable=True,
        )

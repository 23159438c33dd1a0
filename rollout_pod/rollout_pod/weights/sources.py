"""The source ``path``: a folder of safetensors files, checked before it is believed."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollout_pod.weights.files import is_folder, is_plain_name, open_regular
from rollout_pod.weights.headers import SourceError, read_header
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.spec import TensorSpec

INDEX: Final = "model.safetensors.index.json"
INDEX_MAX_BYTES: Final = 100_000_000
PIECE_BYTES: Final = 16 << 20
READERS: Final = 8


@dataclass(frozen=True)
class Located:
    """A tensor and where its bytes lie."""

    spec: TensorSpec
    file: int
    """Index into ``Checkpoint.files``."""
    position: int
    """In the file, in bytes."""


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a folder, all checked."""

    path: Path
    files: tuple[Path, ...]
    tensors: tuple[Located, ...]
    fingerprint: tuple[tuple[str, int, int, int], ...]
    """Name, inode, size and mtime (ns) of every file."""

    def manifest(self, version: str) -> Manifest:
        """The manifest, in file order."""
        return Manifest(version, tuple(tensor.spec for tensor in self.tensors))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check all headers; no tensor bytes.

    The files are those that ``model.safetensors.index.json`` names, or all ``*.safetensors``.

    Raises:
        SourceError: missing, no regular file, truncated, contradictory or of an unknown type.
    """
    files, where = _files(path)
    tensors: dict[str, Located] = {}
    fingerprint: list[tuple[str, int, int, int]] = []
    for number, file in enumerate(files):
        try:
            with os.fdopen(open_regular(file), "rb") as stream:
                stat = os.fstat(stream.fileno())
                found = read_header(file, stat.st_size, stream.read)
        except OSError as error:
            raise SourceError(
                f"{file}: {error.strerror}; make it readable", retryable=True
            ) from error
        fingerprint.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        for spec, position in found:
            if spec.name in tensors:
                other = files[tensors[spec.name].file].name
                raise SourceError(
                    f"{file}: tensor {spec.name!r} is in {other} too; remove one of them",
                    retryable=False,
                )
            tensors[spec.name] = Located(spec, number, position)
    for name, shard in where.items():
        if name not in tensors or files[tensors[name].file].name != shard:
            raise SourceError(
                f"{path / shard}: lacks tensor {name!r}, which {INDEX} places there; "
                "write index and shards anew",
                retryable=True,
            )
    if not tensors:
        raise SourceError(f"{path}: its files hold no tensor", retryable=True)
    return Checkpoint(path, tuple(files), tuple(tensors.values()), tuple(fingerprint))


def read_tensors(
    checkpoint: Checkpoint,
    target: memoryview,
    offsets: Sequence[int],
    *,
    progress: Callable[[int], None],
    cancel: threading.Event,
) -> None:
    """Read all tensors to their offsets in ``target``, by several threads.

    Args:
        checkpoint: whose headers were checked.
        target: writable bytes.
        offsets: where each tensor goes, in the order of ``checkpoint.tensors``.
        progress: told the bytes of each piece; called on any thread.
        cancel: ends the reading early with a ``SourceError``.

    Raises:
        SourceError: a file became shorter, changed meanwhile or cannot be read; or cancelled.
    """
    with ExitStack() as stack:
        descriptors = [stack.enter_context(_opened(file)) for file in checkpoint.files]

        def read(piece: "_Piece") -> None:
            if cancel.is_set():
                raise SourceError("reading was cancelled", retryable=True)
            file = checkpoint.files[piece.file]
            _read_exactly(descriptors[piece.file], file, target, piece)
            progress(piece.nbytes)

        pool = stack.enter_context(ThreadPoolExecutor(READERS, "weights-read"))
        futures = [pool.submit(read, piece) for piece in _pieces(checkpoint, offsets)]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.result()
    if open_checkpoint(checkpoint.path).fingerprint != checkpoint.fingerprint:
        raise SourceError(
            f"{checkpoint.path}: changed while it was read; a version's folder must not change "
            "once it is complete",
            retryable=True,
        )


@dataclass(frozen=True)
class _Piece:
    file: int
    position: int
    offset: int
    nbytes: int


def _pieces(checkpoint: Checkpoint, offsets: Sequence[int]) -> Iterator[_Piece]:
    for tensor, offset in zip(checkpoint.tensors, offsets, strict=True):
        for start in range(0, tensor.spec.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, tensor.spec.nbytes - start)
            yield _Piece(tensor.file, tensor.position + start, offset + start, size)


class _opened:  # noqa: N801 - used like a function
    """A file descriptor that closes itself."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> int:
        self._fd = open_regular(self._file)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _read_exactly(fd: int, file: Path, target: memoryview, piece: _Piece) -> None:
    done = 0
    while done < piece.nbytes:
        part = target[piece.offset + done : piece.offset + piece.nbytes]
        try:
            got = os.preadv(fd, [part], piece.position + done)
        except OSError as error:
            raise SourceError(
                f"{file}: {error.strerror} while reading; is its file system reachable?",
                retryable=True,
            ) from error
        finally:
            part.release()
        if got == 0:
            raise SourceError(
                f"{file}: became shorter while it was read; copy it again", retryable=True
            )
        done += got


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files, and where the index places each tensor (empty without one)."""
    if not is_folder(path):
        raise SourceError(
            f"{path}: does not exist; give the folder that holds the safetensors files",
            retryable=True,
        )
    index = path / INDEX
    try:
        names = os.listdir(path)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; make it readable", retryable=True) from error
    if INDEX not in names:
        files = [path / name for name in sorted(names) if name.endswith(".safetensors")]
        if not files:
            raise SourceError(
                f"{path}: holds no *.safetensors file; copy the checkpoint there", retryable=True
            )
        return files, {}
    try:
        with os.fdopen(open_regular(index), "rb") as stream:
            raw = stream.read(INDEX_MAX_BYTES + 1)
        if len(raw) > INDEX_MAX_BYTES:
            raise ValueError(f"more than {INDEX_MAX_BYTES} bytes")
        document = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(
            f"{index}: cannot be read ({error}); write it anew", retryable=True
        ) from error
    where = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(where, dict) or not where:
        raise SourceError(f"{index}: has no weight_map; write it anew", retryable=False)
    for name, shard in where.items():
        if not is_plain_name(shard):
            raise SourceError(
                f"{index}: places {name[:64]!r} in {str(shard)[:64]!r}, which is no plain file "
                "name; write it anew",
                retryable=False,
            )
    return [path / shard for shard in sorted(set(where.values()))], where

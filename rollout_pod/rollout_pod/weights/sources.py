"""The source ``path``: a folder of safetensors files, checked before it is believed."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollout_pod.weights.checkpoint import (
    INDEX,
    INDEX_MAX_BYTES,
    SUMS,
    SUMS_MAX_BYTES,
    Checkpoint,
    Sum,
    gather,
    parse_index,
    parse_sums,
)
from rollout_pod.weights.files import is_folder, open_regular
from rollout_pod.weights.headers import SourceError, read_header
from rollout_pod.weights.spec import TensorSpec
from rollout_pod.weights.stores import Changed

PIECE_BYTES: Final = 16 << 20
READERS: Final = 8


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check all headers; no tensor bytes.

    The files are those that ``model.safetensors.index.json`` names, or all ``*.safetensors``.

    Raises:
        SourceError: missing, no regular file, truncated, contradictory or of an unknown type.
    """
    files, placed, sums = _files(path)
    headers: list[Iterable[tuple[TensorSpec, int]]] = []
    fingerprint: list[tuple[str | int, ...]] = []
    known: list[Sum | None] = []
    for name in files:
        file = path / name
        try:
            with os.fdopen(open_regular(file), "rb") as stream:
                stat = os.fstat(stream.fileno())
                headers.append(read_header(file, stat.st_size, stream.read))
                end = stream.tell()
                stream.seek(0)
                known.append(Sum(sums[name], stream.read(end)) if name in sums else None)
        except OSError as error:
            raise SourceError(
                f"{file}: {error.strerror}; make it readable", retryable=True
            ) from error
        fingerprint.append(_identity(name, stat))
    tensors = gather(str(path), files, headers, placed)
    return Checkpoint(
        str(path), tuple(files), tensors, tuple(fingerprint), tuple(known) if any(known) else ()
    )


def read_tensors(
    checkpoint: Checkpoint,
    target: memoryview,
    offsets: Sequence[int],
    *,
    progress: Callable[[int], None],
    cancel: threading.Event,
    done: set[int] | None = None,
) -> None:
    """Read all tensors to their offsets in ``target``, by several threads.

    Args:
        checkpoint: whose headers were checked.
        target: writable bytes.
        offsets: where each tensor goes, in the order of ``checkpoint.tensors``.
        progress: told the bytes of each piece; called on any thread.
        cancel: ends the reading early with a ``SourceError``.
        done: the pieces that ``target`` holds already, counted; they are not read again, and those
            that come are added. Empty after a change.

    Raises:
        SourceError: a file became shorter, changed meanwhile or cannot be read; or cancelled.
    """
    have = set() if done is None else done
    path = Path(checkpoint.where)
    known = checkpoint.fingerprint
    try:
        with ExitStack() as stack:
            files = [path / name for name in checkpoint.files]
            descriptors = [stack.enter_context(_opened(file)) for file in files]

            def read(number: int, piece: "_Piece") -> None:
                if cancel.is_set():
                    raise SourceError("reading was cancelled", retryable=True)
                if number not in have:
                    fd = descriptors[piece.file]
                    _read_exactly(fd, files[piece.file], target, piece)
                    # the look at the end does not see a file that was there for a while only
                    if _identity(checkpoint.files[piece.file], os.fstat(fd)) != known[piece.file]:
                        raise Changed(str(path))
                    have.add(number)
                progress(piece.nbytes)

            pool = stack.enter_context(ThreadPoolExecutor(READERS, "weights-read"))
            futures = [
                pool.submit(read, number, piece)
                for number, piece in enumerate(_pieces(checkpoint, offsets))
            ]
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.result()
        if open_checkpoint(path).fingerprint != checkpoint.fingerprint:
            raise Changed(str(path))
    except Changed:
        have.clear()
        raise


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


def _identity(name: str, stat: os.stat_result) -> tuple[str | int, ...]:
    return (name, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _files(path: Path) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """The files' names, where the index places each tensor and what is known of the files' bytes
    (both empty without such a file).
    """
    if not is_folder(path):
        raise SourceError(
            f"{path}: does not exist; give the folder that holds the safetensors files",
            retryable=True,
        )
    try:
        names = os.listdir(path)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; make it readable", retryable=True) from error
    sums: dict[str, str] = {}
    if SUMS in names:
        sums = parse_sums(f"{path / SUMS}", _content(path / SUMS, SUMS_MAX_BYTES))
    if INDEX not in names:
        files = [name for name in sorted(names) if name.endswith(".safetensors")]
        if not files:
            raise SourceError(
                f"{path}: holds no *.safetensors file; copy the checkpoint there", retryable=True
            )
        return files, {}, sums
    placed = parse_index(f"{path / INDEX}", _content(path / INDEX, INDEX_MAX_BYTES))
    return sorted(set(placed.values())), placed, sums


def _content(file: Path, limit: int) -> bytes:
    """All bytes, or one more than ``limit``."""
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            return stream.read(limit + 1)
    except OSError as error:
        raise SourceError(
            f"{file}: cannot be read ({error}); write it anew", retryable=True
        ) from error

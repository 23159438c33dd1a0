"""Sources behind a URL: headers first, then ranges in parallel, straight into shared memory.

Both calls block and run an event loop of their own, so that a wait for a server ends when it is
cancelled.
"""

import asyncio
import io
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

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
from rollout_pod.weights.headers import HEADER_MAX_BYTES, SourceError, read_header
from rollout_pod.weights.locations import parse_hub, parse_url
from rollout_pod.weights.scatter import Piece, pieces_of, places_of
from rollout_pod.weights.stores import Changed, Patience, RemoteFile, Store, Transient

PIECE_BYTES: Final = 16 << 20
READERS: Final = 8
HEAD_BYTES: Final = 1 << 18
"""Most headers fit: one request then tells all of a file."""
SINGLE: Final = "model.safetensors"
TICK_S: Final = 0.1

PATIENCE: Final = Patience()

T = TypeVar("T")


def make_store(url: str, patience: Patience) -> Store:
    """The store that a URL's scheme names.

    Raises:
        SourceError: the URL is none, or what it needs is missing.
    """
    # each brings libraries that take their time to import
    try:
        location = parse_url(url)
        if location.scheme == "hf":
            from rollout_pod.weights.store_hub import HubStore

            return HubStore(location.url, parse_hub(location), patience)
    except ValueError as error:
        raise SourceError(str(error), retryable=False) from None
    if location.scheme in ("https", "http"):
        from rollout_pod.weights.store_http import HttpStore

        return HttpStore.of_environment(location, patience)
    from rollout_pod.weights.store_fsspec import BucketStore

    return BucketStore(location, patience)


@dataclass(frozen=True)
class RemoteSource:
    """A folder behind a URL."""

    url: str
    patience: Patience = PATIENCE
    stores: Callable[[str, Patience], Store] = make_store

    @property
    def where(self) -> str:
        """For messages."""
        return self.url

    def open(self, cancel: threading.Event) -> Checkpoint:
        """Read and check all headers; no tensor bytes.

        Raises:
            SourceError: as it says; or cancelled.
        """
        return self._run(self._open, cancel)

    def read(
        self,
        checkpoint: Checkpoint,
        target: memoryview,
        offsets: Sequence[int],
        *,
        done: set[int],
        progress: Callable[[int], None],
        cancel: threading.Event,
    ) -> None:
        """See ``source_kinds.Source``."""

        async def read(store: Store) -> None:
            await self._read(store, checkpoint, target, offsets, done, progress)

        self._run(read, cancel)

    def _run(self, work: Callable[[Store], Coroutine[Any, Any, T]], cancel: threading.Event) -> T:
        async def main() -> T:
            store = self.stores(self.url, self.patience)
            try:
                return await _until(work(store), cancel)
            finally:
                await store.close()

        return asyncio.run(main())

    async def _open(self, store: Store) -> Checkpoint:
        names = await self._patiently(store.names)
        placed: dict[str, str] = {}
        if names is None or INDEX in names:
            raw = await self._patiently(lambda: store.content(INDEX, INDEX_MAX_BYTES))
            if raw is not None:
                placed = parse_index(f"{self.url}/{INDEX}", raw)
        files = sorted(set(placed.values()))
        if not files and names is not None:
            files = sorted(name for name in names if name.endswith(".safetensors"))
            if not files:
                raise SourceError(
                    f"{self.url}: holds no *.safetensors file; copy the checkpoint there",
                    retryable=True,
                )
        files = files or [SINGLE]
        sums = dict(await self._patiently(store.known_sums))
        if names is None or SUMS in names:
            raw = await self._patiently(lambda: store.content(SUMS, SUMS_MAX_BYTES))
            sums |= parse_sums(f"{self.url}/{SUMS}", raw) if raw is not None else {}
        heads: list[_Head | None] = [None] * len(files)

        async def look(number: int) -> None:
            heads[number] = await self._head(store, files[number])

        await _in_parallel(look(number) for number in range(len(files)))
        found = [head for head in heads if head is not None]
        for head in found:
            if not head.file.tag and head.file.name not in sums:
                # two contents of one size could be mixed, and nothing would tell
                raise SourceError(
                    f"{self.url}/{head.file.name}: the server sends neither ETag nor "
                    "Last-Modified, so a change in the middle would not be seen; use a server that "
                    f"sends one of them, or write {SUMS} there",
                    retryable=False,
                )
        known = [
            Sum(sums[head.file.name], head.raw) if head.file.name in sums else None
            for head in found
        ]
        return Checkpoint(
            self.url,
            tuple(files),
            gather(self.url, files, [head.tensors for head in found], placed),
            tuple(_identity(head.file) for head in found),
            tuple(known) if any(known) else (),
        )

    async def _head(self, store: Store, name: str) -> "_Head":
        file, raw = await self._patiently(lambda: store.head(name, HEAD_BYTES))
        need = min(8 + int.from_bytes(raw[:8], "little"), 8 + HEADER_MAX_BYTES, file.size)
        if len(raw) < need:
            whole = bytearray(raw)
            await self._fill(store, file, len(raw), need, lambda _, chunk: whole.extend(chunk))
            raw = bytes(whole)
        stream = io.BytesIO(raw)
        tensors = list(read_header(f"{self.url}/{name}", file.size, stream.read))
        return _Head(file, tensors, raw[: stream.tell()])

    async def _read(
        self,
        store: Store,
        checkpoint: Checkpoint,
        target: memoryview,
        offsets: Sequence[int],
        done: set[int],
        progress: Callable[[int], None],
    ) -> None:
        files = [
            RemoteFile(str(name), int(size), str(tag))
            for name, size, tag, *_ in checkpoint.fingerprint
        ]
        places = places_of(checkpoint, offsets)

        async def fetch(number: int, piece: Piece) -> None:
            if number in done:
                progress(piece.stop - piece.start)
                return

            def put(position: int, chunk: bytes) -> None:
                places[piece.file].put(position, chunk, target)
                progress(len(chunk))

            await self._fill(store, files[piece.file], piece.start, piece.stop, put)
            done.add(number)

        sizes = [file.size for file in files]
        pieces = enumerate(pieces_of(sizes, places, PIECE_BYTES))
        try:
            await _in_parallel(fetch(number, piece) for number, piece in pieces)
            await _in_parallel(
                self._patiently(lambda file=file: store.check(file))  # type: ignore[misc] # a lambda's default has no type
                for file in files
            )
        except Changed:
            done.clear()
            raise

    async def _fill(
        self,
        store: Store,
        file: RemoteFile,
        start: int,
        stop: int,
        put: Callable[[int, bytes], None],
    ) -> None:
        """From ``start`` to ``stop``, going on after a failure where it stood."""
        at = start

        def counted(position: int, chunk: bytes) -> None:
            nonlocal at
            put(position, chunk)
            at = position + len(chunk)

        async def rest() -> None:
            if at < stop:
                await store.read(file, at, stop, counted)

        await self._patiently(rest)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        patience = self.patience
        first, longest = patience.first_wait_s, patience.longest_wait_s
        backoff = wait_exponential(multiplier=first, max=longest) + wait_random(0, first)

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = error.after if isinstance(error, Transient) else None
            return max(backoff(state), min(asked or 0.0, longest))

        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Transient),
            stop=stop_after_attempt(patience.attempts),
            wait=wait,
            reraise=True,
        ):
            with attempt:
                return await call()
        raise AssertionError("unreachable: the last attempt returns or raises")


def _identity(file: RemoteFile) -> tuple[str | int, ...]:
    """Of a content without a name nobody knows whether it is the one that was there before."""
    nonce = () if file.tag else (secrets.token_hex(8),)
    return (file.name, file.size, file.tag, *nonce)


@dataclass(frozen=True)
class _Head:
    file: RemoteFile
    tensors: list[Any]
    raw: bytes


async def _in_parallel(jobs: Iterator[Coroutine[Any, Any, None]]) -> None:
    """At most ``READERS`` at a time; the first failure ends the others and is raised."""

    async def work() -> None:
        for job in jobs:
            await job

    workers = [asyncio.create_task(work()) for _ in range(READERS)]
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)
    for worker in workers:
        if not worker.cancelled():
            worker.result()


async def _until(work: Coroutine[Any, Any, T], cancel: threading.Event) -> T:
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=TICK_S)
            if cancel.is_set() and not task.done():
                raise Transient("reading was cancelled")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})

"""The loading half of a receiver: buckets off a queue, into the model."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rollout_pod.weights import wire
from rollout_pod.weights.assemble import Assembler
from rollout_pod.weights.copies import Piece
from rollout_pod.weights.incoming import Failed, Incoming
from rollout_pod.weights.loader import Loader, ReplayingLoader
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.memory import Memories
from rollout_pod.weights.talking import ERROR_CHARS

log = logging.getLogger(__name__)


class LoadError(Exception):
    """Why a load ends; the message is for the report."""


@dataclass
class Loading:
    """One load of one session, on the loading thread.

    Args:
        incoming: whose ``work`` is taken; ``lock`` guards it.
        memories: of the session's sender.
        post: sends a message to the session's sender.
        deadline: of ``time.monotonic``.
    """

    incoming: Incoming
    manifest: Manifest
    memories: Memories
    loader: Loader
    lock: threading.Lock
    post: Callable[[wire.Message], None]
    deadline: float
    touched: bool = False
    """Whether a byte of the model may have changed, or its state is one that needs a flush."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds: until the first bytes came, then waiting for more, and loading, of which ``settle``
    is the part from the last call to the end of its copies."""

    def run(self, *, flush: bool) -> tuple[int, int]:
        """Load until ``finish``; returns how many tensors and bytes the loader was given.

        Raises:
            LoadError: the session failed, timed out, or is incomplete; or what the loader raised.
        """
        loader = self.loader
        if flush:
            self.touched = True
            loader.flush()
        names: frozenset[str] = frozenset()
        started = time.monotonic()
        if isinstance(loader, ReplayingLoader):
            names = loader.prepare(self.manifest)
        self.steps["prepare"] = time.monotonic() - started
        if not self.manifest.within(names):
            self.touched = True
        self._timed("begin", loader.begin)
        assembler = Assembler(self.manifest, self.memories, names)
        given: set[str] = set()
        whole = False
        step = "first"
        while True:
            work = self._next(step, len(given))
            step = "wait"
            if isinstance(work, wire.Finish):
                break
            self.touched = True
            done = self._load(assembler, work)
            if done is self.manifest.names:
                whole = True
            else:
                given.update(done)
        wanted = self.manifest.names
        if not whole and given != wanted:
            raise LoadError(f"{len(given)} tensors were loaded, the manifest has {len(wanted)}")
        self._timed("finish", loader.finish)
        return len(self.manifest.tensors), self.manifest.nbytes

    def _timed(self, step: str, call: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            call()
        finally:
            self.steps[step] = self.steps.get(step, 0.0) + time.monotonic() - started

    def _next(self, step: str, tensors: int) -> "wire.BucketReady | wire.Direct | wire.Finish":
        started = time.monotonic()
        try:
            work = self.incoming.work.get(timeout=max(self.deadline - started, 0))
        except queue.Empty:
            reason = f"timed out after {self.incoming.acked} buckets and {tensors} tensors"
            self._fail(reason)
            raise LoadError(reason) from None
        finally:
            self.steps[step] = self.steps.get(step, 0.0) + time.monotonic() - started
        with self.lock:
            failure = self.incoming.failure
        if failure or isinstance(work, Failed):
            raise LoadError(failure)
        return work

    def _load(
        self, assembler: Assembler, work: "wire.BucketReady | wire.Direct"
    ) -> Collection[str]:
        """Load and acknowledge, only then; returns the names that are complete by it."""
        session = self.incoming.session
        seq = work.seq if isinstance(work, wire.BucketReady) else 0
        try:
            if isinstance(work, wire.BucketReady):
                self._timed("load", lambda: self._bucket(assembler, work))
                names: Collection[str] = assembler.completed(work)
            else:
                self._timed("load", lambda: self._direct(assembler, work))
                names = self.manifest.names
        except Exception as error:
            log.exception("bucket %d of session %s failed", seq, session)
            reason = f"bucket {seq}: {type(error).__name__}: {error}"[:ERROR_CHARS]
            self._fail(reason)
            self.post(wire.Ack(session=session, seq=seq, ok=False, error=reason))
            raise LoadError(reason) from error
        with self.lock:
            self.incoming.acked += 1
        self.post(wire.Ack(session=session, seq=seq, ok=True))
        return names

    def _bucket(self, assembler: Assembler, bucket: wire.BucketReady) -> None:
        source = assembler.find(bucket)
        if isinstance(self.loader, ReplayingLoader):
            # an equal window of the same mapping holds the same pieces in every update
            key = (source.serial, self.manifest.digest, bucket.base, bucket.entries)
            self.loader.replay(
                key if source.serial else None,
                lambda: assembler.cut(bucket, source),
                on_device=source.on_device,
            )
        whole = assembler.take(bucket, source)
        if whole:
            self.loader.load(whole)
        self._timed("settle", self._settle)

    def _direct(self, assembler: Assembler, message: wire.Direct) -> None:
        if isinstance(self.loader, ReplayingLoader):
            # the same places in the same mappings were found good when the key was new
            key = (message.digest, self.manifest.digest, self.memories.generation)

            def pieces() -> Sequence[Piece]:
                sources = assembler.regions(message)
                assembler.check(message, sources)
                return assembler.places(message, sources)

            self.loader.replay(key, pieces, on_device=True)
        if assembler.wanted:
            sources = assembler.regions(message)
            assembler.check(message, sources)
            self.loader.load(assembler.views(message, sources))
        self._timed("settle", self._settle)

    def _settle(self) -> None:
        """The memory may be used again after this: no copy out of it is still queued."""
        if isinstance(self.loader, ReplayingLoader):
            self.loader.wait()
        if self.memories.device is not None:
            self.memories.device.synchronize()

    def _fail(self, reason: str) -> None:
        with self.lock:
            self.incoming.fail(reason)

"""The loading half of a receiver: buckets off a queue, into the model."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rollout_pod.weights import wire
from rollout_pod.weights.assemble import Assembler
from rollout_pod.weights.buckets import BucketError
from rollout_pod.weights.copies import Piece
from rollout_pod.weights.hashes import Verifier
from rollout_pod.weights.incoming import Failed, Incoming
from rollout_pod.weights.loader import Loader, ReplayingLoader
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.memory import Memories, Source
from rollout_pod.weights.progress import SENDER, Counters, watch
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
        confirm: looks whether that is still there; why not, or nothing.
        deadline: of ``time.monotonic``.
    """

    incoming: Incoming
    manifest: Manifest
    memories: Memories
    loader: Loader
    lock: threading.Lock
    post: Callable[[wire.Message], object]
    confirm: Callable[[], str]
    deadline: float
    touched: bool = False
    """Whether a byte of the model may have changed, or its state is one that needs a flush."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds: until the first bytes came, then waiting for more, for the sender's GPU
    (``filled``), and loading, of which ``settle`` waits for the end of copies."""

    _queued: bool = field(default=False, init=False)
    """Copies whose end nobody has waited for."""
    _parts: int = field(default=0, init=False)
    """Messages that let tensors be read in place."""

    def run(self, *, flush: bool) -> tuple[int, int]:
        """Load until ``finish``; returns how many tensors and bytes the loader was given.

        Raises:
            LoadError: the session failed, timed out, or is incomplete; or what the loader raised.
        """
        try:
            return self._run(flush=flush)
        except BaseException:
            # whoever hears of the end takes the memory back that queued copies read
            with contextlib.suppress(Exception):
                self._settle()
            raise

    def _run(self, *, flush: bool) -> tuple[int, int]:
        loader = self.loader
        if flush:
            self.touched = True
            loader.flush()
        names: frozenset[str] = frozenset()
        started = time.monotonic()
        if isinstance(loader, ReplayingLoader):
            names = loader.prepare(self.manifest)
        self.steps["prepare"] = time.monotonic() - started
        assembler = Assembler(self.manifest, self.memories, names)
        verifier = Verifier(self.manifest) if self.manifest.hashes else None
        given: set[str] = set()
        whole = False
        work = self._next("first", 0)  # a sender that dies before it costs nothing
        if self.incoming.transport == "cuda_ipc" and (gone := self.confirm()):
            raise LoadError(gone)  # nobody says what is in the memory of a process that has ended
        if not self.manifest.within(names):
            self.touched = True
        self._timed("begin", loader.begin)
        while not isinstance(work, wire.Finish):
            self.touched = True
            done = self._load(assembler, work, verifier)
            if done is self.manifest.names:
                whole = True
            else:
                given.update(done)
            work = self._next("wait", len(given))
        wanted = self.manifest.names
        if not whole and given != wanted:
            raise LoadError(f"{len(given)} tensors were loaded, the manifest has {len(wanted)}")
        if self._queued:
            self._timed("settle", self._settle)
        self._timed("finish", loader.finish)
        return len(self.manifest.tensors), self.manifest.nbytes

    def _timed(self, step: str, call: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            call()
        finally:
            self._count(step, started)

    def _count(self, step: str, started: float) -> None:
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
            self._count(step, started)
        with self.lock:
            failure = self.incoming.failure
        if failure or isinstance(work, Failed):
            raise LoadError(failure)
        return work

    def _load(
        self,
        assembler: Assembler,
        work: "wire.BucketReady | wire.Direct",
        verifier: Verifier | None,
    ) -> Collection[str]:
        """Load and acknowledge, only then; returns the names that are complete by it."""
        session = self.incoming.session
        seq = work.seq if isinstance(work, wire.BucketReady) else self._parts
        copied = 0
        try:
            if isinstance(work, wire.BucketReady):
                source = assembler.find(work)
                if work.filled:
                    self._timed("filled", lambda: self._await_fill(work))
                if verifier is not None:
                    self._timed("hash", lambda: verifier.check(work, source))
                started = time.monotonic()
                copied = self._bucket(assembler, work, source)
                self._count("load", started)
                names: Collection[str] = assembler.completed(work)
            else:
                if verifier is not None:
                    raise BucketError("direct: hashes are compared in buckets only")
                self._timed("load", lambda: self._direct(assembler, work))
                self._parts += 1
                names = self.manifest.names if assembler.ends(work) else ()
        except LoadError:
            raise
        except Exception as error:
            log.exception("bucket %d of session %s failed", seq, session)
            reason = f"bucket {seq}: {type(error).__name__}: {error}"[:ERROR_CHARS]
            self._fail(reason)
            self.post(wire.Ack(session=session, seq=seq, ok=False, error=reason))
            raise LoadError(reason) from error
        with self.lock:
            self.incoming.acked += 1
        self.post(wire.Ack(session=session, seq=seq, ok=True, copied=copied))
        return names

    def _counters(self) -> Counters:
        if self.memories.counters is None:
            raise BucketError("the sender counts, and no counters are mapped")
        return self.memories.counters

    def _await_fill(self, bucket: wire.BucketReady) -> None:
        """Until the sender's GPU has filled it. Never by this rank's stream: a sender that is gone
        would stop it for good.
        """
        counters = self._counters()

        def check() -> None:
            with self.lock:
                failure = self.incoming.failure
            if failure:
                raise LoadError(failure)
            if time.monotonic() > self.deadline:
                reason = f"timed out: bucket {bucket.seq} was announced and is not filled"
                self._fail(reason)
                raise LoadError(reason)

        watch(lambda: counters.read(SENDER) >= bucket.filled, check)

    def _bucket(self, assembler: Assembler, bucket: wire.BucketReady, source: Source) -> int:
        """Load it. Returns what this rank's counter comes to when the bucket's memory may be used
        again; 0 if it may now.
        """
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
        if bucket.filled and not assembler.wanted:
            self._queued = True
            return self._counters().queue()
        self._timed("settle", self._settle)
        return 0

    def _direct(self, assembler: Assembler, message: wire.Direct) -> None:
        if isinstance(self.loader, ReplayingLoader):
            # the same places in the same mappings were found good when the key was new
            key = (
                message.digest, self.manifest.digest, self.memories.generation, message.first,
                message.count,
            )  # fmt: skip

            def pieces() -> Sequence[Piece]:
                sources = assembler.regions(message)
                assembler.check(message, sources)
                return assembler.places(message, sources)

            self.loader.replay(key, pieces, on_device=True)
        if assembler.wanted:
            sources = assembler.regions(message)
            assembler.check(message, sources)
            self.loader.load(assembler.views(message, sources))
        # the sender takes nothing back before the report
        self._queued = True

    def _settle(self) -> None:
        """The memory may be used again after this: no copy out of it is still queued."""
        if isinstance(self.loader, ReplayingLoader):
            self.loader.wait()
        if self.memories.device is not None:
            self.memories.device.synchronize()

    def _fail(self, reason: str) -> None:
        with self.lock:
            self.incoming.fail(reason)

"""The loading half of a receiver: buckets off a queue, into the model."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollout_pod.weights import wire
from rollout_pod.weights.assemble import Assembler
from rollout_pod.weights.incoming import Failed, Incoming
from rollout_pod.weights.loader import Loader
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.talking import ERROR_CHARS

log = logging.getLogger(__name__)


class LoadError(Exception):
    """Why a load ends; the message is for the report."""


@dataclass(frozen=True)
class Loading:
    """One load of one session, on the loading thread.

    Args:
        incoming: whose ``work`` is taken; ``lock`` guards it.
        post: sends a message to the session's sender.
        deadline: of ``time.monotonic``.
    """

    incoming: Incoming
    manifest: Manifest
    assembler: Assembler
    loader: Loader
    lock: threading.Lock
    post: Callable[[wire.Message], None]
    deadline: float

    def run(self) -> tuple[int, int]:
        """Load until ``finish``; returns how many tensors and bytes the loader was given.

        Raises:
            LoadError: the session failed, timed out, or is incomplete; or what the loader raised.
        """
        sizes = {tensor.name: tensor.nbytes for tensor in self.manifest.tensors}
        given: set[str] = set()
        while True:
            work = self._next(len(given))
            if isinstance(work, wire.Finish):
                break
            given.update(name for name in self._load(work) if name in sizes)
        if given != sizes.keys():
            raise LoadError(f"{len(given)} tensors were loaded, the manifest has {len(sizes)}")
        return len(given), sum(sizes.values())

    def _next(self, tensors: int) -> "wire.BucketReady | wire.Finish":
        try:
            work = self.incoming.work.get(timeout=max(self.deadline - time.monotonic(), 0))
        except queue.Empty:
            reason = f"timed out after {self.incoming.acked} buckets and {tensors} tensors"
            self._fail(reason)
            raise LoadError(reason) from None
        with self.lock:
            failure = self.incoming.failure
        if failure or isinstance(work, Failed):
            raise LoadError(failure)
        return work

    def _load(self, bucket: "wire.BucketReady") -> list[str]:
        """Load a bucket and acknowledge it, only then; returns the names that it completed."""
        session, seq = self.incoming.session, bucket.seq
        try:
            whole = self.assembler.take(bucket)
            if whole:
                self.loader.load(whole)
        except Exception as error:
            log.exception("bucket %d of session %s failed", seq, session)
            reason = f"bucket {seq}: {type(error).__name__}: {error}"[:ERROR_CHARS]
            self._fail(reason)
            self.post(wire.Ack(session=session, seq=seq, ok=False, error=reason))
            raise LoadError(reason) from error
        with self.lock:
            self.incoming.acked += 1
        self.post(wire.Ack(session=session, seq=seq, ok=True))
        return [name for name, _ in whole]

    def _fail(self, reason: str) -> None:
        with self.lock:
            self.incoming.fail(reason)

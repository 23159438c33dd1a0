"""What a rank knows of the session it was told of: the rules, without sockets."""

import queue
from dataclasses import dataclass, field
from typing import Literal

from rollout_pod.weights.buckets import ALIGN, WINDOW, Account, BucketError
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.wire import BucketReady, Direct, Finish


class OrderError(ValueError):
    """A message that does not belong at this point of a session."""


@dataclass(frozen=True)
class Failed:
    """The session cannot be completed any more."""

    reason: str


Work = BucketReady | Direct | Finish | Failed


@dataclass
class Incoming:
    """One session. Messages come in by the receiver's thread, ``work`` goes out to the loading
    thread; the receiver's lock guards ``phase`` and ``failure``.
    """

    session: str
    peer: bytes
    """The connection that opened it; no other may speak for it."""
    phase: Literal["greeted", "accepted", "loading", "over"] = "greeted"
    failure: str = ""
    manifest: Manifest | None = None
    account: Account = field(default_factory=lambda: Account(()))
    work: "queue.SimpleQueue[Work]" = field(default_factory=queue.SimpleQueue)
    acked: int = 0
    finishing: bool = False
    transport: str = ""
    """Agreed in hello."""
    mode: str = ""
    """How the first bytes came; empty before."""

    def accept(self, manifest: Manifest) -> None:
        """The manifest fits: buckets may come."""
        self.manifest = manifest
        self.account = Account(manifest.tensors)
        self.phase = "accepted"

    def fail(self, reason: str) -> None:
        """Condemn the session; the first reason stays."""
        if not self.failure:
            self.failure = reason
            self.work.put(Failed(reason))

    def bucket(self, message: BucketReady) -> None:
        """Take the next bucket.

        Raises:
            OrderError: no manifest yet, too many in flight, or after ``finish``.
            BucketError: it does not follow from the manifest and the buckets before it.
        """
        self._expect_bytes("bucket")
        if self.account.buckets - self.acked >= WINDOW:
            raise OrderError(f"bucket {message.seq}: {WINDOW} are unacknowledged already")
        if message.base % ALIGN:
            raise BucketError(f"bucket {message.seq}: base {message.base} is not {ALIGN}-aligned")
        self.account.take(message.seq, message.length, message.pieces())
        self.mode = "bucketed"
        self.work.put(message)

    def direct(self, message: Direct) -> None:
        """Take the next tensors, where they lie.

        Args:
            message: with its places.

        Raises:
            OrderError: no manifest yet, or after ``finish``.
            BucketError: the places are not those of the manifest's next tensors.
        """
        self._expect_bytes("direct")
        assert self.manifest is not None  # noqa: S101 - accept() sets both
        if len(message.places) != len(self.manifest.tensors):
            raise BucketError(
                f"direct: {len(message.places)} places for {len(self.manifest.tensors)} tensors"
            )
        self.account.take_whole(message.first, message.count)
        self.mode = "direct"
        self.work.put(message)

    def finish(self, message: Finish) -> None:
        """Take the end.

        Raises:
            OrderError: not now.
            BucketError: something is missing, or the sums differ.
        """
        self._expect_bytes("finish")
        manifest = self.manifest
        assert manifest is not None  # noqa: S101 - accept() sets both
        missing = self.account.missing()
        if missing:
            raise BucketError(
                f"finish: {len(missing)} of {len(manifest.tensors)} tensors are not complete, "
                f"the first is {missing[0]!r}"
            )
        said = (message.buckets, message.tensors, message.bytes)
        counted = (self.account.buckets, len(manifest.tensors), self.account.nbytes)
        if said != counted:
            raise BucketError(
                f"finish: buckets, tensors, bytes are {counted} here and {said} at the sender"
            )
        self.finishing = True
        self.work.put(message)

    def _expect_bytes(self, what: str) -> None:
        if self.failure:
            raise OrderError(f"{what}: the session is over: {self.failure}")
        if self.phase not in ("accepted", "loading"):
            raise OrderError(f"{what}: the session is {self.phase}")
        if self.finishing:
            raise OrderError(f"{what}: after finish")

"""The sending end: one session with all ranks of an engine.

Synchronous, for one thread at a time (not always the same one). Every wait has a deadline, and a
rank that dies or freezes ends the session within about two seconds.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import zmq

from rollout_pod.weights import wire
from rollout_pod.weights.buckets import WINDOW, Bucket
from rollout_pod.weights.manifest import Manifest, shorten
from rollout_pod.weights.peer import RankPeer
from rollout_pod.weights.progress import Counters, look_out, watch
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.segment import PUSH_PREFIX, Segment, remove_orphans
from rollout_pod.weights.session_errors import ManifestError, RanksError, TransferFailed

TICK_S: Final = 0.1
"""How soon a cancelled session notices."""
LAST_WORDS_S: Final = 1.0
"""How long a failed session waits for the other ranks' reports."""
TOKEN_BYTES: Final = 16
CONNECT_S: Final = 2.0
"""How long a rank may take to be there at all."""


Show = Callable[[Manifest, "wire.Direct | None"], None]
Meanwhile = Callable[[Show], None]


@dataclass
class Session:
    """One version on its way to all ranks: ``greet``, ``offer``, ``push``..., ``finish``.

    Args:
        session: unique among all sessions of these ranks.
        paths: the ranks' sockets, ordered by global rank; all of the engine's.
        shm_dir: the memory that is shared with the ranks.
        cancel: when set, whatever waits raises.
        prefix: of the names of segments that are made.
        ranks: global numbers of the ranks behind ``paths``, where several senders serve one
            session, each its own ranks; None if these are all.
        world: how many ranks there are in all; 0 if these are all.
    """

    session: str
    paths: Sequence[Path]
    shm_dir: Path
    cancel: threading.Event = field(default_factory=threading.Event)
    prefix: str = PUSH_PREFIX
    ranks: Sequence[int] | None = None
    world: int = 0
    transport: wire.Transport = field(default="shared_memory", init=False)
    """Agreed in ``greet``."""
    reason: str = field(default="", init=False)
    """Why it is not a faster one."""
    _ranks: list[RankPeer] = field(default_factory=list, init=False)
    _sent: int = field(default=0, init=False)
    _manifest: Manifest | None = field(default=None, init=False)
    _held: frozenset[str] = field(default=frozenset(), init=False)
    """Digests that every rank remembered when it was last heard of."""
    _early: str = field(default="", init=False)
    """The digest of a manifest that was shown before the welcome."""
    _mapped: tuple[object, str] = field(default=(None, ""), init=False)
    """What ``map`` was asked for last, and its digest."""
    uncounted: str = field(default="", init=False)
    """Why the ranks cannot use the counters of the last ``map``; empty if they can."""
    unpinned: str = field(default="", init=False)
    """Why they cannot pin its segments."""

    def __post_init__(self) -> None:
        if not self.paths:
            raise RanksError("no rank sockets are given", retryable=False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            numbers = range(len(self.paths)) if self.ranks is None else self.ranks
            world = self.world or len(self.paths)
            for rank, path in zip(numbers, self.paths, strict=True):
                peer = RankPeer.connect(
                    self._context, session=self.session, rank=rank, world=world, path=path
                )
                self._ranks.append(peer)
        except ValueError as error:
            self.close()
            raise RanksError(str(error), retryable=False) from error

    # --- the steps ---

    def renew(self, session: str) -> None:
        """Begin another session on the same connections, once this one has succeeded."""
        self.session = session
        self._sent = 0
        self._manifest = None
        self._early = ""
        for rank in self._ranks:
            rank.renew(session)

    def greet(
        self,
        timeout_s: float,
        probe: Segment | None = None,
        *,
        device: tuple[wire.DeviceProbe, bytes] | None = None,
        fallback: bool = False,
        reason: str = "",
        meanwhile: Meanwhile | None = None,
    ) -> None:
        """Say hello to all ranks and agree on how bytes travel: ``transport``, ``reason``.

        Args:
            timeout_s: for all ranks to answer.
            probe: a segment by which they are to see that the memory is shared. Without one a
                page is made for it, for which there may be no room beside full segments.
            device: ask for CUDA IPC: where the token lies, and the token.
            fallback: whether it may be shared memory if some rank cannot open ``device``.
            reason: why ``device`` is not asked for, where it might be.
            meanwhile: called once while the ranks are asked, with a function that shows them a
                manifest at once, if they know it, which saves ``offer`` an answer's time.

        Raises:
            RanksError: a rank is not there, refuses, or does not see the memory.
            RoomError: no room for the page.
        """
        self.reason = reason
        if device is not None:
            where, token = device
            self._hello(
                "cuda_ipc", token, tolerant=fallback, timeout_s=timeout_s, device=where,
                meanwhile=meanwhile,
            )  # fmt: skip
            meanwhile = None
            unfit = [f"rank {rank.rank}: {rank.unfit}" for rank in self._ranks if rank.unfit]
            if not unfit:
                return
            self.reason = "; ".join(shorten(unfit, 4))
        own: Segment | None = None
        if probe is None:
            remove_orphans(self.shm_dir, self.prefix)  # they may be all of the memory
            name = f"{self.prefix}probe-{secrets.token_hex(8)}"
            probe = own = Segment.create(self.shm_dir, name, TOKEN_BYTES)
            own.map[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
        try:
            token = probe.map[:TOKEN_BYTES]
            self._hello(
                "shared_memory", token, timeout_s=timeout_s, probe=probe.name, meanwhile=meanwhile
            )
        finally:
            if own is not None:
                own.close()
        if device is not None:
            # answers to what was shown with the first hello came before the welcome to the second
            self._early = ""
            for rank in self._ranks:
                rank.accepted = rank.placed = rank.early = False
                rank.problems = ()

    def _hello(
        self,
        transport: wire.Transport,
        token: bytes,
        *,
        timeout_s: float,
        tolerant: bool = False,
        probe: str | None = None,
        device: wire.DeviceProbe | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> None:
        self.transport = transport
        for rank in self._ranks:
            hello = wire.Hello(
                session=self.session, rank=rank.rank, world=rank.world, transport=transport,
                token=token, probe=probe, device=device,
            )  # fmt: skip
            rank.ask(hello, tolerant=tolerant)
        if meanwhile is not None:
            meanwhile(self._show_early)
        self._wait_ranks(
            lambda rank: rank.welcome is not None or bool(rank.unfit), timeout_s, "hello"
        )
        self._held = self.holds

    def _show_early(self, manifest: Manifest, first: wire.Direct | None) -> None:
        if manifest.digest in self._held:
            self._early = manifest.digest
            message = wire.Offer.of(self.session, manifest, held=self._held, first=first)
            for rank in self._ranks:
                rank.early = True
                rank.send(message)

    @property
    def holds(self) -> frozenset[str]:
        """Digests that every rank remembers."""
        held = [set(rank.welcome.holds) if rank.welcome else set() for rank in self._ranks]
        return frozenset(set.intersection(*held))

    def map(
        self,
        timeout_s: float,
        *,
        device: Sequence[tuple[str, bytes, int]] = (),
        segments: Sequence[str] = (),
        counters: str | None = None,
    ) -> None:
        """Let all ranks map this sender's memory, and nothing else of it, for this session and
        later ones; after ``greet``. Regions of a GPU are (name, handle, bytes), ``counters`` a
        page as in ``progress``. Ranks that have it all mapped are not asked again.

        Raises:
            RanksError: a rank cannot, is lost or does not answer.
        """
        if self.maps(device=device, segments=segments, counters=counters):
            return
        what = (tuple(device), tuple(segments), counters)
        message = wire.Memory(
            session=self.session, device=what[0], segments=what[1], counters=counters
        )
        self._mapped = (what, message.digest)
        for rank in self._ranks:
            rank.mapped = None
            rank.send(message)
        self._wait_ranks(lambda rank: rank.mapped is not None, timeout_s, "memory")
        answers = [(rank.rank, rank.mapped) for rank in self._ranks if rank.mapped is not None]
        self.uncounted = _said((rank, mapped.uncounted) for rank, mapped in answers)
        self.unpinned = _said((rank, mapped.unpinned) for rank, mapped in answers)

    def maps(
        self,
        *,
        device: Sequence[tuple[str, bytes, int]] = (),
        segments: Sequence[str] = (),
        counters: str | None = None,
    ) -> bool:
        """Whether all ranks have exactly this mapped, by the last ``map``."""
        # thousands of handles are neither checked nor hashed again where they are the last ones
        what = (tuple(device), tuple(segments), counters)
        return what == self._mapped[0] and self._mapped[1] in self.holds

    def direct(self, message: wire.Direct) -> None:
        """Let all ranks read tensors where they lie; instead of buckets. Ranks that took the first
        ones with the manifest are not told of them again.
        """
        for rank in self._ranks:
            if message.first or not rank.placed:
                rank.send(message)
        self._sent += 1
        self._held |= {message.digest}

    def offer(self, manifest: Manifest, timeout_s: float, first: wire.Direct | None = None) -> None:
        """Show the manifest to all ranks, before any byte.

        Args:
            manifest: of the version.
            timeout_s: for all ranks to answer.
            first: what ``direct`` will be called with first: ranks that know the places take it
                with the manifest, so that a load needs to wait for no message.

        Raises:
            ManifestError: with the problems of all ranks.
            RanksError: a rank refuses, is lost or does not answer.
        """
        self._manifest = manifest
        message = wire.Offer.of(self.session, manifest, held=self.holds, first=first)
        asked: set[int] = set()

        def answered(rank: RankPeer) -> bool:
            # one that refused to be shown it early has said so by now, or will
            if rank.rank not in asked and not (rank.early and self._early == manifest.digest):
                asked.add(rank.rank)
                rank.send(message)
            return rank.accepted or bool(rank.problems)

        self._wait_ranks(answered, timeout_s, "manifest")
        said: dict[str, list[int]] = {}
        for rank in self._ranks:
            for problem in rank.problems:
                said.setdefault(problem, []).append(rank.rank)
        if said:
            raise ManifestError([_who(who, len(self._ranks)) + what for what, who in said.items()])
        self._held |= {manifest.digest}

    def check(self) -> None:
        """Look whether all ranks are still there, without waiting.

        Raises:
            RanksError: one is not.
        """
        self._pump(0)
        trouble = self._trouble()
        if trouble:
            raise RanksError(trouble)

    def reserve(self, deadline: float, counters: Counters | None = None) -> None:
        """Wait until fewer than two buckets are unacknowledged by any rank, and copied as far as
        ``counters`` tell: the memory of the one before the last is free then.

        Raises:
            TransferFailed: see ``finish``.
        """
        self._left(deadline)  # ranks that are never waited for hide a cancel, else
        self._wait(lambda: self._sent - min(r.acked for r in self._ranks) < WINDOW, deadline)
        before = self._sent - WINDOW
        if counters is None or before < 0:
            return
        wanted = [(rank.rank + 1, rank.copied[before]) for rank in self._ranks]

        def check() -> None:
            self._pump(0)
            trouble = self._trouble()
            if trouble:
                self._give_up(trouble)
            self._left(deadline)

        watch(lambda: all(counters.read(which) >= count for which, count in wanted if count), check)

    def push(self, bucket: Bucket, *, segment: str, base: int, filled: int = 0) -> None:
        """Announce a bucket whose bytes lie at ``base`` of ``segment`` when the sender's counter
        has come to ``filled``; after ``reserve``.
        """
        message = wire.BucketReady.of(self.session, bucket, segment, base, filled)
        for rank in self._ranks:
            rank.send(message)
        self._sent += 1

    def finish(self, deadline: float) -> tuple[LoadReport, ...]:
        """Wait for all acknowledgements and for the report of every rank.

        Raises:
            TransferFailed: a rank reports an error, is lost or late, or the session is cancelled;
                all ranks have been told to give up.
        """
        manifest = self._manifest
        if manifest is None:
            raise TransferFailed("finish: no manifest was offered")
        message = wire.Finish(
            session=self.session, buckets=self._sent, tensors=len(manifest.tensors),
            bytes=manifest.nbytes,
        )  # fmt: skip
        # one of several ranks must not end before all have everything; one alone takes it when it
        # has loaded what came before
        if any(rank.world > 1 for rank in self._ranks):
            self._wait(lambda: all(rank.acked == self._sent for rank in self._ranks), deadline)
        for rank in self._ranks:
            rank.send(message)

        def reported() -> bool:
            return all(r.report is not None and r.acked == self._sent for r in self._ranks)

        if self.transport == "cuda_ipc":
            self._look_out(reported, deadline)
        self._wait(reported, deadline)
        for rank in self._ranks:
            report = rank.report
            if report is None or (report.tensors, report.bytes, report.version) != (
                len(manifest.tensors), manifest.nbytes, manifest.version,
            ):  # fmt: skip
                self._give_up(f"rank {rank.rank} loaded something else: {report}")
        return self._reports()

    def abort(self, reason: str) -> None:
        """Tell all ranks that are still there to give up. Idempotent."""
        for rank in self._ranks:
            if not rank.lost and rank.report is None:
                rank.send(wire.Abort(session=self.session, reason=reason[:4000]))

    def close(self) -> None:
        """Close the connections. Idempotent; ranks that are loading see it as a lost sender."""
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()
        self._context.term()

    # --- waiting ---

    def _wait_ranks(self, done: Callable[[RankPeer], bool], timeout_s: float, what: str) -> None:
        started = time.monotonic()
        while not all(done(rank) for rank in self._ranks):
            trouble = self._trouble()
            if trouble:
                raise RanksError(trouble, retryable=self._may_heal())
            if self.cancel.is_set():
                raise RanksError(f"{what}: cancelled")
            waited = time.monotonic() - started
            late = [rank for rank in self._ranks if not done(rank)]
            absent = [rank for rank in late if not rank.connected]
            if absent and waited > min(CONNECT_S, timeout_s):
                where = ", ".join(str(rank.path) for rank in absent)
                raise RanksError(f"nobody listens on {where}: is the engine up?")
            if waited > timeout_s:
                numbers = ", ".join(str(rank.rank) for rank in late)
                raise RanksError(f"{what}: no answer from rank {numbers} within {timeout_s} s")
            self._pump(TICK_S)

    def _wait(self, done: Callable[[], bool], deadline: float) -> None:
        while True:
            trouble = self._trouble()
            if trouble:
                self._give_up(trouble)
            if done():
                return
            self._pump(min(TICK_S, self._left(deadline)))

    def _look_out(self, done: Callable[[], bool], deadline: float) -> None:
        def seen() -> bool:
            for rank in self._ranks:
                rank.receive()
            return done() or bool(self._trouble())

        def check() -> None:
            self._left(deadline)

        look_out(seen, check)

    def _left(self, deadline: float) -> float:
        """Seconds that may still be waited; gives up where there are none, or if cancelled."""
        if self.cancel.is_set():
            self._give_up("cancelled")
        left = deadline - time.monotonic()
        if left <= 0:
            late = [str(r.rank) for r in self._ranks if r.report is None]
            acked = min(rank.acked for rank in self._ranks)
            self._give_up(
                f"timed out; {acked} of {self._sent} buckets sent are loaded, "
                f"rank {', '.join(late)} did not report"
            )
        return left

    def _give_up(self, reason: str) -> NoReturn:
        self.abort(reason)
        end = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < end and any(not r.lost and r.report is None for r in self._ranks):
            self._pump(TICK_S)
        # the first sign may be a rank that refuses the next bucket; its report has the cause
        raise TransferFailed(self._trouble() or reason, self._reports())

    def _reports(self) -> tuple[LoadReport, ...]:
        return tuple(rank.report for rank in self._ranks if rank.report is not None)

    def _trouble(self) -> str:
        """What a rank says of itself goes before what this side noticed."""
        found = [rank.trouble for rank in self._ranks if rank.trouble]
        return "; ".join(shorten(found, 4))

    def _may_heal(self) -> bool:
        codes = {rank.refused.code for rank in self._ranks if rank.refused is not None}
        return codes <= {"busy", "stale", "not_ready", "internal"}

    def _pump(self, timeout_s: float) -> None:
        """Wait once for anything, then take all that is there."""
        poller = zmq.Poller()
        for rank in self._ranks:
            poller.register(rank.socket, zmq.POLLIN)
            poller.register(rank.monitor, zmq.POLLIN)
        poller.poll(int(max(timeout_s, 0) * 1000))
        for rank in self._ranks:
            rank.receive()


def _said(words: Iterable[tuple[int, str]]) -> str:
    return "; ".join(shorten([f"rank {rank}: {text}" for rank, text in words if text], 4))


def _who(ranks: Sequence[int], world: int) -> str:
    """Which ranks say something; empty if all do."""
    if len(ranks) == world:
        return ""
    return f"rank {', '.join(str(rank) for rank in ranks)}: "

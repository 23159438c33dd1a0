"""One session in the agent: read, introduce, send, end."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollout_pod.weights.agent_wire import Stage
from rollout_pod.weights.buckets import Plan, make_plan
from rollout_pod.weights.checkpoint import Checkpoint
from rollout_pod.weights.contents import known_sums, sample
from rollout_pod.weights.headers import SourceError
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.reading import HangError, Readers
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import TransferFailed
from rollout_pod.weights.slots import Slot, SlotKey, Slots
from rollout_pod.weights.source_kinds import FolderSource, Source, source_of, verify_all

log = logging.getLogger(__name__)

LOOK_S: Final = 3.0
"""How long the source of a version that is at hand may take to say that it has not changed."""


@dataclass(frozen=True)
class StagedResult:
    """What was staged, in how many seconds."""

    nbytes: int
    tensors: int
    seconds: float
    sample: str
    """See ``contents.sample``."""
    sums: str
    """See ``contents.known_sums``."""


@dataclass(frozen=True)
class SentResult:
    """What was sent, in how many seconds, and every rank's report."""

    nbytes: int
    seconds: float
    reports: tuple[LoadReport, ...]


@dataclass
class Job:
    """A session from ``stage`` to its end. Methods run on the agent's loop; ranks and memory are
    waited for on threads, which ``cancel`` ends within a tick; files on those of ``readers``,
    which are left behind if they hang.
    """

    request: Stage
    shm_dir: Path
    prefix: str
    slots: Slots
    readers: Readers
    cancel: threading.Event = field(default_factory=threading.Event)
    slot: Slot | None = None
    read_bytes: int = 0
    total_bytes: int = 0
    stage_task: "asyncio.Task[StagedResult] | None" = None
    send_task: "asyncio.Task[SentResult] | None" = None
    _session: Session | None = None
    _plan: Plan | None = None
    _expired: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def staged(self) -> bool:
        """``stage`` has succeeded."""
        task = self.stage_task
        return task is not None and task.done() and not task.cancelled() and not task.exception()

    async def stage(self, before: "Callable[[float], asyncio.Future[None]]") -> StagedResult:
        """Everything up to the accepted manifest and the last byte in shared memory.

        Args:
            before: ends the sessions before this one, given the seconds it may take.

        Raises:
            SourceError, RoomError, SessionError: as they say; TimeoutError.
        """
        started = time.monotonic()
        timeout = self.request.timeout
        expiry = asyncio.get_running_loop().call_later(timeout, self._expire)
        try:
            await before(timeout)
            return await self._stage(started)
        except BaseException as error:
            await self.end(f"staging failed: {error}")
            if self._expired:
                raise TimeoutError(f"stage: not done within {timeout} s: {error}") from error
            raise
        finally:
            expiry.cancel()

    async def _stage(self, started: float) -> StagedResult:
        request = self.request
        source = source_of(request.path)
        checkpoint, held = await self._look(source)
        manifest = (
            checkpoint.manifest(request.version)
            if checkpoint
            else Manifest(request.version, held.tensors if held else ())
        )
        self.total_bytes = manifest.nbytes
        plan = self._plan = make_plan(manifest.tensors, request.bucket_bytes)
        left = started + request.timeout - time.monotonic()
        session = self._session = Session(
            request.session, [Path(rank) for rank in request.ranks], self.shm_dir,
            self.cancel, self.prefix,
        )  # fmt: skip
        await asyncio.to_thread(session.greet, left, self.slots.probe)
        await asyncio.to_thread(session.offer, manifest, left)
        if checkpoint is None:
            self.slot = held
        else:
            key = SlotKey(request.version, source.where, checkpoint.fingerprint)
            self.slot = slot = await asyncio.to_thread(self.slots.obtain, key, plan.nbytes)
            if not slot.ready:
                slot.tensors = manifest.tensors
                await self._fill(source, checkpoint, plan, slot)
                slot.ready = True
        self.read_bytes = manifest.nbytes
        # a rank with a GPU pins what it maps, now and not while the gate is closed
        segments = [slot.segment.name for slot in self.slots.all if slot.ready]
        left = started + request.timeout - time.monotonic()
        await asyncio.to_thread(session.map, left, segments=segments)
        await asyncio.to_thread(session.check)
        return StagedResult(
            manifest.nbytes, len(manifest.tensors), time.monotonic() - started,
            sample=await asyncio.to_thread(self._sample, manifest, plan),
            sums=known_sums(checkpoint) if checkpoint else "",
        )  # fmt: skip

    def _sample(self, manifest: Manifest, plan: Plan) -> str:
        if self.slot is None:
            raise RuntimeError("nothing was staged")
        with memoryview(self.slot.segment.map) as memory:
            return sample(memory, manifest.tensors, plan.offsets)

    async def _look(self, source: Source) -> "tuple[Checkpoint | None, Slot | None]":
        """The source's headers; or, where it cannot be read and asks for the committed version, the
        slot that holds that one.
        """
        held = self.slots.held(self.request.version, source.where)
        cancel = self.cancel if held is None else _Either(self.cancel)
        expiry = asyncio.get_running_loop().call_later(
            LOOK_S if held else self.request.timeout, cancel.set
        )
        try:
            found = await self.readers.run(
                lambda: source.open(cancel), path=source.where, cancel=cancel
            )
        except SourceError as error:
            if held is None or self.cancel.is_set():
                raise
            log.warning("%s; the committed version is sent from memory", error)
            return None, held
        finally:
            expiry.cancel()
        return found, None

    async def _fill(self, source: Source, checkpoint: Checkpoint, plan: Plan, slot: Slot) -> None:
        """Read all that the slot lacks, and compare it with the hashes that are known."""

        def read() -> None:
            with memoryview(slot.segment.map) as target:
                source.read(
                    checkpoint, target, plan.offsets, done=slot.done, progress=self._count,
                    cancel=self.cancel,
                )  # fmt: skip

        def verify() -> None:
            with memoryview(slot.segment.map) as target:
                verify_all(checkpoint, target, plan.offsets, self.cancel)

        try:
            await self.readers.run(read, path=source.where, cancel=self.cancel)
        except HangError:
            # the kernel copes with memory that is gone, our own code that copies does not
            give_up = self.slots.withdraw if isinstance(source, FolderSource) else self.slots.drop
            give_up(slot)
            self.slot = None
            raise
        try:
            await self.readers.run(verify, path=source.where, cancel=self.cancel)
        except SourceError as error:
            if not self.cancel.is_set():
                slot.done.clear()
            if isinstance(error, HangError):
                self.slots.drop(slot)
                self.slot = None
            raise

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.read_bytes += nbytes

    def _expire(self) -> None:
        self._expired = True
        self.cancel.set()

    async def send(self, timeout: float) -> SentResult:
        """Stream the buckets and collect every rank's report. Ends the session, also on success.

        Raises:
            TransferFailed: as it says.
        """
        try:
            return await asyncio.to_thread(self._send, timeout)
        finally:
            await self.end("the sender has ended")

    def _send(self, timeout: float) -> SentResult:
        session, plan, slot = self._session, self._plan, self.slot
        if session is None or plan is None or slot is None or self.cancel.is_set():
            raise TransferFailed("the session has ended; stage it again")
        started = time.monotonic()
        deadline = started + timeout
        for bucket in plan.buckets:
            session.reserve(deadline)
            session.push(bucket, segment=slot.segment.name, base=bucket.start)
        reports = session.finish(deadline)
        return SentResult(self.total_bytes, time.monotonic() - started, reports)

    async def stop(self, timeout: float) -> bool:
        """End it from outside; False if it has not ended within ``timeout`` seconds."""
        self.cancel.set()
        tasks = {task for task in (self.stage_task, self.send_task) if task is not None}
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=timeout)
            if pending:
                return False
        await self.end("the session was ended")
        return True

    async def end(self, reason: str) -> None:
        """Tell the ranks and close the connections; an unfinished slot is given up, unless a later
        read can go on from what it holds. Idempotent.
        """
        self.cancel.set()
        session, self._session = self._session, None
        if session is not None:
            await asyncio.to_thread(_hang_up, session, reason)
        if self.slot is not None and not (self.slot.ready or self.slot.done):
            self.slots.drop(self.slot)
            self.slot = None


class _Either(threading.Event):
    """Set when it is set, or another."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()


def _hang_up(session: Session, reason: str) -> None:
    session.abort(reason)
    session.close()

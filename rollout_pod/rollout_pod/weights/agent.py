"""The weights agent: a process that brings versions into shared memory and to the ranks."""

import asyncio
import fcntl
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.asyncio

from rollout_pod.weights import agent_wire, transport
from rollout_pod.weights.headers import SourceError
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.segment import RoomError
from rollout_pod.weights.sender import ManifestError, RanksError, TransferFailed
from rollout_pod.weights.slots import Slots
from rollout_pod.weights.staging import Job, StagedResult
from rollout_pod.weights.wire import Message, Report, WireError, encode, unpack

log = logging.getLogger(__name__)

SOCKET: Final = "agent.sock"
"""In the run directory."""
PROGRESS_S: Final = 0.5
STOP_S: Final = 5.0


class AgentError(Exception):
    """The agent cannot start; the message says why."""


async def run_agent(run_dir: Path, shm_dir: Path, host_memory: int, stop: asyncio.Event) -> None:
    """Serve ``<run_dir>/agent.sock`` until ``stop`` is set, then remove all segments.

    Args:
        run_dir: shared with the engine's container; one agent at a time.
        shm_dir: the shared memory, mounted at the same place in the engine's container.
        host_memory: bytes that all segments together may take.
        stop: ends it.

    Raises:
        AgentError: another agent holds ``run_dir``, or a folder is missing.
    """
    identity, lock = _hold(run_dir, shm_dir)
    try:
        agent = _Agent(shm_dir, f"rollout-{identity}-", host_memory)
        await agent.serve(run_dir / SOCKET, stop)
    finally:
        os.close(lock)


def _hold(run_dir: Path, shm_dir: Path) -> tuple[str, int]:
    """Lock the run directory; its random id tells its segments from those of others that share
    the memory.
    """
    if not shm_dir.is_dir():
        raise AgentError(f"--shm-dir {shm_dir}: no such folder; mount a memory volume there")
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(run_dir / "agent.id", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        identity = os.read(lock, 64).decode("ascii", "replace").strip()
        if not identity.isalnum():
            identity = secrets.token_hex(6)
            os.ftruncate(lock, 0)
            os.pwrite(lock, identity.encode(), 0)
    except BlockingIOError:
        os.close(lock)
        raise AgentError(f"--run-dir {run_dir}: another agent runs there") from None
    except BaseException:
        os.close(lock)
        raise
    return identity, lock


@dataclass(frozen=True)
class _Caller:
    """Who asked, and under which number."""

    socket: zmq.asyncio.Socket
    peer: bytes
    id: int

    async def tell(self, message: Message) -> None:
        """Send; whoever is gone is not told."""
        try:
            await self.socket.send_multipart([self.peer, encode(message)])
        except zmq.ZMQError as error:
            log.warning("an answer could not be sent: %s", error.strerror)


class _Agent:
    def __init__(self, shm_dir: Path, prefix: str, host_memory: int) -> None:
        self._shm_dir = shm_dir
        self._prefix = prefix
        self._host_memory = host_memory
        self._boot = secrets.token_hex(8)
        self._slots = Slots(shm_dir, prefix, host_memory)
        if self._slots.stale:
            log.info("removed %d segments of an agent before", len(self._slots.stale))
        self._jobs: dict[str, Job] = {}
        self._latest = ""
        self._requests: set[asyncio.Task[None]] = set()

    async def serve(self, path: Path, stop: asyncio.Event) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        stopped = asyncio.create_task(stop.wait())
        try:
            transport.tune(socket)
            transport.bind(socket, path)
            log.info("the weights agent listens on %s", path)
            while not stop.is_set():
                receive = asyncio.ensure_future(socket.recv_multipart())
                await asyncio.wait({receive, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not receive.done():
                    receive.cancel()
                    await asyncio.wait({receive})
                    break
                self._accept(socket, receive.result())
        finally:
            stopped.cancel()
            await asyncio.wait({stopped})
            for job in self._jobs.values():
                if not await job.stop(STOP_S):
                    log.error("session %s did not end within %s s", job.request.session, STOP_S)
            if self._requests:
                await asyncio.wait(self._requests, timeout=STOP_S)
            self._slots.close()
            context.destroy(linger=int(STOP_S * 1000))
            transport.remove_socket(path)

    def _accept(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        task = asyncio.create_task(self._request(socket, frames))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _request(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        peer, raw = frames[0], frames[-1]
        try:
            request = agent_wire.decode_to_agent(raw)
        except WireError as error:
            caller = _Caller(socket, peer, _id_of(raw))
            await caller.tell(_failed(caller.id, "protocol", str(error), retryable=False))
            return
        caller = _Caller(socket, peer, request.id)
        try:
            reply = await self._answer(caller, request)
        except Exception as error:
            reply = _failure(request, error)
        if isinstance(reply, agent_wire.Failed):
            log.warning("%s: %s: %s", request.kind, reply.error, reply.message)
        await caller.tell(reply)

    async def _answer(self, caller: _Caller, request: agent_wire.ToAgent) -> agent_wire.Reply:
        if isinstance(request, agent_wire.Stage):
            return await self._stage(caller, request)
        if isinstance(request, agent_wire.Send):
            return await self._send(request)
        if isinstance(request, agent_wire.Committed):
            return self._commit(request)
        if isinstance(request, agent_wire.Discard):
            return await self._discard(request)
        return self._status(request)

    async def _stage(self, caller: _Caller, request: agent_wire.Stage) -> agent_wire.Reply:
        job = self._jobs.get(request.session)
        task = job.stage_task if job is not None else None
        if job is None or task is None or (task.done() and not job.staged):
            job, task = self._start(request)
        elif not _same(job.request, request):
            text = f"session {request.session!r} was staged with other contents; use a new id"
            return _failed(request.id, "session", text, retryable=False)
        while True:
            await asyncio.wait({task}, timeout=PROGRESS_S)
            if task.done():
                break
            await caller.tell(
                agent_wire.Progress(id=request.id, bytes=job.read_bytes, total=job.total_bytes)
            )
        result = task.result()
        return agent_wire.StagedReply(
            id=request.id, bytes=result.nbytes, tensors=result.tensors, seconds=result.seconds,
            transport="shared_memory",
        )  # fmt: skip

    def _start(self, request: agent_wire.Stage) -> "tuple[Job, asyncio.Task[StagedResult]]":
        others = list(self._jobs.values())
        job = Job(request, self._shm_dir, self._prefix, self._slots)
        self._jobs[request.session] = job
        self._latest = request.session
        task = job.stage_task = asyncio.create_task(
            job.stage(lambda left: asyncio.ensure_future(self._end_all(others, left)))
        )
        return job, task

    async def _end_all(self, jobs: list[Job], timeout: float) -> None:
        for job in jobs:
            if not await job.stop(timeout):
                raise SourceError(
                    f"{job.request.path}: reading it for session {job.request.session!r} hangs; "
                    "is its file system reachable?",
                    retryable=True,
                )
            if self._jobs.get(job.request.session) is job:
                del self._jobs[job.request.session]

    async def _send(self, request: agent_wire.Send) -> agent_wire.Reply:
        job = self._jobs.get(request.session)
        if job is None or not job.staged:
            return _unknown(request.id, request.session, "staged")
        if job.send_task is None:
            job.send_task = asyncio.create_task(job.send(request.timeout))
        await asyncio.wait({job.send_task})
        result = job.send_task.result()
        return agent_wire.SentReply(
            id=request.id, bytes=result.nbytes, seconds=result.seconds,
            ranks=_reports(request.session, result.reports),
        )  # fmt: skip

    def _commit(self, request: agent_wire.Committed) -> agent_wire.Reply:
        job = self._jobs.get(request.session)
        task = job.send_task if job is not None else None
        if job is None or job.slot is None or task is None or not task.done() or task.exception():
            return _unknown(request.id, request.session, "sent")
        self._slots.commit(job.slot)
        return agent_wire.Done(id=request.id)

    async def _discard(self, request: agent_wire.Discard) -> agent_wire.Reply:
        job = self._jobs.get(request.session)
        if job is not None:
            await job.stop(STOP_S)
            if job.slot is not None and self._jobs.get(request.session) is job:
                self._slots.drop(job.slot)
        return agent_wire.Done(id=request.id)

    def _status(self, request: agent_wire.Status) -> agent_wire.Reply:
        held = tuple(
            agent_wire.HeldSlot(
                version=slot.key.version, path=slot.key.path, bytes=slot.segment.size,
                ready=slot.ready, committed=slot is self._slots.committed,
            )
            for slot in self._slots.all
        )  # fmt: skip
        return agent_wire.StatusReply(
            id=request.id, boot=self._boot, session=self._latest, used=self._slots.used,
            host_memory=self._host_memory, slots=held,
        )  # fmt: skip


def _same(one: agent_wire.Stage, other: agent_wire.Stage) -> bool:
    left, right = (r.model_dump(exclude={"id", "timeout"}) for r in (one, other))
    return bool(left == right)


def _id_of(raw: bytes) -> int:
    """The number of a request that could not be read otherwise; 0 if even that is missing."""
    try:
        number: Any = unpack(raw).get("id")
    except WireError:
        return 0
    return number if type(number) is int and 0 <= number < 1 << 63 else 0


def _reports(session: str, reports: tuple[LoadReport, ...]) -> tuple[Report, ...]:
    return tuple(Report.of(session, report) for report in reports)


def _failed(id: int, error: Any, message: str, *, retryable: bool) -> agent_wire.Failed:
    return agent_wire.Failed(id=id, error=error, message=message[:8000], retryable=retryable)


def _unknown(id: int, session: str, what: str) -> agent_wire.Failed:
    text = f"session {session!r} is not {what} here; stage it again"
    return _failed(id, "session", text, retryable=True)


def _failure(request: agent_wire.ToAgent, error: Exception) -> agent_wire.Failed:
    """The answer that an exception stands for."""
    id, text = request.id, str(error) or type(error).__name__
    if isinstance(error, SourceError):
        return _failed(id, "source", text, retryable=error.retryable)
    if isinstance(error, RoomError):
        return _failed(id, "room", text, retryable=error.retryable)
    if isinstance(error, ManifestError):
        return _failed(id, "manifest", text, retryable=False)
    if isinstance(error, RanksError):
        return _failed(id, "ranks", text, retryable=error.retryable)
    if isinstance(error, TransferFailed) and isinstance(request, agent_wire.Send):
        reports = _reports(request.session, error.reports)
        return agent_wire.Failed(
            id=id, error="transfer", message=text[:8000], retryable=True, ranks=reports
        )
    if isinstance(error, TimeoutError):
        return _failed(id, "timeout", text, retryable=True)
    log.error("a request failed", exc_info=error)
    return _failed(id, "internal", f"{type(error).__name__}: {text}", retryable=True)

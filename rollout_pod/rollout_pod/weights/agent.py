"""The weights agent: a process that brings versions into shared memory and to the ranks."""

import asyncio
import fcntl
import logging
import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import zmq
import zmq.asyncio

from rollout_pod.weights import agent_wire, transport
from rollout_pod.weights.agent_failures import failed, failure, reports, unknown
from rollout_pod.weights.reading import Readers
from rollout_pod.weights.segment import PUSH_PREFIX, remove_orphans
from rollout_pod.weights.slots import Slots
from rollout_pod.weights.staging import Job, StagedResult
from rollout_pod.weights.wire import Message, WireError, encode, unpack

log = logging.getLogger(__name__)

SOCKET: Final = "agent.sock"
"""In the run directory."""
PROGRESS_S: Final = 0.5
DISCARD_S: Final = 5.0
STOP_S: Final = 2.0
"""A stopped agent ends after this, whatever hangs."""
LINGER_S: Final = 0.5
"""The last answers have to get out."""
HUNG_MAX: Final = 8
"""So many reads may hang at a time; each keeps threads and addresses. One more than that and the
process ends, to be started afresh.
"""


class AgentError(Exception):
    """The agent cannot start; the message says why."""


async def run_agent(run_dir: Path, shm_dir: Path, host_memory: int, stop: asyncio.Event) -> None:
    """Serve ``<run_dir>/agent.sock`` until ``stop`` is set, then remove all segments.

    Ends the process, with code 0, where a thread hangs that the interpreter would wait for; with
    code 1, and before ``stop``, when ``HUNG_MAX`` reads hang.

    Args:
        run_dir: shared with the engine's container; one agent at a time.
        shm_dir: the shared memory, mounted at the same place in the engine's container.
        host_memory: bytes that all segments together may take.
        stop: ends it.

    Raises:
        AgentError: another agent holds ``run_dir``, or a folder is missing or cannot be used.
    """
    try:
        identity, lock = _hold(run_dir, shm_dir)
    except OSError as error:
        raise AgentError(f"--run-dir {run_dir}: {error}; it must be writable") from error
    try:
        try:
            agent = _Agent(shm_dir, f"rollout-{identity}-", host_memory)
        except OSError as error:
            raise AgentError(f"--shm-dir {shm_dir}: {error}; it must be writable") from error
        clean = await agent.serve(run_dir / SOCKET, stop)
    finally:
        os.close(lock)
    if agent.worn.is_set():
        _exit(1, f"{agent.readers.hung} reads hang; the agent exits to be started afresh")
    if agent.readers.hung or not clean:
        _exit(0, "the agent stops without waiting for what hangs")


def _exit(code: int, last_line: str) -> NoReturn:
    """End the process without joining its threads."""
    log.critical(last_line)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
        orphans = remove_orphans(shm_dir, PUSH_PREFIX)
        if orphans:
            log.info("removed %d segments of trainers that are gone", len(orphans))
        self.readers = Readers()
        self.worn = asyncio.Event()
        """Too many reads hang."""
        self._jobs: dict[str, Job] = {}
        self._latest = ""
        self._requests: set[asyncio.Task[None]] = set()

    async def serve(self, path: Path, stop: asyncio.Event) -> bool:
        """Until ``stop`` or ``worn``; False if something did not end within ``STOP_S``."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            transport.tune(socket)
            transport.bind(socket, path)
        except (OSError, ValueError, zmq.ZMQError) as error:
            context.destroy(linger=0)
            raise AgentError(f"{path}: the agent cannot listen there: {error}") from error
        log.info("the weights agent listens on %s", path)
        ends = [asyncio.create_task(event.wait()) for event in (stop, self.worn)]
        try:
            while not (stop.is_set() or self.worn.is_set()):
                receive = asyncio.ensure_future(socket.recv_multipart())
                await asyncio.wait({receive, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if not receive.done():
                    receive.cancel()
                    await asyncio.wait({receive})
                    break
                self._accept(socket, receive.result())
        finally:
            for end in ends:
                end.cancel()
            await asyncio.wait(ends)
            clean = await self._stop()
            self._slots.close()
            context.destroy(linger=int(LINGER_S * 1000))
            transport.remove_socket(path)
        return clean

    async def _stop(self) -> bool:
        deadline = time.monotonic() + STOP_S
        jobs = list(self._jobs.values())
        ended = await asyncio.gather(*(job.stop(STOP_S) for job in jobs), return_exceptions=True)
        for job, how in zip(jobs, ended, strict=True):
            if how is not True:
                log.error("session %s did not end: %s", job.request.session, how or "it is late")
        late: set[asyncio.Task[None]] = set()
        if self._requests:
            _, late = await asyncio.wait(
                self._requests, timeout=max(deadline - time.monotonic(), 0)
            )
        return not late and all(how is True for how in ended)

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
            await caller.tell(failed(caller.id, "protocol", str(error), retryable=False))
            return
        caller = _Caller(socket, peer, request.id)
        try:
            reply = await self._answer(caller, request)
        except Exception as error:
            reply = failure(request, error)
        if isinstance(reply, agent_wire.Failed):
            log.warning("%s: %s: %s", request.kind, reply.error, reply.message)
        await caller.tell(reply)
        if self.readers.hung >= HUNG_MAX:
            self.worn.set()

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
            return failed(request.id, "session", text, retryable=False)
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
            transport="shared_memory", sample=result.sample, sums=result.sums,
        )  # fmt: skip

    def _start(self, request: agent_wire.Stage) -> "tuple[Job, asyncio.Task[StagedResult]]":
        others = list(self._jobs.values())
        job = Job(request, self._shm_dir, self._prefix, self._slots, self.readers)
        self._jobs[request.session] = job
        self._latest = request.session
        task = job.stage_task = asyncio.create_task(
            job.stage(lambda left: asyncio.ensure_future(self._end_all(others, left)))
        )
        return job, task

    async def _end_all(self, jobs: list[Job], timeout: float) -> None:
        for job in jobs:
            if not await job.stop(timeout):
                raise TimeoutError(f"session {job.request.session!r} before this one does not end")
            if self._jobs.get(job.request.session) is job:
                del self._jobs[job.request.session]

    async def _send(self, request: agent_wire.Send) -> agent_wire.Reply:
        job = self._jobs.get(request.session)
        if job is None or not job.staged:
            return unknown(request.id, request.session, "staged")
        if job.send_task is None:
            job.send_task = asyncio.create_task(job.send(request.timeout))
        await asyncio.wait({job.send_task})
        result = job.send_task.result()
        return agent_wire.SentReply(
            id=request.id, bytes=result.nbytes, seconds=result.seconds,
            ranks=reports(request.session, result.reports),
        )  # fmt: skip

    def _commit(self, request: agent_wire.Committed) -> agent_wire.Reply:
        job = self._jobs.get(request.session)
        task = job.send_task if job is not None else None
        if job is None or job.slot is None or task is None or not task.done() or task.exception():
            return unknown(request.id, request.session, "sent")
        self._slots.commit(job.slot)
        return agent_wire.Done(id=request.id)

    async def _discard(self, request: agent_wire.Discard) -> agent_wire.Reply:
        job = self._jobs.get(request.session)
        if job is not None:
            await job.stop(DISCARD_S)
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

"""The pod's side of the agent: four calls, each with a deadline."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import zmq
import zmq.asyncio
from pydantic import ValidationError
from zmq.utils.monitor import parse_monitor_message

from rollout_pod.weights import agent_wire, transport
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.wire import WireError, encode

CONNECT_S: Final = 2.0
"""How long an agent may take to be there."""
GRACE_S: Final = 3.0
"""The agent keeps deadlines itself; the client waits this much longer for its words."""
SHORT_S: Final = 10.0
"""For what takes no time."""

ReplyT = TypeVar("ReplyT")
OnProgress = Callable[[int, int], None]


class AgentClientError(Exception):
    """The agent is not there, died, was late or refused. ``kind`` is its word for why."""

    def __init__(self, message: str, *, kind: str, retryable: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable


class StageError(AgentClientError):
    """Nothing was loaded, the ranks serve on. ``kind``: ``source``, ``manifest``, ``room``,
    ``ranks``, ``session``, ``timeout``, ``agent`` (it is not there), ``protocol``, ``internal``.

    ``retryable``: waiting alone may heal it; else somebody has to mend something.
    """


class TransferError(AgentClientError):
    """The ranks may hold a part of the version: poisoned. ``reports`` are those that came in."""

    def __init__(self, message: str, *, kind: str, reports: Sequence[LoadReport] = ()) -> None:
        super().__init__(message, kind=kind, retryable=True)
        self.reports = tuple(reports)


@dataclass(frozen=True)
class Staged:
    """A version that is at hand: in shared memory, its manifest accepted by every rank."""

    session: str
    version: str
    bytes: int
    tensors: int
    seconds: float
    transport: str
    sample: str = ""
    """Tells whether another machine holds the same; see ``contents.sample``."""
    sums: str = ""
    """See ``contents.known_sums``."""


@dataclass(frozen=True)
class Sent:
    """A version that every rank reports as loaded."""

    bytes: int
    seconds: float
    reports: tuple[LoadReport, ...]


@dataclass
class _Pending:
    future: "asyncio.Future[agent_wire.Reply]"
    on_progress: OnProgress | None


class AgentClient:
    """Talks to the agent on ``socket``; connects by itself, also to one that was restarted.

    To be made and used on one running event loop. Calls may overlap.
    """

    def __init__(self, socket: Path) -> None:
        self._path = socket
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._connected = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        transport.tune(self._socket)
        # what a dead connection did not carry must not reach the next agent
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._monitor = self._socket.get_monitor_socket(transport.PEER_EVENTS)
        self._socket.connect(transport.ipc_address(socket))
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._watch()))
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def stage(
        self,
        *,
        session: str,
        version: str,
        path: str | Path,
        rank_sockets: Sequence[Path],
        bucket_bytes: int,
        timeout_s: float,
        on_progress: OnProgress | None = None,
    ) -> Staged:
        """Get a version ready while the engine serves. The same call with the same ``session`` is
        the same stage: it joins one that runs and repeats the answer of one that succeeded.

        Args:
            session: unique for each attempt at an update.
            version: its name.
            path: the folder, as the agent sees it.
            rank_sockets: of all ranks, ordered by global rank.
            bucket_bytes: at most so many bytes are announced at once.
            timeout_s: for all of it.
            on_progress: told (bytes read, bytes in all) about twice a second.

        Raises:
            StageError: as it says.
        """
        try:
            request = agent_wire.Stage(
                id=next(self._ids), session=session, version=version, path=str(path),
                ranks=tuple(str(rank) for rank in rank_sockets), bucket_bytes=bucket_bytes,
                timeout=timeout_s,
            )  # fmt: skip
        except ValidationError as error:
            raise StageError(str(error), kind="protocol", retryable=False) from error
        reply = await self._ask(request, timeout_s + GRACE_S, on_progress)
        staged = _expect(reply, agent_wire.StagedReply, StageError)
        return Staged(
            session, version, staged.bytes, staged.tensors, staged.seconds, staged.transport,
            staged.sample, staged.sums,
        )  # fmt: skip

    async def send(self, *, session: str, timeout_s: float) -> Sent:
        """Stream a staged version to the ranks, which are in ``Receiver.load`` or about to be.

        Raises:
            TransferError: as it says.
        """
        request = agent_wire.Send(id=next(self._ids), session=session, timeout=timeout_s)
        try:
            reply = await self._ask(request, timeout_s + GRACE_S)
        except StageError as error:
            raise TransferError(str(error), kind=error.kind) from error
        if isinstance(reply, agent_wire.Failed):
            reports = [report.report() for report in reply.ranks]
            raise TransferError(reply.message, kind=reply.error, reports=reports)
        sent = _expect(reply, agent_wire.SentReply, StageError)
        return Sent(sent.bytes, sent.seconds, tuple(report.report() for report in sent.ranks))

    async def committed(self, *, session: str) -> None:
        """Tell the agent that the ranks serve this session's version: it keeps that one.

        Raises:
            StageError: as it says; nothing depends on it but memory and a later re-read.
        """
        reply = await self._ask(agent_wire.Committed(id=next(self._ids), session=session), SHORT_S)
        _refusal(reply, StageError)

    async def discard(self, *, session: str) -> None:
        """End a session, whatever it is doing: a load that waits for it ends with a report.

        Raises:
            StageError: the agent is not there; its death has ended the session as well.
        """
        reply = await self._ask(agent_wire.Discard(id=next(self._ids), session=session), SHORT_S)
        _refusal(reply, StageError)

    async def status(self) -> agent_wire.StatusReply:
        """What the agent holds.

        Raises:
            StageError: it is not there.
        """
        reply = await self._ask(agent_wire.Status(id=next(self._ids)), SHORT_S)
        return _expect(reply, agent_wire.StatusReply, StageError)

    async def close(self) -> None:
        """Close the connection; calls that wait fail. Idempotent."""
        if self._socket.closed:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._lose("the client was closed")
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    # --- requests ---

    async def _ask(
        self, request: agent_wire.ToAgent, timeout_s: float, on_progress: OnProgress | None = None
    ) -> agent_wire.Reply:
        started = time.monotonic()
        try:
            # not ``wait_for``: on 3.11 it swallows a cancel that comes with the result
            async with asyncio.timeout(min(CONNECT_S, timeout_s)):
                await self._connected.wait()
        except TimeoutError:
            raise _no_agent(f"nobody listens on {self._path}: is the weights agent up?") from None
        future: asyncio.Future[agent_wire.Reply] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = _Pending(future, on_progress)
        try:
            await self._socket.send(encode(request))
            left = started + timeout_s - time.monotonic()
            async with asyncio.timeout(left):
                return await future
        except zmq.ZMQError as error:
            raise _no_agent(f"{self._path}: {error.strerror}") from error
        except TimeoutError:
            raise _no_agent(f"{request.kind}: the agent did not answer in {timeout_s} s") from None
        finally:
            del self._pending[request.id]
            if not future.cancel() and not future.cancelled():
                future.exception()  # may have come together with a cancel or the deadline

    async def _read(self) -> None:
        while True:
            raw = await self._socket.recv()
            try:
                message = agent_wire.decode_to_client(raw)
            except WireError as error:
                self._lose(f"the agent on {self._path} sent what is no message: {error}")
                continue
            pending = self._pending.get(message.id)
            if pending is None or pending.future.done():
                continue  # of a request that was given up
            if isinstance(message, agent_wire.Progress):
                if pending.on_progress is not None:
                    _call(pending, message)
            else:
                pending.future.set_result(message)

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._connected.set()
            else:
                self._connected.clear()
                self._lose(f"the weights agent on {self._path} is gone; it may be restarting")

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._connected.clear()
            self._lose(f"the client of {self._path} broke: {task.exception()}")

    def _lose(self, reason: str) -> None:
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(_no_agent(reason))


def _call(pending: _Pending, message: agent_wire.Progress) -> None:
    try:
        if pending.on_progress is not None:
            pending.on_progress(message.bytes, message.total)
    except Exception as error:
        pending.future.set_exception(error)  # to whoever gave the callback


def _no_agent(message: str) -> StageError:
    return StageError(message, kind="agent", retryable=True)


def _refusal(reply: agent_wire.Reply, error: type[StageError]) -> None:
    if isinstance(reply, agent_wire.Failed):
        raise error(reply.message, kind=reply.error, retryable=reply.retryable)


def _expect(reply: agent_wire.Reply, kind: type[ReplyT], error: type[StageError]) -> ReplyT:
    _refusal(reply, error)
    if not isinstance(reply, kind):
        raise error(f"the agent answered {reply.kind}", kind="protocol", retryable=False)
    return reply

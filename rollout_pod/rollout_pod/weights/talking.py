"""The talking half of a receiver: a thread with a socket, which never touches the model."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from rollout_pod.weights import transport, wire
from rollout_pod.weights.buckets import BucketError
from rollout_pod.weights.greeting import Greeter
from rollout_pod.weights.incoming import Incoming, OrderError
from rollout_pod.weights.manifest import Manifest, check_manifest, shorten
from rollout_pod.weights.memory import Memories
from rollout_pod.weights.progress import look_out
from rollout_pod.weights.spec import Expected, UpdatesUnsupportedError

log = logging.getLogger(__name__)

PING_S: Final = 0.25
IDLE_S: Final = 5.0
JOIN_S: Final = 5.0
PROBLEMS: Final = 64
"""So many problems of a manifest are named, the rest is counted."""
ERROR_CHARS: Final = 4000


@dataclass
class _Letter:
    """What the loading thread has to say."""

    peer: bytes
    message: wire.Message
    sent: threading.Event | None = None
    """Set when it is; None where nobody waits for that."""
    is_reached: bool = False
    """Whether it was sent, and the peer not known to be gone."""


class Talker:
    """Answers greetings and manifests while the engine serves, and takes in buckets for the
    loading thread, which calls ``claim``, ``post`` and ``settle``. Arguments: see ``Receiver``.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        host: str,
        socket_path: Path,
        memories: Memories,
        expected: Callable[[], Expected | None],
    ) -> None:
        self._rank = rank
        self._world = world
        self._host = host
        self._socket_path = socket_path
        self._expected = expected
        self._memories = memories
        self._greeter = Greeter(rank=rank, world=world, host=host, memories=memories)
        self.lock = threading.Lock()
        """Guards the state of the session, never held across I/O with a peer."""
        self._current: Incoming | None = None
        self._outbox: deque[_Letter] = deque()
        self._unreachable: dict[bytes, str] = {}  # of the thread only
        self._wake = self._inode = -1
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind and start the thread.

        Raises:
            ValueError: the socket's path is too long.
            FileExistsError: something that is no socket lies there.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            transport.tune(socket)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._inode = transport.bind(socket, self._socket_path)
        except BaseException:
            context.destroy(linger=0)
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=(context, socket), name=f"weights-rank-{self._rank}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread; a load in progress fails. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        self._notify()
        thread.join(JOIN_S)
        if thread.is_alive():
            log.error("the receiver of rank %d did not end in %s s", self._rank, JOIN_S)
            return
        with self.lock:
            os.close(self._wake)
            self._wake = -1
        transport.remove_socket(self._socket_path, self._inode)

    # --- for the loading thread ---

    def claim(self, session: str, version: str) -> tuple[tuple[Incoming, Manifest] | None, str]:
        """The accepted session, to be loaded now; or None, and why it is refused."""
        with self.lock:
            current = self._current
            if current is None or current.session != session:
                here = f"; {current.session!r} is" if current else ""
                return None, f"refused: session {session!r} is not known here{here}; stage it again"
            if current.failure:
                return None, f"refused: {current.failure}"
            if current.phase != "accepted" or current.manifest is None:
                return None, f"refused: session {session!r} is {current.phase}, not accepted"
            if current.manifest.version != version:
                return None, (
                    f"refused: session {session!r} brings version {current.manifest.version!r}, "
                    f"not {version!r}"
                )
            current.phase = "loading"
        self._notify()  # from now on the thread looks after the sender
        return (current, current.manifest), ""

    def accepted(self, session: str) -> str:
        """``Manifest.mark`` of a session that is accepted and waits to be loaded; else empty."""
        with self.lock:
            current = self._current
            if current is None or current.session != session or current.failure:
                return ""
            manifest = current.manifest if current.phase == "accepted" else None
            return manifest.mark if manifest is not None else ""

    def post(self, peer: bytes, message: wire.Message, wait_s: float = 0.0) -> bool:
        """Send from the loading thread. With ``wait_s`` wait so long at most until it is sent, and
        return whether it was, to a peer that is not known to be gone: who waits leaves the
        interpreter to the thread that sends.
        """
        letter = _Letter(peer, message)
        if wait_s and self._thread is not None:
            letter.sent = threading.Event()
        self._outbox.append(letter)
        self._notify()
        if letter.sent is not None:
            letter.sent.wait(wait_s)
        return letter.is_reached

    def confirm(self, incoming: Incoming, wait_s: float) -> str:
        """Look whether the session's sender is still there; why it failed, empty if it did not.
        Between two pings a sender may be gone for seconds before that is noticed.
        """
        is_reached = self.post(incoming.peer, wire.Ping(session=incoming.session), wait_s)
        with self.lock:
            return incoming.failure or ("" if is_reached else "the sender could not be looked for")

    def _notify(self) -> None:
        """Wake the thread, if there is one."""
        with self.lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def settle(self, incoming: Incoming, error: str) -> str:
        """End the session; a sender that gave up in the last moment counts."""
        with self.lock:
            error = error or incoming.failure
            incoming.phase = "over"
            incoming.fail(error or "it is complete")
            return error

    # --- the receiver's thread ---

    def _run(self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]") -> None:
        try:
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            next_ping = 0.0
            looked_out: Incoming | None = None
            while not self._closing.is_set():
                loading = self.loading()
                if loading and loading.finishing and loading is not looked_out:
                    looked_out = loading
                    self._look_out()
                ready = dict(poller.poll(int((PING_S if loading else IDLE_S) * 1000)))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._receive(socket)
                handed = []
                while self._outbox:
                    letter = self._outbox.popleft()
                    letter.is_reached = self._send(socket, letter.peer, letter.message)
                    if letter.sent is not None:
                        handed.append(letter.sent)
                if loading and time.monotonic() >= next_ping:
                    next_ping = time.monotonic() + PING_S
                    self._send(socket, loading.peer, wire.Ping(session=loading.session))
                elif not loading and not ready:
                    self._idle(socket)
                if self._unreachable:
                    self._receive(socket)  # its last words tell more than its absence
                    self._mourn()
                for sent in handed:
                    sent.set()
        except Exception:
            log.exception("the receiver of rank %d ends", self._rank)
        finally:
            with self.lock:
                if self._current is not None:
                    self._current.fail("the rank's receiver was closed")
            context.destroy(linger=0)

    def _look_out(self) -> None:
        """For the report of a GPU's copies."""
        if self._memories.device is not None:
            look_out(lambda: bool(self._outbox) or self._closing.is_set())

    def loading(self) -> Incoming | None:
        """The session that is being loaded now."""
        with self.lock:
            current = self._current
            return current if current is not None and current.phase == "loading" else None

    def _idle(self, socket: "zmq.Socket[bytes]") -> None:
        """A sender that is gone keeps its GPU memory as long as it is mapped here."""
        self._memories.sweep()
        if self._greeter.owner is not None:
            self._send(socket, self._greeter.owner, wire.Ping(session="-"))

    def _send(self, socket: "zmq.Socket[bytes]", peer: bytes, message: wire.Message) -> bool:
        """Returns whether the peer is still there."""
        try:
            socket.send_multipart([peer, wire.encode(message)])
        except zmq.ZMQError as error:
            # EHOSTUNREACH: the connection is gone; EAGAIN: the peer does not read, as a trainer
            # that computes its next tensor, which is no harm until an answer is lost
            if not (isinstance(message, wire.Ping) and error.errno == zmq.EAGAIN):
                self._unreachable[peer] = error.strerror or ""
            return error.errno != zmq.EHOSTUNREACH
        return True

    def _mourn(self) -> None:
        with self.lock:
            current = self._current
            if current is not None and current.peer in self._unreachable:
                current.fail(f"the sender is gone ({self._unreachable[current.peer]})")
            loading = current is not None and current.phase == "loading"
        if self._greeter.owner in self._unreachable and not loading:
            self._greeter.forget()
        self._unreachable.clear()

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                peer, *frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message: wire.ToRank | None = None
            try:
                if len(frames) != 1:
                    raise wire.WireError(f"{len(frames)} frames instead of one")
                message = wire.decode_to_rank(frames[0])
                answer = self._answer(peer, message)
            except wire.WireError as error:
                answer = wire.Refused(session="", code="protocol", message=str(error))
            except Exception as error:
                log.exception("rank %d: a message could not be handled", self._rank)
                session = message.session if message else ""
                text = f"{type(error).__name__}: {error}"
                answer = wire.Refused(session=session, code="internal", message=text[:ERROR_CHARS])
            if answer is not None:
                self._send(socket, peer, answer)

    def _answer(self, peer: bytes, message: wire.ToRank) -> wire.Message | None:
        if isinstance(message, wire.Hello):
            return self._hello(peer, message)
        if isinstance(message, wire.Offer):
            return self._offer(peer, message)
        with self.lock:
            current = self._owned(peer, message.session)
            if isinstance(current, wire.Refused):
                return current
            if isinstance(message, wire.Abort):
                current.fail(f"the sender gave up: {message.reason}")
                return None
            try:
                if isinstance(message, wire.Memory):
                    return self._greeter.map(current, message)
                if isinstance(message, wire.BucketReady):
                    current.bucket(message)
                elif isinstance(message, wire.Direct):
                    current.direct(self._greeter.places(message))
                else:
                    current.finish(message)
            except (OrderError, BucketError) as error:
                current.fail(str(error))
                return wire.Refused(session=message.session, code="order", message=str(error))
            return None

    def _owned(self, peer: bytes, session: str) -> Incoming | wire.Refused:
        current = self._current
        if current is not None and current.session == session and current.peer == peer:
            return current
        here = f"{current.session!r} is current" if current else "there is none"
        text = f"session {session!r} is not this connection's: {here}; say hello again"
        return wire.Refused(session=session, code="stale", message=text)

    def _hello(self, peer: bytes, hello: wire.Hello) -> wire.Message:
        with self.lock:
            busy = self._busy(hello)
        if busy is not None:
            return busy
        refused = self._greeter.refusal(hello)
        with self.lock:
            # a load that began meanwhile keeps its sender's memory, and may be what was in the way
            busy = self._busy(hello)
            if busy is not None:
                return busy
            if refused is not None:
                return refused
            answer = self._greeter.welcome(peer, hello)
            if isinstance(answer, wire.Welcome):
                current = self._current
                if current and current.phase == "accepted" and current.peer != peer:
                    # its sender may have nothing more to say that could be refused
                    text = f"session {current.session!r} was replaced by {hello.session!r}"
                    told = wire.Refused(session=current.session, code="stale", message=text)
                    self._outbox.append(_Letter(current.peer, told))
                self._current = Incoming(hello.session, peer, transport=hello.transport)
            return answer

    def _busy(self, hello: wire.Hello) -> wire.Refused | None:
        current = self._current
        if current is None or current.phase != "loading":
            return None
        text = f"session {current.session!r} is loading; try again when it has ended"
        return wire.Refused(session=hello.session, code="busy", message=text)

    def _offer(self, peer: bytes, offer: wire.Offer) -> wire.Message:
        expected: Expected | None = None
        problems: list[str] = []
        try:
            expected = self._expected()
        except UpdatesUnsupportedError as error:
            problems = [str(error)]  # no waiting heals it: an answer that ends the sender's tries
        manifest = self._greeter.held(offer)
        if manifest is None:
            text = f"manifest: {offer.same!r} is not known here; send it whole"
            return wire.Refused(session=offer.session, code="order", message=text)
        if expected is not None and not offer.same:
            problems = check_manifest(manifest, expected)
        shown = manifest
        if offer.hashes:
            try:
                shown = manifest.with_hashes(offer.hashes)
            except ValueError as error:
                problems.append(str(error))
        with self.lock:
            current = self._owned(peer, offer.session)
            if isinstance(current, wire.Refused):
                return current
            if current.phase != "greeted":
                why = f": {current.failure}" if current.failure else ""
                text = f"manifest: the session is {current.phase}{why}"
                return wire.Refused(session=offer.session, code="order", message=text)
            if problems:
                return wire.Rejected(session=offer.session, problems=shorten(problems, PROBLEMS))
            if expected is None:
                text = "the engine has not recorded its boot load yet; try again"
                return wire.Refused(session=offer.session, code="not_ready", message=text)
            current.accept(shown)
            self._greeter.hold(manifest)
            places = self._greeter.held_places(offer)
            if places is not None:
                try:
                    current.direct(places)
                except (OrderError, BucketError) as error:
                    current.fail(str(error))
                    return wire.Refused(session=offer.session, code="order", message=str(error))
        return wire.Accepted(session=offer.session, placed=places is not None)

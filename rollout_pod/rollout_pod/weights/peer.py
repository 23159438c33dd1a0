"""One rank, as the sender sees it: its connection and what it has said."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from rollout_pod.weights import transport, wire
from rollout_pod.weights.report import LoadReport

LINGER_S: Final = 1.0
"""A last word has to get out; the peer is local or gone."""


@dataclass
class RankPeer:
    """Not thread-safe. ``lost`` and ``refused`` are final."""

    session: str
    rank: int
    world: int
    path: Path
    socket: "zmq.Socket[bytes]" = field(repr=False)
    monitor: "zmq.Socket[bytes]" = field(repr=False)
    connected: bool = False
    asked: wire.Transport = "shared_memory"
    welcome: wire.Welcome | None = None
    unfit: str = ""
    """Why the transport that was asked for does not work, where others may be tried."""
    tolerant: bool = False
    mapped: wire.Mapped | None = None
    early: bool = False
    """A manifest was shown before the welcome, and not refused for that."""
    accepted: bool = False
    placed: bool = False
    """It took the places that were shown with the manifest."""
    problems: tuple[str, ...] = ()
    copied: list[int] = field(default_factory=list)
    """Of each acknowledged bucket, in order: see ``wire.Ack``."""
    report: LoadReport | None = None
    refused: wire.Refused | None = None
    failed: str = ""
    """Why a bucket could not be loaded; a report follows."""
    lost: str = ""

    @classmethod
    def connect(
        cls,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        session: str,
        rank: int,
        world: int,
        path: Path,
    ) -> "RankPeer":
        """Connect, now or as soon as somebody listens.

        Raises:
            ValueError: the path is too long.
        """
        address = transport.ipc_address(path)
        socket = context.socket(zmq.DEALER)
        transport.tune(socket)
        monitor = socket.get_monitor_socket(transport.PEER_EVENTS)
        monitor.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        return cls(session, rank, world, path, socket, monitor)

    def renew(self, session: str) -> None:
        """Begin another session on this connection."""
        self.session = session
        self.welcome = self.mapped = self.report = self.refused = None
        self.accepted = self.early = self.placed = False
        self.problems = ()
        self.copied = []
        self.failed = self.unfit = ""

    def ask(self, hello: wire.Hello, *, tolerant: bool) -> None:
        """Say hello, once more if need be."""
        self.asked = hello.transport
        self.tolerant = tolerant
        self.welcome = None
        self.unfit = ""
        self.send(hello)

    @property
    def acked(self) -> int:
        """Buckets, in order."""
        return len(self.copied)

    @property
    def trouble(self) -> str:
        """Why this rank cannot go on; empty if it can."""
        if self.report is not None and not self.report.ok:
            return f"rank {self.rank}: {self.report.error}"
        if self.refused is not None:
            return f"rank {self.rank}: {self.refused.message}"
        unmapped = self.mapped.error if self.mapped is not None else ""
        words = self.failed or self.lost or unmapped
        return f"rank {self.rank}: {words}" if words else ""

    def send(self, message: wire.Message) -> None:
        """Send, or be lost."""
        try:
            self.socket.send(wire.encode(message))
        except zmq.ZMQError as error:
            self.lost = self.lost or f"cannot be written to ({error.strerror})"

    def receive(self) -> None:
        """Take all that is there, without waiting."""
        self._drain()
        if self._watch():
            self._drain()  # what arrived before the connection broke

    def close(self) -> None:
        """Close the connection."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(LINGER_S * 1000))

    def _watch(self) -> bool:
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return bool(self.lost)
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.connected = True
            else:
                self.lost = self.lost or "the connection is lost: the engine's worker is gone"

    def _drain(self) -> None:
        while True:
            try:
                raw = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(wire.decode_to_sender(raw))
            except wire.WireError as error:
                self.lost = self.lost or f"sent what is no message: {error}"

    def _take(self, message: wire.ToSender) -> None:
        if isinstance(message, wire.Refused):
            if message.session not in ("", self.session):
                return
            if message.code == "transport" and self.tolerant:
                self.unfit = message.message
                return
            if self.early and not self.accepted and message.code in ("order", "stale"):
                self.early = False
                return
            self.refused = self.refused or message
        elif message.session != self.session:
            return  # of an earlier session on this socket
        elif isinstance(message, wire.Welcome):
            if (message.rank, message.world) != (self.rank, self.world):
                raise wire.WireError(f"it is rank {message.rank} of {message.world}")
            if message.transport == self.asked:  # else it answers the hello before
                self.welcome = message
        elif isinstance(message, wire.Accepted):
            self.accepted, self.placed = True, message.placed
        elif isinstance(message, wire.Rejected):
            self.problems = message.problems or ("the manifest is rejected without a reason",)
        elif isinstance(message, wire.Mapped):
            self.mapped = message
        elif isinstance(message, wire.Ack):
            if message.ok and message.seq != self.acked:
                raise wire.WireError(f"acknowledged bucket {message.seq} instead of {self.acked}")
            if message.ok:
                self.copied.append(message.copied)
            else:
                self.failed = self.failed or message.error
        elif isinstance(message, wire.Report):
            self.report = self.report or message.report()

"""The head's side of a group: it waits for the nodes, and watches over them."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from rollout_pod.engine.base import EngineStartError, Node
from rollout_pod.nodes.muster import Member, Muster, named
from rollout_pod.protocol import NodeBeat, NodeOrders
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.state import EngineStatus

log = structlog.get_logger(__name__)

SILENCE_S: Final = 30.0
"""Between head and node, in both directions: longer than any stall of a process that lives."""
DISMISS_S: Final = 3.0
"""Three beats of a node."""
_LOOK_S: Final = 1.0


class Led(Protocol):
    """Of the head's supervisor, what the group needs."""

    board: Board

    @property
    def is_started(self) -> bool:
        """Whether the engine has started."""

    def begin_drain(self) -> None:
        """Begin the end of the head, and so of the group."""


@dataclass(frozen=True)
class GroupSettings:
    """Of the command line: the nodes of one engine."""

    name: str
    """The same for all nodes, and another one after each start of the head: the uid of its pod."""
    nodes: int
    host: str
    """This node's own address, as the others reach it."""
    ranks_port: int
    """Of the head, where the ranks meet."""
    join_timeout_s: float

    def place(self, rank: int, *, head: str | None = None) -> Node:
        """Of node ``rank``; ``head`` is the head's host, None where this is the head."""
        return Node(rank, self.nodes, self.host, head or self.host, self.ranks_port)


@dataclass
class Head:
    """Of one group, in the head's process. On the event loop's thread only."""

    group: str
    place: Node
    silence_s: float = SILENCE_S
    _pod: Led | None = None
    _complete: asyncio.Event = field(default_factory=asyncio.Event)
    _dismissed: set[int] = field(default_factory=set)
    """The nodes that know that the head ends."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: bool = False
    """The head ends now, for whatever reason."""

    def __post_init__(self) -> None:
        """Nobody is there yet."""
        self._muster = Muster(self.group, self.place.count, self.silence_s)

    def lead(self, pod: Led) -> None:
        """Before the first beat: whom the nodes follow."""
        self._pod = pod

    def hear(self, beat: NodeBeat) -> NodeOrders:
        """A node's beat; the answer tells it what to do.

        Raises:
            WrongGroup, UnknownRank, RankTaken: as they say.
        """
        if self._pod is None:
            raise RuntimeError("nobody leads yet")
        state = self._pod.board.state
        before = {member.boot_id for member in self._muster.members()}
        self._muster.hear(beat, time.monotonic())
        if beat.boot_id not in before:
            log.info("node joined", node=beat.rank, url=beat.url, group=self.group)
        if self._muster.seal(time.monotonic()):
            self._complete.set()
        if beat.draining:
            self._pod.begin_drain()
            state = self._pod.board.state
        dead = state.engine is EngineStatus.DEAD or (self._ends and not state.draining)
        if state.draining or dead:
            self._dismissed.add(beat.rank)
            self._news.set()
        return NodeOrders(
            boot_id=self._pod.board.boot_id,
            host=self.place.host,
            port=self.place.port,
            go=self._muster.sealed,
            up=self._pod.is_started,
            draining=state.draining,
            dead=dead,
        )

    async def gather(self, timeout_s: float) -> None:
        """Return when all nodes are there.

        Raises:
            EngineStartError: they are not, in time; says which.
        """
        log.info("waits for nodes", group=self.group, nodes=self.place.count - 1)
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            missing = self._muster.missing(time.monotonic())
            raise EngineStartError(
                f"{named(missing)} not there within {timeout_s:g} s (group {self.group})"
            ) from None

    async def watch(self, on_lost: Callable[[str], None]) -> None:
        """Until a node of the complete group is lost: then ``on_lost`` is told, once."""
        await self._complete.wait()
        while True:
            await asyncio.sleep(_LOOK_S)
            lost = self._muster.lost(time.monotonic())
            if lost is not None:
                break
        log.error("node lost", error=lost, group=self.group)
        on_lost(lost)

    async def dismiss(self) -> None:
        """Before the head ends, drained or failed: let every node hear of it, if it asks in time.
        One that does not finds out by the silence.
        """
        self._ends = True
        with suppress(TimeoutError):
            async with asyncio.timeout(DISMISS_S):
                while {member.rank for member in self.members()} - self._dismissed:
                    self._news.clear()
                    await self._news.wait()

    def members(self) -> tuple[Member, ...]:
        """The nodes, by rank; none before all are there."""
        return self._muster.members() if self._muster.sealed else ()

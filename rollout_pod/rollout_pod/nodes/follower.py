"""A node's side of a group: it finds the head, obeys it, and ends with it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import httpx
import structlog
from pydantic import ValidationError

from rollout_pod.nodes.asking import Tokens, post
from rollout_pod.nodes.head import SILENCE_S
from rollout_pod.protocol import NodeBeat, NodeOrders, Problem, ProblemCode

log = structlog.get_logger(__name__)

BEAT_S: Final = 1.0
_ANSWER_S: Final = 5.0
_END_S: Final = 10.0
"""More than the head's drain: for cutting what outlasted it."""
_FATAL: Final = frozenset({ProblemCode.RANK_TAKEN, ProblemCode.INVALID_FIELD})
"""Waiting does not help."""


class FollowError(Exception):
    """The node has to end; says why."""


class Standing(StrEnum):
    """Where a node stands."""

    WAITING_FOR_HEAD = "WaitingForHead"
    """The head cannot be reached, or leads another group."""
    WAITING_FOR_NODES = "WaitingForNodes"
    """The head waits for others."""
    STARTING = "Starting"
    """The ranks are starting."""
    UP = "Up"
    """The engine has started."""
    DRAINING = "Draining"


class _NoOrdersError(Exception):
    def __init__(self, message: str, *, fatal: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal
        self.refused = refused
        """Nobody listens there any more."""


@dataclass
class Follower:
    """One node that is not the head's. ``run`` once."""

    group: str
    rank: int
    boot_id: str
    url: str
    """Its own admin port, for the head."""
    head: str
    """The head's admin port, as a URL."""
    tokens: Tokens
    join_timeout_s: float
    drain_timeout_s: float
    silence_s: float = SILENCE_S
    beat_s: float = BEAT_S
    transport: httpx.AsyncBaseTransport | None = None
    """Of httpx, for tests."""
    standing: Standing = Standing.WAITING_FOR_HEAD
    message: str = ""
    """Why it stands there, where that is not plain."""
    _drain: asyncio.Event = field(default_factory=asyncio.Event)
    _head_drains: bool = False

    def begin_drain(self) -> None:
        """The node was asked to end: it tells the head, and stays until that one has drained."""
        self._drain.set()

    async def run(self, run_ranks: Callable[[NodeOrders], Awaitable[None]]) -> None:
        """Follow until the group ends as it was asked to.

        Args:
            run_ranks: Runs the ranks, until it is cancelled; raises ``FollowError`` when they end.

        Raises:
            FollowError: the head did not come in time, or is lost; or the ranks ended.
        """
        async with httpx.AsyncClient(transport=self.transport, trust_env=False) as http:
            orders = await self._join(http)
            if orders is None:
                return
            self._stand(Standing.STARTING)
            tasks = {
                asyncio.create_task(run_ranks(orders), name="ranks"),  # type: ignore[arg-type]
                asyncio.create_task(self._follow(http, orders.boot_id), name="follow"),
            }
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not self._ends_as_asked:
                    for task in done:
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def beat(self) -> NodeBeat:
        """What it tells the head."""
        return NodeBeat(
            group=self.group, rank=self.rank, boot_id=self.boot_id, url=self.url,
            draining=self._drain.is_set(),
        )  # fmt: skip

    @property
    def _ends_as_asked(self) -> bool:
        return self._drain.is_set() or self._head_drains

    async def _join(self, http: httpx.AsyncClient) -> NodeOrders | None:
        """The orders to start; None if it was asked to end meanwhile."""
        deadline = time.monotonic() + self.join_timeout_s
        while not self._drain.is_set():
            try:
                orders = await self._beat(http)
            except _NoOrdersError as error:
                self._stand(Standing.WAITING_FOR_HEAD, str(error))
                if error.fatal:
                    raise FollowError(str(error)) from None
            else:
                if orders.go:
                    return orders
                self._stand(Standing.WAITING_FOR_NODES)
            if time.monotonic() >= deadline:
                raise FollowError(
                    f"not in group {self.group} within {self.join_timeout_s:g} s "
                    f"({self.standing}{': ' if self.message else ''}{self.message})"
                )
            await self._pause()
        return None

    async def _follow(self, http: httpx.AsyncClient, head_boot_id: str) -> None:
        """Until the head is gone, as it was asked to; tells it of a drain."""
        heard, drain_end = time.monotonic(), None
        while True:
            now = time.monotonic()
            if self._drain.is_set():
                self._stand(Standing.DRAINING)
                drain_end = drain_end or now + self.drain_timeout_s + _END_S
                if now >= drain_end:
                    log.warning("the head did not end in time", head=self.head)
                    return
            try:
                orders = await self._beat(http)
                if orders.boot_id != head_boot_id:
                    raise _NoOrdersError("the head was started again", fatal=True)
            except _NoOrdersError as error:
                if error.refused and self._head_drains:
                    return  # it has ended, as it said
                # what a lost beat ends, with the ranks, is all that the head still has to finish
                if error.fatal or time.monotonic() - heard > self.silence_s:
                    if self._ends_as_asked:
                        return
                    raise FollowError(f"the head is lost: {error}") from None
                self.message = str(error)
            else:
                heard = time.monotonic()
                self._head_drains = orders.draining
                if orders.dead and not self._ends_as_asked:
                    raise FollowError("the engine is dead: its head ends")
                if orders.up and self.standing is Standing.STARTING:
                    self._stand(Standing.UP)
            await self._pause()

    async def _beat(self, http: httpx.AsyncClient) -> NodeOrders:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await post(
                    http, f"{self.head}/admin/v1/nodes/beat", self.beat(), self.tokens
                )
        except (httpx.HTTPError, TimeoutError) as error:
            text = f"{self.head}: {error or type(error).__name__}"
            raise _NoOrdersError(text, refused=_is_refused(error)) from None
        try:
            if answer.status_code == httpx.codes.OK:
                return NodeOrders.model_validate_json(answer.content)
            problem = Problem.model_validate_json(answer.content)
        except ValidationError:
            text = f"{self.head} answered {answer.status_code} with no document of ours"
            raise _NoOrdersError(text) from None
        raise _NoOrdersError(f"{self.head}: {problem.detail}", fatal=problem.code in _FATAL)

    async def _pause(self) -> None:
        """Until the next beat; a drain is told at once."""
        if self._drain.is_set():
            await asyncio.sleep(self.beat_s)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self.beat_s):
                await self._drain.wait()

    def _stand(self, standing: Standing, message: str = "") -> None:
        if (standing, message) != (self.standing, self.message):
            log.info("node", standing=standing.value, message=message, group=self.group)
        self.standing, self.message = standing, message


def _is_refused(error: BaseException | None) -> bool:
    """Whether a connection was refused: unlike a name that is not known, that is an answer."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        if isinstance(error, BaseExceptionGroup):  # of several addresses
            return all(_is_refused(each) for each in error.exceptions)
        error = error.__cause__ or error.__context__
    return False

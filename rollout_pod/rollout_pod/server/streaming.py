"""A rollout as server-sent events: tokens as they come, then how it ended, always.

A reader that has gone, or whose socket takes nothing for ``SEND_TIMEOUT_S``, is cut: its request
is aborted in the engine, and it has what it received.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import structlog
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from rollout_pod.admission import Admission
from rollout_pod.engine.base import EngineDelta
from rollout_pod.generation import tops_of
from rollout_pod.protocol import (
    FinishReason,
    GenerateDelta,
    GenerateEnd,
    GenerateResponse,
    WeightsRef,
)
from rollout_pod.server.problems import problem_of

log = structlog.get_logger(__name__)

HEARTBEAT_S: Final = 10
SEND_TIMEOUT_S: Final = 30.0
COALESCE_S: Final = 0.05
"""Tokens that come within this after an event go out together, in the next one. The first token
of a rollout and its end never wait."""

Generate = Callable[["Stream"], Awaitable[GenerateResponse]]
Gone = Callable[[], Coroutine[None, None, None]]


@dataclass
class Stream:
    """One rollout between the engine, which writes, and a reader."""

    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the reader has gone."""
    _admitted: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: list[tuple[EngineDelta, WeightsRef]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def on_admit(self, _: Admission) -> None:
        """It passed the gate."""
        self._admitted.set()

    def on_delta(self, delta: EngineDelta, weights: WeightsRef) -> None:
        """Tokens came. What the reader has not taken yet goes out as one event a version."""
        self._waiting.append((delta, weights))
        self._news.set()

    async def gone(self) -> None:
        """Return when the reader has gone."""
        await self.cut.wait()

    def take(self) -> list[GenerateDelta]:
        """What came since the last call."""
        waiting, self._waiting = self._waiting, []
        return [
            _merged([delta for delta, _ in group], weights)
            for weights, group in groupby(waiting, key=lambda pair: pair[1])
        ]

    async def begin(self, task: asyncio.Task[GenerateResponse], gone: Gone | None = None) -> None:
        """Wait until it passed the gate or ended; raises if it failed before, so that the reader
        gets a plain HTTP error. A reader that ``gone`` tells of meanwhile is waited for no more.
        """
        admitted = asyncio.create_task(self._admitted.wait())
        leaving = asyncio.create_task(gone()) if gone else None
        waits = {task, admitted, leaving} if leaving else {task, admitted}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if leaving and leaving.done():
                self.cut.set()
        except asyncio.CancelledError:
            self.cut.set()
            raise
        finally:
            # done before the events begin: those watch the reader themselves
            for watcher in filter(None, (admitted, leaving)):
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
        if task.done() and not self._admitted.is_set():
            task.result()

    async def events(self, task: asyncio.Task[GenerateResponse]) -> AsyncIterator[ServerSentEvent]:
        """All events. Closing this iterator cuts the rollout."""
        task.add_done_callback(self._end)
        count = 0
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                is_last = task.done()
                for delta in self.take():
                    count += len(delta.token_ids)
                    yield ServerSentEvent(delta.model_dump_json(exclude_none=True), event="delta")
                if is_last:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(COALESCE_S):
                        await self._ended.wait()
            yield _last(task, count)
        finally:
            self.cut.set()

    def _end(self, _: asyncio.Task[GenerateResponse]) -> None:
        self._ended.set()
        self._news.set()


def _merged(deltas: list[EngineDelta], weights: WeightsRef) -> GenerateDelta:
    tops = [top for d in deltas if d.top_log_probs is not None for top in d.top_log_probs]
    return GenerateDelta(
        token_ids=[token for d in deltas for token in d.token_ids],
        log_probs=[value for d in deltas for value in d.log_probs],
        version=weights.version,
        step=weights.step,
        top_log_probs=tops_of(tops) if tops else None,
        finish_reason=FinishReason(ended) if (ended := deltas[-1].finish_reason) else None,
        stop_reason=deltas[-1].stop_reason,
    )


def _last(task: asyncio.Task[GenerateResponse], count: int) -> ServerSentEvent:
    error = task.exception()
    if error is not None:
        return ServerSentEvent(problem_of(error).model_dump_json(), event="error")
    answer = task.result()
    if len(answer.token_ids) != count:
        raise AssertionError(f"{count} tokens were streamed of {len(answer.token_ids)}")
    fields = answer.model_dump(exclude={"token_ids", "log_probs", "top_log_probs"})
    return ServerSentEvent(GenerateEnd(**fields, num_tokens=count).model_dump_json(), event="end")


class _Events(EventSourceResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A reader that takes nothing is no fault of the pod: the connection is closed."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning("cut a reader whose socket took nothing", seconds=SEND_TIMEOUT_S)


class Streams:
    """Owns the rollouts that are being streamed: each ends by itself or is cut, none is lost."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[GenerateResponse]] = set()

    async def respond(self, generate: Generate, gone: Gone) -> EventSourceResponse:
        """Begin a rollout and answer with its events. ``gone`` returns when the reader has left;
        it is asked until there is something to send.
        """
        stream = Stream()
        task = asyncio.ensure_future(generate(stream))
        self._tasks.add(task)
        task.add_done_callback(self._end)
        await stream.begin(task, gone)
        return _Events(stream.events(task), ping=HEARTBEAT_S, send_timeout=SEND_TIMEOUT_S)

    def _end(self, task: asyncio.Task[GenerateResponse]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: the reader may have gone before

"""The gate: the one place where a request gets into the engine, and where it is held back.

It wraps the engine's ``generate``, not HTTP: a request passes it and is handed to the engine in
one turn of the event loop, so that nothing can slip through while it closes. Requests that find it
closed are answered at once, or parked until it opens.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from rollout_pod.admission import (
    Admission,
    CancelCounts,
    CancelTimeout,
    Draining,
    DuplicateRequest,
    Finished,
    GateStayedClosed,
    Live,
    NotReady,
    OnTokens,
    Refused,
)
from rollout_pod.engine.base import (
    EngineDelta,
    EngineInternalError,
    EngineOutput,
    EngineRequest,
    OnDelta,
)
from rollout_pod.protocol import CancelReason, InterruptionMode, OnPause, WeightsRef

_JOIN_S = 0.1
"""How long the callers of one abort get to take their partials, before the abort is repeated:
a request that was being handed over while the gate closed is queued by the paused engine."""

_PAUSE_S = 10.0
"""The least that the engine gets for a pause, whatever the deadline."""

ABORT_S = 60.0
"""How long the aborts may take that follow a drain whose time is over."""

_ABANDON_S = 60.0
"""How long the engine may take to end a request whose caller has gone."""


@dataclass
class _Tally:
    aborted: int = 0
    finished: int = 0
    tokens: int = 0


class GatedEngine(Protocol):
    """What a gate asks of an engine. See ``Engine``."""

    async def generate(
        self, request: EngineRequest, on_delta: OnDelta | None = None
    ) -> EngineOutput:
        """See ``Engine``."""

    async def abort(self, engine_id: str) -> None:
        """See ``Engine``."""

    async def pause(self, *, keep: bool = False) -> None:
        """See ``Engine``."""


@dataclass
class Gate:
    """Closed until the supervisor opens it. All methods run on the event loop's thread."""

    engine: GatedEngine
    weights: WeightsRef | None = None
    """The committed version; None makes every request fail with ``NotReady``."""
    generation: int = 0
    """Of the desired document in force."""
    is_open: bool = False
    closed_for: CancelReason | None = None
    changed_at: float = 0.0
    """Unix time at which it last opened or closed."""
    keeps: bool = False
    """Requests admitted from now on are tracked, so that an update may keep them."""
    is_draining: bool = False
    is_dead: bool = False
    """So is the engine: no version comes any more."""
    name: str = ""
    """Sets the engine's ids of this gate's requests apart from those of other gates."""
    _live: dict[str, Live] = field(default_factory=dict)
    _parked: dict[str, bool] = field(default_factory=dict)
    """By id: whether it was cut; it keeps its id until its caller has left."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _drain_began: float | None = None
    """Of mode ``drain``, on the monotonic clock; it outlives the waits that were broken off."""
    _serial: int = 0
    _tally: _Tally = field(default_factory=_Tally)

    @property
    def unfinished(self) -> int:
        """Requests that the engine has and whose callers have no answer yet."""
        return len(self._live)

    @property
    def parked(self) -> int:
        """Requests that wait for the gate to open."""
        return len(self._parked)

    async def generate(
        self,
        request_id: str,
        make: Callable[[str], EngineRequest],
        *,
        on_pause: OnPause,
        timeout_s: float,
        gone: Callable[[], Coroutine[None, None, None]] | None = None,
        on_admit: Callable[[Admission], None] | None = None,
        on_delta: OnTokens | None = None,
        has_begun: bool = False,
    ) -> Finished | Refused:
        """Pass the gate and run the request that ``make(engine_id)`` gives to its final output.

        ``on_admit`` is told when it passed, ``on_delta`` of its tokens as they come.

        ``gone`` returns when the caller has gone: its request is aborted in the engine, and
        nothing of it stays behind.

        ``has_begun``: it goes on with an answer that only its caller holds. Where no version is
        committed it waits for the next one, as behind a closed gate.

        Raises:
            NotReady: no version is committed, and the answer has not begun; or the engine is dead.
            Draining: the pod ends.
            DuplicateRequest: the id is alive, here or parked.
            GateStayedClosed: parked for longer than ``timeout_s``.
        """
        self.check_new(request_id)
        if not self._is_passable(has_begun) and on_pause is OnPause.RETURN:
            return Refused(self.generation)
        watcher = asyncio.create_task(gone()) if gone else None
        deadline = time.monotonic() + timeout_s
        self._parked[request_id] = False
        try:
            while not self._is_passable(has_begun):
                await self._wait_for_change(deadline, watcher)
                if self._parked[request_id] or (watcher and watcher.done()):
                    return Refused(self.generation, CancelReason.CANCELLED)
            # STRICTLY in the turn of the check above
            live = self._admit(request_id, make, on_delta)
            del self._parked[request_id]
            if on_admit:
                on_admit(live.admission)
            return await self._finish(live, watcher)
        finally:
            # out of the registries before anything is awaited: ``cancel`` looks at them
            self._parked.pop(request_id, None)
            self._live.pop(request_id, None)
            if watcher:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)

    def check_ready(self) -> None:
        """Raise ``Draining`` or ``NotReady`` if nothing can be served, not even by waiting."""
        self._is_passable()

    def check_new(self, request_id: str) -> None:
        """Raise ``DuplicateRequest`` if a request of this id is alive, here or parked."""
        if request_id in self._live or request_id in self._parked:
            raise DuplicateRequest(request_id)

    def open(self, weights: WeightsRef, generation: int) -> None:
        """Let requests pass, and wake the parked ones."""
        self.weights = weights
        self.generation = generation
        self.is_open = True
        self.changed_at = time.time()
        self.closed_for = None
        self._drain_began = None
        self._wake()

    def close(self, reason: CancelReason) -> None:
        """Let nothing pass from this moment on."""
        if self.is_open:
            self.is_open = False
            self.changed_at = time.time()
        self.closed_for = reason
        self._wake()

    def unpublish(self) -> None:
        """No version may be served: what has not begun fails with ``NotReady``."""
        self.weights = None
        self._wake()

    def fail(self) -> None:
        """The engine is dead: everything that is parked, and all that is new, is sent away."""
        self.is_dead = True
        self.unpublish()

    def drain(self) -> None:
        """Refuse everything new; what is in flight goes on."""
        self.is_draining = True
        self._wake()

    async def settle(self) -> None:
        """Return when whoever answers requests knows what is in force. At once, in one process.

        Raises:
            CancelTimeout: one does not answer.
        """

    async def cancel_one(self, request_id: str) -> Finished | Refused | None:
        """Cut one request, parked or in the engine; its own caller is answered as well.

        Returns what it had; None if no request of this id is alive.
        """
        if request_id in self._parked:
            self._parked[request_id] = True
            self._wake()
            return Refused(self.generation, CancelReason.CANCELLED)
        live = self._live.get(request_id)
        if live is None:
            return None
        await self._abandon(live)
        return self._finished(live)

    async def cancel(
        self,
        *,
        timeout_s: float,
        mode: InterruptionMode = InterruptionMode.ABORT,
        woken: asyncio.Event | None = None,
    ) -> CancelCounts | None:
        """Bring the engine to rest behind a closed gate.

        ``abort``: everything is cut; returns when every caller has its partial. ``drain``: so is
        what has not ended by itself ``timeout_s`` after the first of these calls behind this gate;
        its wait is broken off when ``woken`` is set, and None is returned. ``keep``: the engine
        only pauses; what an update could not keep is cut.

        Raises:
            CancelTimeout: the engine did not come to rest in time.
        """
        if self.is_open:
            raise RuntimeError("cancel behind an open gate: close it first")
        started = time.monotonic()
        self._tally = _Tally()
        if mode is InterruptionMode.KEEP:
            await self._keep(started + timeout_s)
        elif mode is InterruptionMode.DRAIN:
            started = self._drain_began = self._drain_began or started
            await self._wait_idle_or(woken, self.drain_left(timeout_s))
            if self._live and woken and woken.is_set():
                return None
            await self._abort_all(time.monotonic() + ABORT_S)
        else:
            await self._abort_all(started + timeout_s)
        self._drain_began = None
        return CancelCounts(
            aborted=self._tally.aborted,
            finished=self._tally.finished,
            tokens_returned=self._tally.tokens,
            kept=len(self._live),
            seconds=time.monotonic() - started,
        )

    async def _keep(self, deadline: float) -> None:
        untracked = [live for live in self._live.values() if not live.is_tracked]
        for live in untracked:
            live.cancel_reason = live.cancel_reason or self.closed_for
            await self.engine.abort(live.engine_id)
        await self._pause(deadline, keep=True)
        if untracked:
            remaining = max(0.0, deadline - time.monotonic())
            _, left = await asyncio.wait([live.task for live in untracked], timeout=remaining)
            if left:
                raise CancelTimeout(f"{len(left)} requests did not end in time")

    async def _abort_all(self, deadline: float) -> None:
        """The pause is repeated until nothing is left."""
        reason = self.closed_for or CancelReason.PAUSED
        while True:
            for live in self._live.values():
                live.cancel_reason = live.cancel_reason or reason
            await self._pause(deadline, keep=False)
            remaining = max(0.0, deadline - time.monotonic())
            if await self.wait_idle(timeout_s=_JOIN_S):
                return
            if remaining <= 0:
                raise CancelTimeout(f"{len(self._live)} requests were left when the time was over")

    async def _pause(self, deadline: float, *, keep: bool) -> None:
        # a short deadline is for the requests: the engine may end the step that it is in
        within = max(deadline - time.monotonic(), _PAUSE_S)
        try:
            async with asyncio.timeout(within):
                await self.engine.pause(keep=keep)
        except TimeoutError:
            raise CancelTimeout(f"the engine did not pause within {within:.3g} s") from None

    def drain_left(self, timeout_s: float) -> float:
        """Seconds left of a drain that may take ``timeout_s``; infinite while there is none."""
        if self._drain_began is None:
            return math.inf
        return max(0.0, self._drain_began + timeout_s - time.monotonic())

    async def wait_idle(self, *, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when the time is over before."""
        deadline = time.monotonic() + timeout_s
        while self._live:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            tasks = [live.task for live in self._live.values()]
            await asyncio.wait(tasks, timeout=remaining)
            await asyncio.sleep(0)  # the callers of finished tasks leave the registry in this turn
        return True

    async def _wait_idle_or(self, woken: asyncio.Event | None, timeout_s: float) -> bool:
        """Wait until nothing is in flight, ``woken`` is set or the time is over; whether it is
        known that nothing is.
        """
        idle = asyncio.create_task(self.wait_idle(timeout_s=timeout_s), name="drain")
        waits = [idle]
        if woken:
            waits.append(asyncio.create_task(woken.wait(), name="drain woken"))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return idle.done() and idle.result()
        finally:
            for wait in waits:  # neither ends a generation
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _is_passable(self, has_begun: bool = False) -> bool:
        if self.is_draining:
            raise Draining
        if self.is_dead or (self.weights is None and not has_begun):
            raise NotReady
        return self.weights is not None and self.is_open

    def _admit(
        self, request_id: str, make: Callable[[str], EngineRequest], on_delta: OnTokens | None
    ) -> Live:
        """Gate check, registration and hand-over, with no await between them."""
        if self.weights is None or not self.is_open:
            raise RuntimeError("admission behind a closed gate")
        self._serial += 1
        engine_id = f"{request_id}#{self.name}{self._serial}"
        admission = Admission(self.weights, self.generation)
        live = Live(engine_id, admission, is_tracked=self.keeps or on_delta is not None)

        def note(delta: EngineDelta) -> None:
            # the gate is closed while ``weights`` changes, and no token comes then
            weights = self.weights or admission.weights
            live.note(weights, len(delta.token_ids))
            if on_delta:
                on_delta(delta, weights)

        live.task = asyncio.get_running_loop().create_task(
            self.engine.generate(make(engine_id), note if live.is_tracked else None),
            name=f"generate {engine_id}",
        )
        self._live[request_id] = live
        return live

    async def _finish(self, live: Live, watcher: asyncio.Task[None] | None) -> Finished:
        """Read the final output whatever happens to the caller: an engine request is ended by
        ``abort`` only, never by cancelling the task that reads it.
        """
        waits: set[asyncio.Task[EngineOutput] | asyncio.Task[None]] = {live.task}
        if watcher:
            waits.add(watcher)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._abandon(live)
            raise
        if not live.task.done():
            await self._abandon(live)
        finished = self._finished(live)
        if finished.cancel_reason:
            self._tally.aborted += 1
            self._tally.tokens += len(finished.output.token_ids)
        else:
            self._tally.finished += 1
        return finished

    def _finished(self, live: Live) -> Finished:
        output = live.task.result()
        reason = None
        if output.finish_reason == "abort":
            reason = live.cancel_reason or CancelReason.CANCELLED
        return Finished(output, live.admission, reason, live.spans_of(output))

    async def _abandon(self, live: Live) -> None:
        """Nobody waits for this request any more: end it in the engine and read what it had."""
        live.cancel_reason = live.cancel_reason or CancelReason.CANCELLED
        live.task.add_done_callback(_seen)
        await self.engine.abort(live.engine_id)
        done, _ = await asyncio.wait({live.task}, timeout=_ABANDON_S)
        if not done:
            raise EngineInternalError(
                f"the engine did not end {live.engine_id} within {_ABANDON_S:g} s"
            )

    async def _wait_for_change(self, deadline: float, watcher: asyncio.Task[None] | None) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise GateStayedClosed
        change = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait(
                {change, watcher} if watcher else {change},
                timeout=remaining,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            change.cancel()
            await asyncio.gather(change, return_exceptions=True)

    def _wake(self) -> None:
        """Wake every parked request: each looks for itself what changed."""
        self._changed.set()
        self._changed = asyncio.Event()


def _seen(task: asyncio.Task[EngineOutput]) -> None:
    """Nobody may be left to be told of its error; asyncio would complain of that."""
    if not task.cancelled():
        task.exception()

"""The steps of the plan, done (a version is prepared by ``staging`` and loaded by ``transfer``).

Each leaves the board in a state that the plan can go on from, also when it fails; none of them
decides what comes next, and none opens the gate in passing.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from rollout_pod.admission import CancelTimeout
from rollout_pod.engine.base import Engine, EngineError
from rollout_pod.gate import Gate
from rollout_pod.metrics import PodMetrics
from rollout_pod.protocol import CancelReason, InterruptionMode, UpdatePhase, WeightsRef
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.faults import Faults
from rollout_pod.supervisor.staging import Staging, update_news
from rollout_pod.supervisor.state import BASE, EngineStatus, Rank, wanted_sleep
from rollout_pod.supervisor.store import Store, record_of

log = structlog.get_logger(__name__)

_DRAIN_CUT_S = 10.0
"""For cutting what outlasted a drain: the container has 15 s more than the drain."""

_CLEAR_ATTEMPTS = 20
_CLEAR_PAUSE_S = 0.1


@dataclass
class Acts:
    """What the supervisor can do. One at a time."""

    board: Board
    engine: Engine
    gate: Gate
    store: Store
    metrics: PodMetrics
    staging: Staging
    faults: Faults
    wake: asyncio.Event
    """Set when there is reason to plan again."""
    _closed_at: float | None = None
    """When an update closed the gate; None where it was closed for another reason."""

    async def load(self) -> None:
        """Start the engine. Raises what ``Engine.start`` raises."""
        info = await self.engine.start()
        self.board.change(
            engine=EngineStatus.UP,
            info=info,
            loaded=BASE,
            sleep_refusal=self.engine.sleep_refusal(),
            ranks=tuple(Rank(rank) for rank in range(info.world_size)),
        )

    # -- the switch

    def close_gate(self, reason: CancelReason) -> None:
        """From here on no request passes."""
        if reason is not CancelReason.UPDATING:
            self._closed_at = None
        elif self.board.state.gate_open:
            self._closed_at = time.monotonic()
        self.gate.close(reason)
        update = self.board.state.update
        if reason is CancelReason.UPDATING and update and update.phase is UpdatePhase.STAGED:
            update = update_news(self.board, phase=UpdatePhase.CANCELLING)
        elif reason is CancelReason.SLEEPING and update and update.phase is UpdatePhase.CANCELLING:
            update = update_news(self.board, phase=UpdatePhase.STAGED)  # it has to wait
        self.board.change(gate_open=False, closed_for=reason, update=update)
        log.info("gate closed", reason=reason)

    async def cancel(self, mode: InterruptionMode = InterruptionMode.ABORT) -> None:
        """Bring the engine to rest. One that does not let go in time counts as dead.

        A drain is waited for until there is reason to plan again: nothing is done then.
        """
        desired = self.board.desired
        timeout_s = desired.interruption.timeout_s if desired else 60.0
        try:
            counts = await self.gate.cancel(timeout_s=timeout_s, mode=mode, woken=self.wake)
        except CancelTimeout as error:
            self.faults.fail_engine(str(error))
            return
        if counts is None:
            return
        self.metrics.cancelled(counts)
        log.info("cancelled", aborted=counts.aborted, tokens_returned=counts.tokens_returned,
                 seconds=round(counts.seconds, 4))  # fmt: skip
        update = self.board.state.update
        if update and update.phase is UpdatePhase.CANCELLING:
            update = update_news(self.board, cancel=counts.seconds)
        self.board.change(idle=True, kept=counts.kept > 0, update=update)

    async def clear_caches(self) -> None:
        """Clear every cache, or fail the update. Without one nothing is left but a restart."""
        ref, committed = self.board.state.loaded, self.board.state.committed
        if ref is None:
            raise RuntimeError("caches are cleared after a complete load")
        for _ in range(_CLEAR_ATTEMPTS):
            with suppress(EngineError):  # tried again, as a False is
                if (await self.engine.clear_caches()).is_complete:
                    self.board.change(caches_clear=True)
                    return
            await asyncio.sleep(_CLEAR_PAUSE_S)
        message = f"a cache could not be cleared in {_CLEAR_ATTEMPTS} attempts"
        if committed is not None and committed.version == ref.version:
            self.faults.fail_engine(message)
        else:
            await self.faults.fail_update(ref, message, restore=None)

    async def commit(self, ref: WeightsRef) -> None:
        """Publish ``ref``. The record is written first: a pod that dies in between serves, when
        it comes back, a version that every rank had held.
        """
        started = time.monotonic()
        await self.engine.publish_version(ref.version)
        state = replace(
            self.board.state,
            committed=ref,
            last_committed=ref,
            load_failures=tuple((r, n) for r, n in self.board.state.load_failures if r != ref),
        )
        if state.rejected == ref:
            state = replace(state, rejected=None, rejected_message=None)
        self.store.write_record(record_of(state))
        self.gate.weights = ref
        update = state.update
        if update and update.target == ref.version and state.transferred:
            update = update_news(
                self.board,
                phase=UpdatePhase.COMMITTED,
                message="",
                commit=time.monotonic() - started,
                finished_at=time.time(),
            )
            self.metrics.updated(update)
        stage = state.stage
        is_staged = stage is not None and stage.ref == ref
        self.board.set(replace(state, update=update, stage=None if is_staged else stage))
        log.info("committed", version=ref.version)
        if stage is not None and is_staged:
            await self.staging.keep(stage)

    def relabel(self, step: int | None) -> None:
        """The committed version got another step."""
        state = self.board.state
        if state.committed is None:
            raise RuntimeError("nothing is committed that could be labelled")
        ref = state.committed.model_copy(update={"step": step})
        state = replace(state, committed=ref, last_committed=ref)
        self.store.write_record(record_of(state))
        self.gate.weights = ref
        self.board.set(state)

    async def open_gate(self) -> None:
        """The engine first, then the gate: nobody is handed to an engine that does not run.

        Where it is not to open any more by then, the engine is left for the plan to bring to rest.
        """
        if self.board.state.committed is None or self.board.state.poisoned:
            raise RuntimeError("the gate opens only for a committed version")
        try:
            await self.gate.settle()  # what was kept goes on under the name of what it goes on with
        except CancelTimeout as error:
            self.faults.fail_engine(str(error))
            return
        await self.engine.resume()
        state, desired = self.board.state, self.board.desired  # those of now
        if (
            state.committed is None
            or desired is None
            or state.draining
            or desired.paused
            or wanted_sleep(desired, state)
        ):
            self.board.change(idle=False, kept=False)
            return
        self.gate.open(state.committed, desired.generation)
        update = state.update
        if self._closed_at is not None and update and update.phase is UpdatePhase.COMMITTED:
            seconds = time.monotonic() - self._closed_at
            update = update_news(self.board, paused=seconds)
            self.metrics.paused_for_update(seconds)
        self._closed_at = None
        self.board.change(gate_open=True, closed_for=None, idle=False, kept=False, update=update)
        log.info("gate open", version=state.committed.version)

    # -- ends

    async def drain(self, *, timeout_s: float) -> None:
        """Refuse what is new, wait for what is in flight, then cut it.

        A drain of an interruption that goes on already is not prolonged.
        """
        self.gate.drain()
        await self.staging.give_up("this pod ends")
        if self.board.desired:
            left_s = self.gate.drain_left(self.board.desired.interruption.timeout_s)
            timeout_s = min(timeout_s, left_s)
        rests = self.board.state.idle  # then nothing in it goes on by itself
        try:
            if not await self.gate.wait_idle(timeout_s=0.0 if rests else timeout_s):
                self.gate.close(CancelReason.DRAINING)
                self.board.change(gate_open=False, closed_for=CancelReason.DRAINING)
                if counts := await self.gate.cancel(timeout_s=_DRAIN_CUT_S):
                    self.metrics.cancelled(counts)
        except CancelTimeout as error:
            self.faults.fail_engine(str(error))
        self.gate.close(CancelReason.DRAINING)
        self.board.change(gate_open=False, closed_for=CancelReason.DRAINING, drained=True)

"""The steps of the plan, done (the preparation of a version is ``staging``).

Each leaves the board in a state that the plan can go on from, also when it fails; none of them
decides what comes next, and none opens the gate in passing.
"""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from rollout_pod.admission import CancelTimeout
from rollout_pod.engine.base import (
    Engine,
    EngineDeadError,
    EngineError,
    EngineHungError,
    RankReport,
)
from rollout_pod.gate import Gate
from rollout_pod.metrics import PodMetrics
from rollout_pod.protocol import (
    CancelReason,
    InterruptionMode,
    UpdatePhase,
    WeightsRef,
)
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.ports import WeightsAgent
from rollout_pod.supervisor.staging import Staging, update_news
from rollout_pod.supervisor.state import (
    BASE,
    EngineStatus,
    PodState,
    Rank,
    fallback_weights,
    wanted_sleep,
)
from rollout_pod.supervisor.store import Store, record_of
from rollout_pod.weights.agent_client import TransferError

log = structlog.get_logger(__name__)

_DRAIN_CUT_S = 10.0
"""For cutting what outlasted a drain: the container has 15 s more than the drain."""

_CLEAR_ATTEMPTS = 20
_CLEAR_PAUSE_S = 0.1
_REPORT_S = 10.0
"""How much longer than the transfer the ranks' reports may take."""


@dataclass
class Acts:
    """What the supervisor can do. One at a time."""

    board: Board
    engine: Engine
    gate: Gate
    agent: WeightsAgent
    store: Store
    metrics: PodMetrics
    staging: Staging
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
            self.fail_engine(str(error))
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

    async def transfer(
        self, ref: WeightsRef, session: str, *, flush: bool, on_device: bool = False
    ) -> None:
        """Let every rank load the staged version; whatever goes wrong poisons, unless no rank
        had touched its model yet. A trainer that pushes it sends by itself, and of what waits
        ``on_device`` every rank has all.
        """
        desired = self.board.desired
        timeout_s = desired.update_timeout_s if desired else 600.0
        started = time.monotonic()
        before = self.board.state
        before_transport = before.update.transport if before.update else None
        # in memory only: a process that is killed from here on boots anew, from a checkpoint
        self.board.change(
            transferring=True,
            loaded=None,
            transferred=False,
            caches_clear=False,
            update=update_news(self.board, phase=UpdatePhase.TRANSFERRING),
        )
        load = asyncio.create_task(
            self.engine.switch_weights(ref.version, timeout_s=timeout_s)
            if on_device
            else self.engine.load_weights(
                session, version=ref.version, flush=flush, timeout_s=timeout_s
            ),
            name=f"load {session}",
        )
        problems: list[str] = []
        reports: tuple[RankReport, ...] = ()
        try:
            if not ref.is_pushed and not on_device:
                problems += await self._send(session, timeout_s, load)
            async with asyncio.timeout(timeout_s + _REPORT_S):
                reports = await load
        except EngineDeadError as error:
            self.fail_engine(str(error))
            problems.append(str(error))  # the cause is to be the container's last words
        except (EngineHungError, TimeoutError) as error:
            # no fault of the version: the engine that comes after this one loads it
            message = f"no report of the load of {ref.version}: {str(error) or 'time is over'}"
            self.board.change(update=update_news(
                self.board, phase=UpdatePhase.FAILED, message=message, finished_at=time.time(),
            ))  # fmt: skip
            self.fail_engine(message)
            return
        except EngineError as error:
            problems.append(f"the engine did not report: {error}")
        finally:
            load.cancel()  # a call that nobody waits for any more, unless it has ended
            await asyncio.gather(load, return_exceptions=True)
        problems += self._problems_of(reports, ref)
        seconds = time.monotonic() - started
        if not problems:
            self.board.change(
                transferring=False,
                poisoned=False,
                loaded=ref,
                transferred=True,
                ranks=tuple(Rank(r.rank, r.host, r.path, r.note) for r in reports),
                update=update_news(
                    self.board,
                    phase=UpdatePhase.COMMITTING,
                    transfer=seconds,
                    transport=_said(report.transport for report in reports) or before_transport,
                    mode="staged" if on_device else _said(report.mode for report in reports),
                    steps=dict(max(reports, key=lambda report: report.seconds).steps),
                ),
            )
            return
        untouched = bool(reports) and not any(report.touched for report in reports)
        await self._fail_update(
            ref, "; ".join(problems), restore=before if untouched and not flush else None
        )

    async def _send(
        self, session: str, timeout_s: float, load: asyncio.Task[tuple[RankReport, ...]]
    ) -> list[str]:
        """What went wrong on the sender's side. It is not waited for where the engine died: a
        sender may wait for ranks of a machine that is gone until its deadline.
        """
        send = asyncio.create_task(
            self.agent.send(session=session, timeout_s=timeout_s), name=f"send {session}"
        )
        try:
            await asyncio.wait({send, load}, return_when=asyncio.FIRST_COMPLETED)
            if not send.done() and isinstance(load.exception(), EngineDeadError):
                return []
            await send
        except TransferError as error:
            return [str(error)]
        except Exception as error:
            log.exception("the agent's client failed unexpectedly", session=session)
            return [f"{type(error).__name__}: {error}"]
        finally:
            send.cancel()  # a call that nobody waits for any more, unless it has ended
            await asyncio.gather(send, return_exceptions=True)
        return []

    def _problems_of(self, reports: tuple[RankReport, ...], ref: WeightsRef) -> list[str]:
        """What keeps these reports from being a complete load of ``ref`` on every rank."""
        info = self.board.state.info
        world = info.world_size if info else 0
        problems = [f"rank {r.rank}: {r.error}" for r in reports if not r.ok]
        problems += [
            f"rank {r.rank} loaded {r.version}"
            for r in reports
            if r.ok and r.version != ref.version
        ]
        if sorted(r.rank for r in reports) != list(range(world)):
            problems.append(f"{len(reports)} of {world} ranks reported")
        return problems

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
            self.fail_engine(message)
        else:
            await self._fail_update(ref, message, restore=None)

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
            self.fail_engine(str(error))
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
            self.fail_engine(str(error))
        self.gate.close(CancelReason.DRAINING)
        self.board.change(gate_open=False, closed_for=CancelReason.DRAINING, drained=True)

    def fail_engine(self, error: str) -> None:
        """The engine is dead: nothing is served any more."""
        log.error("engine dead", error=error)
        self.gate.close(CancelReason.UPDATING)
        self.gate.unpublish()
        self.board.change(
            engine=EngineStatus.DEAD, gate_open=False, committed=None, loaded=None,
            transferring=False, last_error=error,
        )  # fmt: skip

    async def _fail_update(
        self, ref: WeightsRef, message: str, *, restore: PodState | None
    ) -> None:
        """Take the failure down. Unless no model was touched (``restore``: the state before),
        nothing may be served until a complete load commits.
        """
        desired = self.board.desired
        log.error("update failed", version=ref.version, error=message, untouched=bool(restore))
        state = self.board.state.with_load_failure(ref)
        is_rejected = (
            desired is not None
            and desired.weights == ref
            and state.load_failures_of(ref) >= desired.max_attempts
            and self._has_other_than(ref)
        )
        update = update_news(
            self.board,
            phase=UpdatePhase.REJECTED if is_rejected else UpdatePhase.FAILED,
            message=message,
            finished_at=time.time(),
        )
        self.metrics.updated(update)
        state = replace(state, transferring=False, last_error=message, update=update)
        if is_rejected:
            state = replace(state, rejected=ref, rejected_message=message)
        if restore:
            state = replace(
                state,
                loaded=restore.loaded,
                transferred=restore.transferred,
                caches_clear=restore.caches_clear,
            )
        else:
            self.gate.unpublish()
            state = replace(state, loaded=None, poisoned=True, committed=None)
        self.store.write_record(record_of(state))
        self.board.set(state)
        # last: an agent that does not listen must not keep the pod ready meanwhile
        await self.staging.give_up()

    def _has_other_than(self, ref: WeightsRef) -> bool:
        """Whether another version could be served: without one, ``ref`` is never given up."""
        desired, state = self.board.desired, self.board.state
        fallback = fallback_weights(desired, state) if desired else None
        return fallback is not None and fallback.version != ref.version


def _said(words: Iterable[str]) -> str | None:
    """What the ranks say; each of several, where they differ. None where none says anything."""
    return ", ".join(sorted({word for word in words if word})) or None

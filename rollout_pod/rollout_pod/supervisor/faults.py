"""What a failure takes away, and what it leaves."""

import time
from dataclasses import dataclass, replace

import structlog

from rollout_pod.gate import Gate
from rollout_pod.metrics import PodMetrics
from rollout_pod.protocol import CancelReason, UpdatePhase, WeightsRef
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.staging import Staging, update_news
from rollout_pod.supervisor.state import (
    EngineStatus,
    PodState,
    fallback_weights,
    wanted_weights,
)
from rollout_pod.supervisor.store import Store, record_of

log = structlog.get_logger(__name__)


@dataclass
class Faults:
    """Takes down what failed. Nothing here opens the gate."""

    board: Board
    gate: Gate
    store: Store
    metrics: PodMetrics
    staging: Staging

    def fail_engine(self, error: str) -> None:
        """The engine is dead: nothing is served any more."""
        log.error("engine dead", error=error)
        self.gate.close(CancelReason.UPDATING)
        self.gate.fail()
        self.board.change(
            engine=EngineStatus.DEAD, gate_open=False, committed=None, loaded=None,
            transferring=False, last_error=error,
        )  # fmt: skip

    async def fail_update(self, ref: WeightsRef, message: str, *, restore: PodState | None) -> None:
        """Take the failure down. Unless no model was touched (``restore``: the state before),
        nothing may be served until a complete load commits.
        """
        self._note(ref, message, restore)
        # last: an agent that does not listen must not keep the pod ready meanwhile
        await self.staging.give_up()

    def fail_offer(self, session: str, message: str) -> None:
        """A sender gives up what requests were cut for, before anything was loaded: it counts as
        an attempt, or one that always fails would close the gate for ever. Else nothing happens.
        """
        state = self.board.state
        stage = state.stage
        if (
            stage is None
            or stage.session != session
            or state.transferring
            or (state.transferred and state.loaded == stage.ref)
            or state.committed is None
            or state.closed_for is not CancelReason.UPDATING
        ):
            return
        self._note(stage.ref, message, state)

    def _note(self, ref: WeightsRef, message: str, restore: PodState | None) -> None:
        desired = self.board.desired
        log.error("update failed", version=ref.version, error=message, untouched=bool(restore))
        state = self.board.state.with_load_failure(ref)
        is_rejected = (
            desired is not None
            and wanted_weights(desired) == ref
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

    def _has_other_than(self, ref: WeightsRef) -> bool:
        """Whether another version could be served: without one, ``ref`` is never given up."""
        desired, state = self.board.desired, self.board.state
        fallback = fallback_weights(desired, state) if desired else None
        return fallback is not None and fallback.version != ref.version

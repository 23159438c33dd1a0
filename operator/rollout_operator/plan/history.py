"""Who asked for an update, and the list of those that are over."""

from typing import Final

from rollout_operator.api.replica import Replica
from rollout_operator.api.status import (
    MAX_HISTORY,
    CommittedSource,
    FinishedUpdate,
    ReplicaStatus,
    WeightUpdate,
)
from rollout_operator.plan.document import wanted_version
from rollout_pod.protocol import StateDocument, UpdatePhase, WeightsRef

_OVER: Final = (UpdatePhase.COMMITTED, UpdatePhase.REJECTED)


def asker(replica: Replica, target: str, started_at: str | None) -> str | None:
    """Who asked for the update: said once, since the field may have another owner before its end.

    None where the update is not to the version of the spec, or nobody owns that field.
    """
    known = replica.status.weight_update
    if known is not None and _is(known, target, started_at):
        return known.by
    if replica.spec is None or wanted_version(replica.spec) != target:
        return None
    return replica.asked_by or None


def with_update(
    history: tuple[FinishedUpdate, ...],
    update: WeightUpdate | None,
    previous: WeightUpdate | None,
    state: StateDocument | None,
) -> tuple[FinishedUpdate, ...]:
    """Return the history with ``update`` in front if it has just come to its end.

    Args:
        history: As the status has it.
        update: The newest update.
        previous: The one that the status has: the end of each update is seen once.
        state: What the pod says, which names the source; None where it says nothing.
    """
    if update is None or update.phase not in _OVER or state is None:
        return history
    seen = previous is not None and previous.phase in _OVER
    if seen and previous is not None and _is(previous, update.target, update.started_at):
        return history
    ref = state.committed if update.phase == UpdatePhase.COMMITTED else state.rejected
    if ref is not None and ref.version != update.target:
        ref = None
    entry = FinishedUpdate(
        version=update.target,
        step=ref.step if ref else None,
        source=committed_source(ref),
        phase=update.phase,
        started_at=update.started_at,
        finished_at=update.finished_at,
        paused_seconds=update.paused_seconds,
        by=update.by,
    )
    return (entry, *history)[:MAX_HISTORY]


def finished_steps(old: ReplicaStatus, new: ReplicaStatus) -> dict[str, float]:
    """Return the seconds of each step of the update that has just committed; empty if none has."""
    update = new.weight_update
    if update is None or update.phase != UpdatePhase.COMMITTED:
        return {}
    known = old.weight_update
    if (
        known is not None
        and known.phase == UpdatePhase.COMMITTED
        and _is(known, update.target, update.started_at)
    ):
        return {}
    # the ranks' own steps are parts of ``transfer``
    steps = update.seconds.model_dump(exclude={"steps"}) if update.seconds else {}
    steps["paused"] = update.paused_seconds
    return {step: seconds for step, seconds in steps.items() if seconds is not None}


def committed_source(ref: WeightsRef | None) -> CommittedSource | None:
    """Where a version was read from; None for the model's own checkpoint."""
    return CommittedSource.model_validate(ref.source.model_dump()) if ref and ref.source else None


def _is(known: WeightUpdate, target: str, started_at: str | None) -> bool:
    return (known.target, known.started_at) == (target, started_at)

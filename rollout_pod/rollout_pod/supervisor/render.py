"""From the supervisor's values to the state document: pure."""

from collections.abc import Mapping

from rollout_pod.protocol import (
    DesiredDocument,
    GateState,
    RankState,
    SleepState,
    SleepTag,
    StateDocument,
    UpdatePhase,
    UpdateSeconds,
    UpdateState,
    WeightsRef,
)
from rollout_pod.supervisor.pushed import needed_push
from rollout_pod.supervisor.state import PodState, is_ready, phase_of, wanted_weights

COUNTERS: Mapping[str, bool | set[str]] = {
    "revision": True,
    "unfinished": True,
    "update": {"progress"},
}
"""Fields whose change makes no new revision."""


WAITS_FOR_WAKE = (
    "waits until the weights wake: ask for no sleep, or for tags without weights; all is at hand"
)
"""Of an update that finds the weights asleep."""

PUSH_WAITS_FOR_WAKE = (
    "waits until the weights wake: ask for no sleep, or for tags without weights; then it can be "
    "pushed"
)
"""The same of one that a trainer has to bring."""

_ASLEEP: Mapping[UpdatePhase, str] = {
    UpdatePhase.STAGED: WAITS_FOR_WAKE,
    UpdatePhase.AWAITING_PUSH: PUSH_WAITS_FOR_WAKE,
}


def held_weights(state: PodState) -> WeightsRef | None:
    """The version that every rank holds now and that is committed."""
    if state.committed is None or state.loaded is None or state.transferring or state.poisoned:
        return None
    return state.committed if state.loaded.version == state.committed.version else None


def sleep_of(state: PodState, desired: DesiredDocument | None) -> SleepState | None:
    """How the engine sleeps, or why it does not although it is asked to."""
    if state.sleep is not None or state.sleep_refusal is None:
        return state.sleep
    if desired is None or desired.sleep is None:
        return None
    return SleepState(
        level=desired.sleep.level, tags=(), released=False, message=state.sleep_refusal
    )


def resident_tags(state: PodState) -> tuple[SleepTag, ...]:
    """What of the memory is not released: all of it where sleeping releases none."""
    released = state.asleep if state.sleep and state.sleep.released else frozenset()
    return tuple(tag for tag in SleepTag if tag not in released)


def _update_of(state: PodState) -> UpdateState | None:
    update = state.update
    if update is None or not state.weights_asleep:
        return update
    message = _ASLEEP.get(update.phase)
    return update.model_copy(update={"message": message}) if message else update


def render_state(
    *,
    state: PodState,
    desired: DesiredDocument | None,
    boot_id: str,
    revision: int,
    unfinished: int,
) -> StateDocument:
    """The document of this moment."""
    held = held_weights(state)
    version = held.version if held else None
    needed = needed_push(desired, state)
    return StateDocument(
        revision=revision,
        boot_id=boot_id,
        phase=phase_of(state),
        weight_version=version,
        weight_step=held.step if held else None,
        desired_version=wanted_weights(desired).version if desired else None,
        owner=desired.owner if desired else None,
        generation=desired.generation if desired else None,
        gate=GateState.OPEN if state.gate_open else GateState.CLOSED,
        ready=is_ready(state),
        unfinished=unfinished,
        resident=resident_tags(state),
        sleep=sleep_of(state, desired),
        committed=state.committed,
        needs=needed.version if needed else None,
        rejected=state.rejected,
        rejected_message=state.rejected_message,
        update=_update_of(state),
        ranks=tuple(
            RankState(
                rank=rank.rank,
                host=rank.host,
                weight_version=version,
                path=rank.path,
                note=rank.note,
            )
            for rank in state.ranks
        ),
        last_error=state.last_error,
        engine=state.info,
    )


def same_news(a: StateDocument, b: StateDocument) -> bool:
    """Whether nobody who waits for news has to be told of ``b`` after ``a``."""
    return a.model_dump(exclude=COUNTERS) == b.model_dump(exclude=COUNTERS)


def begin_update(
    ref: WeightsRef, previous: UpdateState | None, *, attempt: int, now_unix: float
) -> UpdateState:
    """The record of an update that begins, or goes on after a failure, at its preparation."""
    goes_on = (
        previous is not None
        and previous.target == ref.version
        and previous.phase not in (UpdatePhase.COMMITTED, UpdatePhase.REJECTED)
    )
    # a retry is no news: who watches would be told of the same failure again and again
    is_retry = goes_on and previous is not None and previous.phase is UpdatePhase.WAITING
    return UpdateState(
        target=ref.version,
        phase=UpdatePhase.WAITING if is_retry else UpdatePhase.PREFETCHING,
        attempt=attempt,
        seconds=UpdateSeconds(),
        # what went wrong last stays readable until it went well
        message=previous.message if goes_on and previous else "",
        started_at=previous.started_at if goes_on and previous else now_unix,
    )

"""What a pod needs of a trainer: pure."""

from rollout_pod.protocol import DesiredDocument, WeightsRef
from rollout_pod.supervisor.state import (
    EngineStatus,
    PodState,
    StageStatus,
    fallback_weights,
    wanted_weights,
)


def is_at_hand(state: PodState, ref: WeightsRef) -> bool:
    """Its bytes can be had now: staged by the agent, or offered by a trainer that holds them."""
    stage = state.stage
    return stage is not None and stage.ref == ref and stage.status is StageStatus.READY


def needed_push(desired: DesiredDocument | None, state: PodState) -> WeightsRef | None:
    """The version that only a trainer can bring, and that it may offer now; None if there is none.

    Where both the wanted version and the fallback are pushed, the fallback is asked for only once
    the wanted one was rejected or cannot be fetched. While the weights sleep there is nothing to
    load into.
    """
    if desired is None or state.engine is not EngineStatus.UP or state.draining:
        return None
    if state.weights_asleep:
        return None
    wanted = wanted_weights(desired)
    serves = state.committed is not None and not state.poisoned
    if serves and state.committed and state.committed.version == wanted.version:
        return None
    is_rejected = state.rejects(wanted)
    if wanted.is_pushed and not is_rejected:
        return None if is_at_hand(state, wanted) else wanted
    if serves:
        return None
    fallback = fallback_weights(desired, state)
    if fallback is None or fallback.version == wanted.version:
        return wanted if wanted.is_pushed and not is_at_hand(state, wanted) else None
    has_failed = is_rejected or state.stage_failure_of(wanted)[0] > 0
    if not fallback.is_pushed or not has_failed or is_at_hand(state, fallback):
        return None
    return fallback

"""What the conditions say of a replica that sleeps, or is meant to."""

from rollout_operator.api.conditions import Reason
from rollout_operator.api.spec import RolloutSpec
from rollout_operator.plan.actions import Verdict
from rollout_pod.protocol import SleepState, SleepTag, StateDocument


def weights_asleep(state: StateDocument) -> bool:
    """Tell whether nothing can be served or loaded before the weights wake."""
    return state.sleep is not None and SleepTag.WEIGHTS in state.sleep.tags


def asleep(spec: RolloutSpec, state: StateDocument, target: str) -> Verdict | None:
    """Return the verdict on a pod in phase Sleeping; None where it is up to its weights."""
    slept = state.sleep
    if spec.sleep is None or slept is None:
        return Verdict(reason=Reason.WAKING, message="the engine takes its memory back")
    if not _as_asked(spec, slept):
        return Verdict(reason=Reason.FALLING_ASLEEP, message="what sleeps is being changed")
    memory = _memory(slept)
    if weights_asleep(state) and slept.level > 1:
        text = f"{memory}; the weights are dropped, and {target} is loaded when they wake"
        return Verdict(reason=Reason.SLEEPING, message=text)
    if state.weight_version == target:
        return Verdict(reason=Reason.SLEEPING, message=f"{memory}; holds {target}")
    if weights_asleep(state):
        return Verdict(
            reason=Reason.WAITING_FOR_WAKE,
            message=f"{memory}; {target} is loaded when the weights wake",
        )
    return None


def not_asleep(spec: RolloutSpec, state: StateDocument) -> Verdict | None:
    """Return the verdict on a pod that does not sleep; None where it is not asked to."""
    if spec.sleep is None:
        return None
    if state.sleep is not None and not state.sleep.tags:
        return Verdict(
            reason=Reason.SLEEP_UNSUPPORTED,
            message=f"the engine cannot sleep and goes on: {state.sleep.message}",
            stalled=True,
        )
    return Verdict(reason=Reason.FALLING_ASLEEP, message="the engine comes to rest, then sleeps")


def _as_asked(spec: RolloutSpec, slept: SleepState) -> bool:
    if spec.sleep is None or {tag.value for tag in spec.sleep.tags} != set(slept.tags):
        return False
    # what level 2 dropped is lost: it is deep enough for level 1
    return SleepTag.WEIGHTS not in slept.tags or slept.level >= spec.sleep.level


def _memory(slept: SleepState) -> str:
    tags = " and ".join(slept.tags)
    if not slept.released:
        return f"{tags} asleep, but no memory was released: {slept.message}"
    return f"{tags} asleep, {slept.bytes / (1 << 30):.1f} GiB released"

"""``next_step``: from what is asked for and what is, to the one thing to do next.

Level-triggered and pure: the supervisor calls it again after every step and after every change of
the desired document, so that a step that failed, a document that came twice or late, and a process
that was killed in between all end in the same place.
"""

from dataclasses import dataclass

from rollout_pod.protocol import (
    CancelReason,
    DesiredDocument,
    InterruptionMode,
    SleepTag,
    WeightsRef,
)
from rollout_pod.supervisor.pushed import is_at_hand
from rollout_pod.supervisor.state import (
    EngineStatus,
    PodState,
    StageStatus,
    fallback_weights,
    wanted_sleep,
    wanted_weights,
)


@dataclass(frozen=True)
class Load:
    """Start the engine; it loads the model's own checkpoint."""


@dataclass(frozen=True)
class Prefetch:
    """Let the agent fetch a version and every rank check its manifest, beside everything else."""

    ref: WeightsRef


@dataclass(frozen=True)
class AwaitPush:
    """Tell whoever holds a version that it is needed, and let serving go on."""

    ref: WeightsRef


@dataclass(frozen=True)
class CloseGate:
    """Hand no more requests to the engine."""

    reason: CancelReason


@dataclass(frozen=True)
class Cancel:
    """Bring the engine to rest; by default it holds nothing then."""

    mode: InterruptionMode = InterruptionMode.ABORT


@dataclass(frozen=True)
class Transfer:
    """Let the ranks load the staged version. From its first byte on nothing else may be served."""

    ref: WeightsRef
    session: str
    flush: bool
    """Clear what a failed load left in the model first."""
    on_device: bool = False
    """It waits beside the model."""


@dataclass(frozen=True)
class ClearCaches:
    """Forget everything computed under the old weights."""


@dataclass(frozen=True)
class Commit:
    """Publish the loaded version, by one assignment."""

    ref: WeightsRef


@dataclass(frozen=True)
class Relabel:
    """The committed version got another step.

    Another source of it is not looked at: nobody knows whether it holds the same bytes.
    """

    step: int | None


@dataclass(frozen=True)
class GiveUp:
    """Forget a version that was prepared, or could not be: nobody wants it any more."""


@dataclass(frozen=True)
class OpenGate:
    """Let the engine go on, then hand requests to it."""


@dataclass(frozen=True)
class Sleep:
    """Release weights and KV cache, which an engine can only do together. ``Wake`` gives back
    what has to stay.
    """

    level: int


@dataclass(frozen=True)
class Wake:
    """Take released memory back."""

    tags: frozenset[SleepTag]


@dataclass(frozen=True)
class Drain:
    """Refuse new requests, let those in flight go on for a while, then cut them."""


@dataclass(frozen=True)
class Restart:
    """End the process: a container that starts anew is the only repair left."""

    reason: str


@dataclass(frozen=True)
class Wait:
    """Nothing to do before something changes or ``until`` (supervisor's clock, seconds)."""

    until: float | None = None


Step = (
    Load | Prefetch | AwaitPush | GiveUp | CloseGate | Cancel | Transfer | ClearCaches | Commit
    | Relabel | OpenGate | Sleep | Wake | Drain | Restart | Wait
)  # fmt: skip


def choose_target(desired: DesiredDocument, state: PodState, now: float) -> WeightsRef:
    """The version to work towards.

    A pod that serves keeps what it serves until the wanted version is at hand, and does not move
    when that was rejected. A pod that has nothing to serve (new, restarted or poisoned) tries the
    wanted version, then, as soon as that fails, the fallback; without one it tries the wanted
    version whatever it was rejected for. Nobody knows when a trainer will push: until it does, a
    version that can be fetched is the better one.
    """
    wanted = wanted_weights(desired)
    is_rejected = state.rejects(wanted)
    if state.committed is not None and not state.poisoned:
        return state.committed if is_rejected else wanted
    fallback = fallback_weights(desired, state)
    if fallback is None or fallback.version == wanted.version:
        return wanted
    if is_rejected:
        return fallback
    if wanted.is_pushed and not is_at_hand(state, wanted):
        return wanted if fallback.is_pushed else fallback
    if fallback.is_pushed and not is_at_hand(state, fallback):
        return wanted
    stage = state.stage
    failures, retry_at = state.stage_failure_of(wanted)
    if failures and stage and stage.ref == fallback and stage.status is not StageStatus.FAILED:
        return fallback  # on its way already: a retry of the wanted version must not chase it off
    if failures and now < retry_at:
        # both may be failing: then whichever is due next
        fallback_failures, fallback_retry_at = state.stage_failure_of(fallback)
        if not fallback_failures or fallback_retry_at <= max(now, retry_at):
            return fallback
    return wanted


def next_step(desired: DesiredDocument | None, state: PodState, now: float) -> Step:
    """The one thing to do next. ``now`` is on the supervisor's clock, in seconds."""
    if state.engine is EngineStatus.DEAD:
        return Restart(state.last_error or "the engine is dead")
    if state.draining:
        return Wait() if state.drained else Drain()
    if state.engine is EngineStatus.NEW:
        return Load()
    if desired is None:
        return Wait()

    if state.poisoned and state.kept:
        return Cancel()  # they would go on under weights that nobody knows
    target = choose_target(desired, state, now)
    if state.poisoned and not state.weights_asleep:
        failures = state.load_failures_of(target)
        if failures >= desired.max_attempts:
            # nothing else is left to try in this process
            return Restart(f"{target.version} failed {failures} times")

    step = _finish_load(state, target) or _sleep(desired, state)
    if step is not None:
        return step

    until: float | None = None
    if state.poisoned or state.committed is None or state.committed.version != target.version:
        step = _towards(desired, target, state, now)
        if not isinstance(step, Wait):
            return step
        until = step.until
    elif state.committed.step != target.step:
        return Relabel(target.step)
    elif state.stage is not None:
        return GiveUp()
    return _gate(desired, state) or Wait(until)


def _finish_load(state: PodState, target: WeightsRef) -> ClearCaches | Commit | None:
    """What the ranks hold, complete and verified, is committed before anything else is begun.

    What the boot loaded is committed only if somebody wants it: it may be older than what this
    replica served.
    """
    loaded = state.loaded
    if loaded is None or state.poisoned or state.weights_asleep:
        return None
    if state.committed is not None and state.committed.version == loaded.version:
        return None
    if not state.transferred and loaded.version != target.version:
        return None
    if not state.caches_clear:
        return ClearCaches()
    if target.version == loaded.version:  # it may have got another step meanwhile
        return Commit(loaded.model_copy(update={"step": target.step}))
    return Commit(loaded)


def _sleep(desired: DesiredDocument, state: PodState) -> Step | None:
    """The next step to what has to be resident, and nothing else; None where that is so already.

    A deeper sleep than the one asked for will do: what level 2 dropped is lost anyway. For all
    that has to be released beyond what is, the engine wakes first, since it falls asleep only as a
    whole. Weights that are not to stay asleep are never dropped.
    """
    wish = wanted_sleep(desired, state)
    wanted = frozenset(wish.tags) if wish else frozenset()
    is_too_light = (
        wish is not None
        and state.sleep is not None
        and SleepTag.WEIGHTS in wanted & state.asleep
        and state.sleep.level < wish.level
    )
    if wanted <= state.asleep and not is_too_light:
        surplus = state.asleep - wanted
        return Wake(surplus) if surplus else None
    if state.asleep:
        return Wake(state.asleep)
    return _at_rest(desired, state) or Sleep(
        wish.level if wish and SleepTag.WEIGHTS in wanted else 1
    )


def _at_rest(desired: DesiredDocument, state: PodState) -> CloseGate | Cancel | None:
    """The steps to an engine that may fall asleep: it keeps no request, whatever the mode."""
    if state.gate_open or state.closed_for is not CancelReason.SLEEPING:
        return CloseGate(CancelReason.SLEEPING)
    if not state.idle:
        drains = desired.interruption.mode is InterruptionMode.DRAIN
        return Cancel(InterruptionMode.DRAIN) if drains else Cancel()
    return Cancel() if state.kept else None


def _towards(desired: DesiredDocument, target: WeightsRef, state: PodState, now: float) -> Step:
    """The next step of an update; ``Wait`` where the agent is at work, a trainer is waited for or a
    retry is not due.
    """
    stage = state.stage
    if target.is_pushed and not is_at_hand(state, target):
        is_told = stage and stage.ref == target and stage.status is StageStatus.AWAITING
        return Wait() if is_told else AwaitPush(target)
    if stage is None or stage.ref != target or stage.status is StageStatus.FAILED:
        failures, retry_at = state.stage_failure_of(target)
        if failures and now < retry_at:
            return Wait(retry_at)
        return Prefetch(target)
    if stage.status is StageStatus.RUNNING or state.weights_asleep:
        return Wait()
    return _closed(desired, state, CancelReason.UPDATING) or Transfer(
        target, stage.session, flush=state.poisoned, on_device=stage.on_device
    )


def _gate(desired: DesiredDocument, state: PodState) -> Step | None:
    """Sleep, pause or serve; None where that is so already."""
    if state.asleep:
        is_told = state.closed_for is CancelReason.SLEEPING
        return None if is_told else CloseGate(CancelReason.SLEEPING)
    if state.poisoned or state.committed is None:
        return _closed(desired, state, CancelReason.UPDATING)
    if desired.paused:
        return _closed(desired, state, CancelReason.PAUSED)
    if state.gate_open:
        return None
    return OpenGate() if state.caches_clear else ClearCaches()


def _closed(
    desired: DesiredDocument, state: PodState, reason: CancelReason
) -> CloseGate | Cancel | None:
    """The steps to an idle engine behind a closed gate; None where it is so already."""
    mode = desired.interruption.mode
    if state.gate_open:
        return CloseGate(reason)
    if not state.idle:
        return Cancel(mode)
    if state.kept and mode is not InterruptionMode.KEEP:
        return Cancel()  # kept by an earlier wish
    if state.closed_for is not reason:
        return CloseGate(reason)  # the same gate, for another reason: callers are told which
    return None

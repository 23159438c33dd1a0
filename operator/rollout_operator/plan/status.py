"""Renders the status from what was seen and planned."""

from collections.abc import Sequence
from typing import Final

from rollout_operator.api import names
from rollout_operator.api.conditions import (
    Condition,
    ConditionType,
    Reason,
    Truth,
    settle,
    shorten,
)
from rollout_operator.api.replica import Replica
from rollout_operator.api.spec import InterruptionMode
from rollout_operator.api.status import (
    MAX_NOTE,
    MAX_STEPS,
    LastCommitted,
    PodStatus,
    ReplicaStatus,
    UpdateSeconds,
    WeightUpdate,
)
from rollout_operator.api.times import rfc3339
from rollout_operator.plan.actions import Plan, Verdict
from rollout_operator.plan.diagnosis import READY_REASONS, current_state, diagnose, uncertain
from rollout_operator.plan.document import wanted_version
from rollout_operator.plan.history import asker, committed_source, with_update
from rollout_operator.plan.observed import Ownership, PodSeen, Seen
from rollout_operator.plan.sleep import weights_asleep
from rollout_pod.protocol import (
    DATA_PORT,
    PodPhase,
    RankState,
    StateDocument,
    UpdatePhase,
    UpdateState,
)

_ON_THE_WAY: Final = {
    UpdatePhase.STAGED: "Prefetching",
    UpdatePhase.GIVEN_UP: "AwaitingPush",
    UpdatePhase.CANCELLING: "Transferring",
    UpdatePhase.COMMITTING: "Transferring",
}
"""Steps of milliseconds are no news: each would be a write."""
_OVER: Final = (UpdatePhase.COMMITTED, UpdatePhase.REJECTED)
_MAX_ERROR: Final = 1024


def render_status(replica: Replica, seen: Seen, plan: Plan, now: float) -> ReplicaStatus:
    """Return the whole status; equal to the present one where there is nothing to tell."""
    previous = replica.status
    pod = seen.pod if seen.pod and seen.pod.owner is Ownership.OURS else None
    if replica.deleting:
        return previous.model_copy(update={"phase": "Terminating"})
    if plan.verdict is None and uncertain(pod, seen.report):
        return previous
    state = current_state(pod, seen.report)
    verdict = plan.verdict or diagnose(replica, seen)
    ours = state if state is not None and state.owner == replica.uid else None
    update = _update(ours, replica) or previous.weight_update
    return ReplicaStatus(
        observed_generation=replica.generation,
        phase=_phase(pod, state, verdict),
        conditions=_conditions(replica, pod, state, verdict, now),
        weight_version=_everywhere(state),
        last_committed=_last_committed(ours) or previous.last_committed,
        weight_update=update,
        history=with_update(previous.history, update, previous.weight_update, ours),
        endpoint=(
            f"http://{names.service_name(replica.name)}.{replica.namespace}.svc:{DATA_PORT}"
            if seen.services[0] and seen.services[0].owner is Ownership.OURS
            else ""
        ),
        pods=(
            *(() if pod is None else (_pod(pod, state, verdict),)),
            *(_follower(f, state) for f in seen.followers if f.owner is Ownership.OURS),
        ),
        restarts=plan.restarts,
    )


def render_failure(replica: Replica, error: Exception, now: float) -> ReplicaStatus:
    """Return the status of a replica that the operator fails at, for a reason nobody foresaw.

    What is known of the pod stays. Equal to the present status where this error is told already.
    """
    previous = replica.status
    kind = type(error).__name__
    before = previous.condition(ConditionType.READY)
    if (
        before is not None
        and (before.reason, before.observed_generation)
        == (Reason.INTERNAL_ERROR, replica.generation)
        and before.message.startswith(f"{kind}: ")
    ):
        # its text may differ each time, by an address for one: no news
        return previous
    text = (
        f"{kind}: {shorten(str(error) or 'no text', _MAX_ERROR)}; the operator cannot go on with "
        "this replica and tries again. This is a fault of the operator: its log has the traceback "
        '(event "pass failed")'
    )
    return _failing(replica, Reason.INTERNAL_ERROR, text, now)


def render_refusal(replica: Replica, message: str, now: float) -> ReplicaStatus:
    """Return the status of a replica of which the API server forbids to know more."""
    return _failing(replica, Reason.POD_FORBIDDEN, message, now)


def _failing(replica: Replica, reason: Reason, text: str, now: float) -> ReplicaStatus:
    previous = replica.status
    values: dict[ConditionType, tuple[Truth, Reason, str]] = {
        ConditionType.READY: ("False", reason, text),
        ConditionType.RECONCILING: ("True", reason, text),
        ConditionType.STALLED: ("False", Reason.NOT_STALLED, ""),
    }
    failing = tuple(_condition(replica, kind, *value, now) for kind, value in values.items())
    others = tuple(c for c in previous.conditions if c.type not in values)
    return previous.model_copy(
        update={"observed_generation": replica.generation, "conditions": failing + others}
    )


def _condition(
    replica: Replica, kind: ConditionType, value: Truth, reason: Reason, message: str, now: float
) -> Condition:
    new = Condition(
        type=kind,
        status=value,
        reason=reason,
        message=shorten(message),
        observed_generation=replica.generation,
        last_transition_time=rfc3339(now),
    )
    return settle(new, replica.status.condition(kind))


def _phase(pod: PodSeen | None, state: StateDocument | None, verdict: Verdict) -> str:
    if pod is not None and pod.deleting:
        return "Draining"
    if state is not None:
        return state.phase.value
    if verdict.reason is Reason.POD_UNREACHABLE:
        return "Unknown"
    if verdict.stalled:
        return "Failed"
    return "Loading" if pod is not None and pod.answering else "Pending"


def _conditions(
    replica: Replica,
    pod: PodSeen | None,
    state: StateDocument | None,
    verdict: Verdict,
    now: float,
) -> tuple[Condition, ...]:
    ready = verdict.reason in READY_REASONS
    unknown = verdict.reason is Reason.POD_UNREACHABLE and pod is not None and pod.ready
    working = not ready and not verdict.stalled
    text = verdict.message

    def condition(kind: ConditionType, value: Truth, reason: Reason, message: str) -> Condition:
        return _condition(replica, kind, value, reason, message, now)

    return (
        condition(
            ConditionType.READY,
            "True" if ready else "Unknown" if unknown else "False",
            verdict.reason,
            text,
        ),
        condition(
            ConditionType.RECONCILING,
            "True" if working else "False",
            verdict.reason if working else Reason.SETTLED,
            text if working else "",
        ),
        condition(
            ConditionType.STALLED,
            "True" if verdict.stalled else "False",
            verdict.reason if verdict.stalled else Reason.NOT_STALLED,
            text if verdict.stalled else "",
        ),
        condition(ConditionType.AVAILABLE, *_available(pod, state, verdict)),
        condition(ConditionType.PAUSED, *_paused(replica, state)),
        condition(ConditionType.WEIGHTS_READY, *_weights_ready(replica, state, verdict)),
    )


def _available(
    pod: PodSeen | None, state: StateDocument | None, verdict: Verdict
) -> tuple[Truth, Reason, str]:
    if pod is not None and pod.ready and not pod.deleting:
        if state is None:
            # readiness means that an allowed version is served; kubelet says so
            return "True", Reason.SERVING, "kubelet calls the pod ready"
        if state.ready:
            return "True", Reason.SERVING, f"holds {state.weight_version}"
    if state is not None and weights_asleep(state):
        return (
            "False",
            Reason.SLEEPING,
            "the weights are asleep; nothing is served before they wake",
        )
    return "False", Reason.NOT_SERVING, verdict.message


def _paused(replica: Replica, state: StateDocument | None) -> tuple[Truth, Reason, str]:
    if state is not None and state.phase is PodPhase.PAUSED:
        spec = replica.spec
        keeps = spec is not None and spec.interruption.mode is InterruptionMode.KEEP
        held = "requests are kept in the engine" if keeps else "no request is in the engine"
        return "True", Reason.PAUSED, f"the gate is closed; {held}"
    if state is not None and state.phase is PodPhase.SLEEPING:
        return "True", Reason.SLEEPING, "the gate is closed, and the engine sleeps"
    if replica.spec is not None and replica.spec.paused:
        return "False", Reason.PAUSING, "spec.paused has yet to take effect"
    return "False", Reason.NOT_PAUSED, ""


def _weights_ready(
    replica: Replica, state: StateDocument | None, verdict: Verdict
) -> tuple[Truth, Reason, str]:
    if state is None or replica.spec is None:
        unknown = verdict.reason is Reason.POD_UNREACHABLE
        return "Unknown" if unknown else "False", verdict.reason, verdict.message
    target, held = wanted_version(replica.spec), _everywhere(state)
    told = state.desired_version == target
    if held == target and told:
        return "True", Reason.COMMITTED, f"every rank holds {target}"
    settled = READY_REASONS - {Reason.SLEEPING}
    reason = verdict.reason if verdict.reason not in settled else Reason.UPDATING
    return "False", reason, verdict.message


def _everywhere(state: StateDocument | None) -> str:
    """Return the version that the head and every rank hold; empty where they differ."""
    if state is None or state.weight_version is None:
        return ""
    if any(rank.weight_version != state.weight_version for rank in state.ranks):
        return ""
    return state.weight_version


def _last_committed(state: StateDocument | None) -> LastCommitted | None:
    if state is None or state.committed is None:
        return None
    ref = state.committed
    return LastCommitted(version=ref.version, step=ref.step, source=committed_source(ref))


def _steps(update: UpdateState) -> dict[str, float] | None:
    """The longest ones."""
    longest = sorted(update.steps.items(), key=lambda step: -step[1])[:MAX_STEPS]
    return {name: round(seconds, 3) for name, seconds in longest} or None


def _paths(ranks: Sequence[RankState]) -> str | None:
    return shorten(", ".join(sorted({rank.path for rank in ranks if rank.path})), 64) or None


def _note(update: UpdateState, ranks: Sequence[RankState]) -> str | None:
    """Once what several ranks say."""
    said = dict.fromkeys(text for text in (update.note, *(r.note for r in ranks)) if text)
    return shorten("; ".join(said), MAX_NOTE) or None


def _update(state: StateDocument | None, replica: Replica) -> WeightUpdate | None:
    update = state.update if state else None
    if state is None or update is None:
        return None
    ranks = state.ranks if update.phase is UpdatePhase.COMMITTED else ()
    over = update.phase in _OVER
    took = update.seconds
    offered = update.session is not None and update.phase is UpdatePhase.STAGED
    return WeightUpdate(
        target=update.target,
        phase="Transferring" if offered else _ON_THE_WAY.get(update.phase, update.phase.value),
        attempt=update.attempt,
        started_at=_stamp(update.started_at),
        finished_at=_stamp(update.finished_at) if over else None,
        paused_seconds=_round(took.paused) if over else None,
        seconds=(
            UpdateSeconds(
                prefetch=_round(took.prefetch),
                cancel=_round(took.cancel),
                transfer=_round(took.transfer),
                commit=_round(took.commit),
                steps=_steps(update),
            )
            if over
            else None
        ),
        bytes=update.bytes if over else None,
        transport=update.transport,
        mode=update.mode,
        path=_paths(ranks) if over else None,
        note=_note(update, ranks) if over else None,
        message=shorten(update.message),
        by=asker(replica, update.target, _stamp(update.started_at)),
    )


def _pod(pod: PodSeen, state: StateDocument | None, verdict: Verdict) -> PodStatus:
    return PodStatus(
        name=pod.name,
        rank=0,
        node=pod.node,
        ready=pod.ready,
        boot_id=state.boot_id if state else "",
        phase=_phase(pod, state, verdict),
        weight_version=state.weight_version or "" if state else "",
        message="" if verdict.reason in READY_REASONS else shorten(verdict.message),
    )


def _follower(pod: PodSeen, state: StateDocument | None) -> PodStatus:
    """A pod of another rank: what its own ranks hold is what they told the head."""
    held = (
        {rank.weight_version for rank in state.ranks if rank.host == pod.name} if state else set()
    )
    phase = "Draining" if pod.deleting else "Failed" if pod.over else "Pending"
    if phase == "Pending" and pod.answering:
        phase = "Following" if pod.ready else "Loading"
    return PodStatus(
        name=pod.name,
        rank=pod.rank,
        node=pod.node,
        ready=pod.ready,
        phase=phase,
        weight_version=(held.pop() or "") if len(held) == 1 else "",
        message=shorten(pod.unschedulable or pod.failure),
    )


def _stamp(unix: float | None) -> str | None:
    return None if unix is None else rfc3339(unix)


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)

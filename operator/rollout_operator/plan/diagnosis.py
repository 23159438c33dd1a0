"""Why a replica is ready or not: one verdict from pod, containers and state document."""

from typing import Final

from rollout_operator.api.conditions import ConditionType, Reason
from rollout_operator.api.replica import Replica
from rollout_operator.api.spec import Interruption, InterruptionMode, RolloutSpec
from rollout_operator.plan.actions import Verdict
from rollout_operator.plan.document import wanted_version
from rollout_operator.plan.observed import ContainerSeen, PodSeen, Report, Seen
from rollout_operator.plan.obstacle import CRASH_LOOP, death, obstacle, out_of_memory
from rollout_operator.plan.sleep import asleep, not_asleep, weights_asleep
from rollout_pod.protocol import PodPhase, StateDocument, UpdatePhase

UNREACHABLE_GRACE_S: Final = 10.0
"""So long what a pod said last (or what the status says) counts, although it does not answer."""
_ENGINE_TROUBLE: Final = frozenset(
    {Reason.ENGINE_FAILED, Reason.ENGINE_RESTARTING, Reason.OOM_KILLED}
)
_STARTING: Final = frozenset({Reason.POD_STARTING, Reason.ENGINE_STARTING})
READY_REASONS: Final = frozenset({Reason.SERVING, Reason.PAUSED, Reason.SLEEPING})


def current_state(pod: PodSeen | None, report: Report | None) -> StateDocument | None:
    """Return what the pod is, as far as it can be known; None where it cannot."""
    if pod is None or report is None or not pod.answering:
        return None
    if report.error and not (pod.ready and report.failing_for < UNREACHABLE_GRACE_S):
        return None
    return report.state


def uncertain(pod: PodSeen | None, report: Report | None) -> bool:
    """Tell whether nothing can be said yet of a pod that kubelet calls ready."""
    return (
        pod is not None
        and pod.ready
        and pod.answering
        and current_state(pod, report) is None
        and (report is None or report.failing_for < UNREACHABLE_GRACE_S)
    )


def diagnose(replica: Replica, seen: Seen) -> Verdict:
    """Return the reason of the condition Ready for a replica whose pod is ours.

    Raises:
        ValueError: the replica has no spec: its plan has the verdict.
    """
    if replica.spec is None:
        raise ValueError(replica.invalid)
    pod, report = seen.pod, seen.report
    if pod is None:
        return Verdict(reason=Reason.POD_CREATING, message="the pod is being created")
    verdict = _containers(replica, pod, current_state(pod, report))
    if verdict is not None:
        return verdict
    if report is not None and report.unauthorized:
        return Verdict(
            reason=Reason.UNAUTHORIZED,
            message=f"pod {pod.name} refuses the token of Secret {replica.name}-admin; a changed "
            "Secret takes up to two minutes to reach a pod",
        )
    if report is not None and report.refused:
        return Verdict(
            reason=Reason.DOCUMENT_REFUSED,
            message=f"pod {pod.name} refuses what it is told: {report.refused}; its image may be "
            "older than the operator",
        )
    state = current_state(pod, report)
    verdict = _silent(pod, report) if state is None else _engine(replica, replica.spec, pod, state)
    return _still(replica, _among_others(replica, seen, verdict))


def _among_others(replica: Replica, seen: Seen, verdict: Verdict) -> Verdict:
    """What keeps a head from starting, or a replica from being ready, may be a pod beside it."""
    if verdict.reason not in _STARTING | READY_REASONS:
        return verdict
    for pod in seen.followers:
        trouble = _containers(replica, pod, None)
        if trouble is not None:
            return trouble
    missing = seen.nodes - 1 - len(seen.followers)
    if missing > 0:
        text = f"{missing} of {seen.nodes} pods are being created"
        return Verdict(reason=Reason.POD_CREATING, message=text)
    late = next((pod for pod in seen.followers if not pod.ready), None)
    if late is None:
        return verdict
    if verdict.reason in READY_REASONS:
        return _readiness_pending(late)
    if not late.answering:
        text = f"the containers of pod {late.name} are starting; the engine waits for them"
        return Verdict(reason=Reason.POD_STARTING, message=text)
    return verdict


def _still(replica: Replica, verdict: Verdict) -> Verdict:
    """Keep to what is known of an engine that is started again and has not come up yet."""
    before = replica.status.condition(ConditionType.READY)
    if (
        verdict.reason is Reason.ENGINE_STARTING
        and before is not None
        and before.observed_generation == replica.generation
        and before.reason in _ENGINE_TROUBLE
    ):
        stalled = replica.status.condition(ConditionType.STALLED)
        return Verdict(
            reason=Reason(before.reason),
            message=before.message,
            stalled=stalled is not None and stalled.status == "True",
        )
    return verdict


def _containers(replica: Replica, pod: PodSeen, state: StateDocument | None) -> Verdict | None:
    found = obstacle(pod)
    if found is not None:
        return found
    if pod.engine is not None:
        return _engine_trouble(replica, pod, pod.engine, state)
    return None


def _engine_trouble(
    replica: Replica, pod: PodSeen, engine: ContainerSeen, state: StateDocument | None
) -> Verdict | None:
    failed = state is not None and state.phase is PodPhase.FAILED
    died = engine.exit_code is not None and not pod.ready
    up = state is not None and state.phase not in (PodPhase.LOADING, PodPhase.FAILED)
    if up or not (failed or died):
        return None
    text = (state.last_error if failed and state else None) or death(engine)
    before = replica.status.condition(ConditionType.READY)
    was = before.reason if before is not None else ""
    trouble = replica.status.condition(ConditionType.STALLED)
    stuck = was in _ENGINE_TROUBLE and trouble is not None and trouble.status == "True"
    available = replica.status.condition(ConditionType.AVAILABLE)
    at_start = (available is None or available.status != "True") and was not in _ENGINE_TROUBLE
    # an engine that served is given its restart; one that never came up needs a person
    stalled = at_start or stuck or engine.waiting == CRASH_LOOP
    oom = not failed and out_of_memory(engine)
    if oom:
        message = (
            f"the engine of pod {pod.name} was killed, since it reached its memory limit: {text}; "
            "it is started again. Raise resources.limits.memory of the container engine in "
            "spec.template, or make the engine smaller by spec.engineArgs"
        )
        return Verdict(reason=Reason.OOM_KILLED, message=message, stalled=stalled)
    if stalled:
        return Verdict(
            reason=Reason.ENGINE_FAILED,
            message=f"the engine of pod {pod.name} does not start: {text}; it is started again "
            "with growing pauses. Mend spec.model, spec.engine, spec.engineArgs or spec.template",
            stalled=True,
        )
    return Verdict(
        reason=Reason.ENGINE_RESTARTING,
        message=f"the engine of pod {pod.name} ended and is started again: {text}",
    )


def _silent(pod: PodSeen, report: Report | None) -> Verdict:
    if not pod.answering:
        return Verdict(
            reason=Reason.POD_STARTING, message=f"the containers of pod {pod.name} are starting"
        )
    error = report.error if report is not None else ""
    # a process that has just ended does not answer either, before kubelet tells of its end
    moment = report is None or report.failing_for < UNREACHABLE_GRACE_S
    if not pod.ready and (moment or report is None or report.state is None):
        return Verdict(
            reason=Reason.ENGINE_STARTING,
            message=f"the engine of pod {pod.name} is starting; its admin port does not answer",
        )
    return Verdict(
        reason=Reason.POD_UNREACHABLE,
        message=f"the admin port of pod {pod.name} ({pod.ip}) does not answer: {error}. Nothing is "
        "changed until it does; look for network policies and at the node",
    )


def _engine(replica: Replica, spec: RolloutSpec, pod: PodSeen, state: StateDocument) -> Verdict:
    target = wanted_version(spec)
    if state.phase is PodPhase.LOADING:
        return Verdict(reason=Reason.ENGINE_STARTING, message="the engine is starting")
    if state.phase is PodPhase.DRAINING:
        return Verdict(reason=Reason.DRAINING, message=f"pod {pod.name} lets its requests end")
    if (state.owner, state.generation) != (replica.uid, replica.generation):
        return Verdict(
            reason=Reason.UPDATING,
            message=f"pod {pod.name} has yet to take generation {replica.generation}",
        )
    if state.phase is PodPhase.SLEEPING:
        verdict = asleep(spec, state, target)
        if verdict is not None:
            ready = pod.ready or weights_asleep(state) or verdict.reason is not Reason.SLEEPING
            return verdict if ready else _readiness_pending(pod)
    trouble = _rejected(target, state) or _awaiting(state) or _unavailable(target, state)
    if trouble is not None:
        return trouble
    if state.phase is PodPhase.POISONED:
        return Verdict(
            reason=Reason.POISONED,
            message=f"an update failed in the middle ({state.last_error or 'no reason given'}); "
            "nothing is served until a complete one commits",
        )
    if state.weight_version is None:
        return Verdict(reason=Reason.LOADING_WEIGHTS, message=f"{target} is being loaded")
    if state.weight_version != target or state.phase is PodPhase.UPDATING:
        return Verdict(
            reason=Reason.UPDATING, message=f"{target} is on its way; {state.weight_version} serves"
        )
    return _gate(spec, pod, state)


def _rejected(target: str, state: StateDocument) -> Verdict | None:
    if state.rejected is not None and state.rejected.version == target:
        text = state.rejected_message or "no reason given"
        held = f"{state.weight_version} is held" if state.weight_version else "nothing is served"
        return Verdict(
            reason=Reason.UPDATE_FAILED,
            message=f"{target} was rejected: {text}; {held}. Mend the source and set another "
            "weightVersion",
            stalled=True,
        )
    return None


def _awaiting(state: StateDocument) -> Verdict | None:
    """Only a trainer can go on from here; nothing is broken until it does."""
    if state.needs is None:
        return None
    serving = f"{state.weight_version} serves on" if state.weight_version else "nothing is served"
    update = state.update
    failed = f" (the last attempt: {update.message})" if update and update.message else ""
    return Verdict(
        reason=Reason.AWAITING_PUSH,
        message=f"a trainer has to push {state.needs}{failed}; {serving} until then. Push it from "
        "a container of this pod that sees ROLLOUT_RUN_DIR, or ask for another weightVersion",
    )


def _unavailable(target: str, state: StateDocument) -> Verdict | None:
    update = state.update
    if (
        update is not None
        and update.target == target
        and state.weight_version != target
        and update.phase in (UpdatePhase.WAITING, UpdatePhase.FAILED)
    ):
        serving = f"{state.weight_version} serves on" if state.weight_version else "nothing serves"
        return Verdict(
            reason=Reason.WEIGHTS_UNAVAILABLE,
            message=f"{target} cannot be loaded: {update.message}; it is tried again, {serving}",
        )
    return None


def _readiness_pending(pod: PodSeen) -> Verdict:
    return Verdict(
        reason=Reason.READINESS_PENDING,
        message=f"pod {pod.name} is up; its readiness probe has yet to see it",
    )


def _gate(spec: RolloutSpec, pod: PodSeen, state: StateDocument) -> Verdict:
    verdict = not_asleep(spec, state)
    if verdict is not None:
        return verdict
    if spec.paused and state.phase is not PodPhase.PAUSED:
        return Verdict(reason=Reason.PAUSING, message=_pausing(spec.interruption))
    if not spec.paused and state.phase is not PodPhase.SERVING:
        return Verdict(reason=Reason.RESUMING, message="the gate is about to open")
    if not (state.ready and pod.ready):
        return _readiness_pending(pod)
    if spec.paused:
        kept = "; requests are kept" if spec.interruption.mode is InterruptionMode.KEEP else ""
        return Verdict(reason=Reason.PAUSED, message=f"paused at {state.weight_version}{kept}")
    return Verdict(reason=Reason.SERVING, message=f"serves {state.weight_version}")


def _pausing(interruption: Interruption) -> str:
    match interruption.mode:
        case InterruptionMode.ABORT:
            return "requests in flight are being returned"
        case InterruptionMode.KEEP:
            return "requests in flight are being held"
        case InterruptionMode.DRAIN:
            return (
                "requests in flight may end by themselves, for "
                f"{interruption.timeout_seconds} s at most"
            )

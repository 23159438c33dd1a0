"""Why the pods of a replica end, as one: what came from outside, and what is their own fault."""

from dataclasses import dataclass, replace
from typing import Final

from rollout_operator.api.conditions import Reason
from rollout_operator.api.spec import RolloutSpec
from rollout_operator.plan.actions import Verdict
from rollout_operator.plan.containers import join_timeout_s
from rollout_operator.plan.observed import PodSeen, Report, Seen
from rollout_operator.plan.obstacle import death, obstacle, out_of_memory
from rollout_pod.protocol import PodPhase

OVERDUE_S: Final = 60.0
"""So long after it must have ended a pod of a lost node is given up."""
CAUSE_S: Final = 30.0
"""So long after one pod of a group has drained kubelet may take to say why another one ends."""
_TOGETHER_S: Final = 10.0
"""The pods of a group are made one after the other; one that comes later replaces one."""
_REFUSED_S: Final = 60.0
"""A process that comes too late learns of it within, and its head has given the earlier one up."""
_BY_TAINT: Final = "DeletionByTaintManager"
_SHUTDOWN: Final = frozenset({"Terminated", "NodeShutdown", "Shutdown"})
_DISRUPTIONS: Final = {
    "EvictionByEvictionAPI": Reason.EVICTED,
    _BY_TAINT: Reason.EVICTED,
    "PreemptionByScheduler": Reason.PREEMPTED,
    "DeletionByPodGC": Reason.NODE_LOST,
    "TerminationByKubelet": Reason.NODE_SHUTDOWN,
}

_NOT_STARTED: Final = frozenset({PodPhase.LOADING, PodPhase.DRAINING, PodPhase.FAILED})
"""Phases of a pod whose engine may never have started."""
_LIKE_EFFECTS: Final = frozenset({Reason.POD_FAILED, Reason.ENGINE_FAILED})
"""What the end of another pod of the group looks like, too."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Why a pod ended, or ends."""

    reason: Reason
    message: str
    failure: bool
    """Whether the replica itself may be at fault: only these count towards ``maxRestarts``."""


def depends_on_node(pod: PodSeen, now: float) -> bool:
    """Tell whether what becomes of the pod is known only of its node: a taint ends pods of a node
    that is lost, and of one that a person wants empty.
    """
    overdue = now >= pod.delete_by + OVERDUE_S
    return bool(pod.deleting and pod.node and (overdue or pod.disruption == _BY_TAINT))


def end_of(spec: RolloutSpec, seen: Seen, now: float) -> End | None:
    """Return why the replica's pods end; None where they do not, where a person deleted one, or
    where it :func:`shows_at` a later time.

    Of several that end, what came from outside is the cause, then a lack of memory: the others end
    since their engine has.
    """
    pod = seen.pod
    lives = pod is not None and not (pod.deleting or pod.over)
    if lives and seen.report is not None and seen.report.fenced:
        text = "it obeys another owner or a later generation"
        return End(reason=Reason.FENCED, message=text, failure=False)
    found = [
        (member, end)
        for member in group_of(seen)
        if (end := _end(member, lost=seen.on_lost_node(member))) is not None
    ]
    ends = [(member, end) for member, end in found if not _is_effect(seen, member, end)]
    if not ends:
        return _vanished(seen)
    if shows_at(seen, now) is not None:
        return None
    if all(end.reason in _LIKE_EFFECTS for _, end in ends):
        incomplete = _incomplete(spec, seen)
        if incomplete is not None:
            return incomplete
    member, end = min(ends, key=lambda found: _weight(found[1]))
    return end if member is pod else replace(end, message=f"{member.name}: {end.message}")


def group_of(seen: Seen) -> tuple[PodSeen, ...]:
    """Return the pods that are one engine: the head and those that follow it; without a head, all
    that are left.
    """
    if seen.pod is None:
        return seen.followers
    return (seen.pod, *(pod for pod in seen.followers if pod.group == seen.pod.uid))


def missing_ranks(spec: RolloutSpec, seen: Seen) -> tuple[int, ...]:
    """Return the ranks whose name no pod has."""
    there = {pod.rank for pod in seen.followers}
    return tuple(rank for rank in range(1, spec.nodes) if rank not in there)


def drained(pod: PodSeen) -> bool:
    """Tell whether the pod's engine is over, and ended as one that was asked to."""
    ended = pod.over and pod.engine is not None and pod.engine.exit_code == 0
    return pod.phase == "Succeeded" or ended


def shows_at(seen: Seen, now: float) -> float | None:
    """Return until when, at most, the cause of an end is waited for; None where it is not.

    Kubelet that ends a pod since its node shuts down, or is short of memory, says so only when the
    pod is over. Until then a group that drains looks as if nobody had asked it to.
    """
    members = group_of(seen)
    ended = [pod.engine.ended_at for pod in members if drained(pod) and pod.engine]
    open_ = any(pod.phase not in ("Failed", "Succeeded") for pod in members)
    if len(members) < 2 or len(members) < seen.nodes or not (ended and open_):
        return None
    if any(pod.deleting for pod in members):
        return None
    causes = (_end(pod, lost=False) for pod in members)
    if any(end is not None and end.reason not in _LIKE_EFFECTS for end in causes):
        return None
    at = max(ended) + CAUSE_S
    return at if now < at else None


def _is_effect(seen: Seen, pod: PodSeen, end: End) -> bool:
    """Tell whether the pod has ended as it should, since another was asked to end or is gone."""
    if end.reason not in _LIKE_EFFECTS:
        return False
    members = group_of(seen)
    asked = any(member.deleting for member in members if member is not pod)
    if drained(pod):
        return asked or len(members) < seen.nodes
    # its ranks lose their engine when the head's process ends
    return pod.rank > 0 and (asked or seen.pod is None)


def _incomplete(spec: RolloutSpec, seen: Seen) -> End | None:
    """Return why pods of a group ended that lacked another one; None where none was lacking.

    An engine that ends at once, whoever is there (a wrong argument), has failed, although the
    images of the other pods are still on their way.
    """
    head, members = seen.pod, group_of(seen)
    dead = [p.engine for p in members if p.over and p.engine is not None and p.engine.exit_code]
    if head is None or spec.nodes == 1 or not dead:
        return None
    first = min(dead, key=lambda engine: engine.ended_at)
    waited = first.ended_at - first.started_at
    if waited >= join_timeout_s(spec):
        lacking = _not_started(seen, first.ended_at)
        if lacking is not None:
            text = f"the others waited {waited:.0f} s for a pod that did not start: "
            return End(reason=lacking.reason, message=text + lacking.message, failure=False)
    gone = _absent(seen)
    # one that is refused was never there: the engine has not started with it
    if gone and seen.refusal is None and first.ended_at > head.created + _TOGETHER_S:
        return _gone(gone)
    for pod in members:
        began = pod.engine.started_at if pod.engine and pod.engine.ran else first.ended_at
        if pod.created > head.created + _TOGETHER_S and first.ended_at < began + _REFUSED_S:
            text = f"the engine started with a pod before {pod.name}, which is gone"
            return End(reason=Reason.NODE_POD_GONE, message=text, failure=False)
    return None


def _not_started(seen: Seen, at: float) -> Verdict | None:
    """Return what kept a pod of the group from running by then; None where all ran."""
    members = group_of(seen)
    for pod in members:
        if pod.over or (pod.engine is not None and pod.engine.ran and pod.engine.started_at < at):
            continue
        text = f"the containers of pod {pod.name} were starting"
        return obstacle(pod) or Verdict(reason=Reason.POD_STARTING, message=text)
    gone = _absent(seen)
    if gone and seen.refusal is not None:
        return Verdict(reason=seen.refusal.reason, message=seen.refusal.message)
    text = f"the pod of rank {', '.join(gone)} is not there"
    return Verdict(reason=Reason.NODE_POD_GONE, message=text) if gone else None


def _vanished(seen: Seen) -> End | None:
    """An engine that has started, and lacks a pod: no new one can take its place."""
    head = seen.pod
    if head is None or head.deleting or head.over or head.engine is None:
        return None
    if not (seen.nodes > 1 and (head.engine.started or _says_it_has_started(seen.report))):
        return None
    gone = _absent(seen)
    return _gone(gone) if gone else None


def _says_it_has_started(report: Report | None) -> bool:
    """Tell what the head itself says: kubelet's word comes later, or the watch has lost it."""
    state = None if report is None else report.state
    return state is not None and state.phase not in _NOT_STARTED


def _absent(seen: Seen) -> list[str]:
    """Return the ranks of which the group has no pod."""
    there = {pod.rank for pod in group_of(seen)}
    return [str(rank) for rank in range(seen.nodes) if rank not in there]


def _gone(ranks: list[str]) -> End:
    text = f"the pod of rank {', '.join(ranks)} is gone"
    return End(reason=Reason.NODE_POD_GONE, message=text, failure=False)


def _weight(end: End) -> int:
    if not end.failure:
        return 0
    return {Reason.EVICTED: 1, Reason.OOM_KILLED: 2}.get(end.reason, 3)


def _end(pod: PodSeen, *, lost: bool) -> End | None:
    if not (pod.deleting or pod.over):
        return None
    if pod.deleting and lost:
        text = f"its node {pod.node} is lost"
        return End(reason=Reason.NODE_LOST, message=text, failure=False)
    if pod.evicted_by_kubelet:
        return End(reason=Reason.EVICTED, message=pod.failure, failure=True)
    text = pod.failure or pod.disruption_message or pod.disruption
    if pod.disruption in _DISRUPTIONS:
        return End(reason=_DISRUPTIONS[pod.disruption], message=text, failure=False)
    if not pod.over or pod.deleting:
        # one that was asked to stop ends as asked: that is no failure
        return None
    if pod.reason in _SHUTDOWN:
        return End(reason=Reason.NODE_SHUTDOWN, message=text, failure=False)
    engine = pod.engine
    if pod.final and not text and engine is not None and engine.exit_code:
        reason = Reason.OOM_KILLED if out_of_memory(engine) else Reason.ENGINE_FAILED
        return End(reason=reason, message=death(engine), failure=True)
    # kubelet still ends its sidecar
    phase = "its engine has ended" if pod.phase == "Running" else pod.phase
    return End(reason=Reason.POD_FAILED, message=text or phase, failure=True)

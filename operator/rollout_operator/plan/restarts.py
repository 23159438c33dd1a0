"""What ended a pod or its engine, how often, and when the next one may start.

All of it stands in ``status.restarts``, written before a pod that failed is replaced: an operator
that restarts in between neither forgets a failure nor counts it twice.
"""

from dataclasses import dataclass, replace
from typing import Final

from rollout_operator.api.conditions import ConditionType, Reason, shorten
from rollout_operator.api.replica import Replica
from rollout_operator.api.spec import RestartPolicy, RolloutSpec
from rollout_operator.api.status import RestartCount, Restarts
from rollout_operator.api.times import rfc3339, unix
from rollout_operator.plan.actions import Verdict
from rollout_operator.plan.manifests import pod_hash
from rollout_operator.plan.observed import ContainerSeen, Ownership, PodSeen, Seen

OVERDUE_S: Final = 60.0
"""So long after it must have ended a pod of a lost node is given up."""
_EVICTED: Final = "Evicted"
_BY_TAINT: Final = "DeletionByTaintManager"
_OOM_KILLED: Final = "OOMKilled"
_SHUTDOWN: Final = frozenset({"Terminated", "NodeShutdown", "Shutdown"})
_DISRUPTIONS: Final = {
    "EvictionByEvictionAPI": Reason.EVICTED,
    _BY_TAINT: Reason.EVICTED,
    "PreemptionByScheduler": Reason.PREEMPTED,
    "DeletionByPodGC": Reason.NODE_LOST,
    "TerminationByKubelet": Reason.NODE_SHUTDOWN,
}


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


def end_of(seen: Seen) -> End | None:
    """Return why the replica's pods end; None where they do not, or where a person deleted one.

    Of several that end, what came from outside is the cause, then a lack of memory: the others end
    since their engine has.
    """
    pod = seen.pod
    lives = pod is not None and not (pod.deleting or pod.over)
    if lives and seen.report is not None and seen.report.fenced:
        text = "it obeys another owner or a later generation"
        return End(reason=Reason.FENCED, message=text, failure=False)
    members = group_of(seen)
    asked = any(member.deleting for member in members)
    ends = [
        (member, end)
        for member in members
        if (end := _end(member, lost=_on_lost_node(seen, member))) is not None
        # one that has drained since another was asked to end, or is gone, has done what it should
        and not (member.phase == "Succeeded" and (asked or len(members) < seen.nodes))
    ]
    if not ends:
        return _vanished(seen)
    member, end = min(ends, key=lambda found: _weight(found[1]))
    return end if member is pod else replace(end, message=f"{member.name}: {end.message}")


def group_of(seen: Seen) -> tuple[PodSeen, ...]:
    """Return the pods that are one engine: the head and those that follow it; without a head, all
    that are left.
    """
    if seen.pod is None:
        return seen.followers
    return (seen.pod, *(pod for pod in seen.followers if pod.group == seen.pod.uid))


def has_failed(counted: Restarts | None, seen: Seen) -> bool:
    """Tell whether the present pods' end was counted as a failure of their own."""
    members = group_of(seen)
    if counted is None or not members:
        return False
    uid = members[0].group or members[0].uid
    own = (Reason.POD_FAILED, Reason.ENGINE_FAILED, Reason.OOM_KILLED)
    return (counted.pod_uid, counted.pod_ended) == (uid, True) and counted.last_reason in own


def missing_ranks(spec: RolloutSpec, seen: Seen) -> tuple[int, ...]:
    """Return the ranks whose name no pod has."""
    there = {pod.rank for pod in seen.followers}
    return tuple(rank for rank in range(1, spec.nodes) if rank not in there)


def _vanished(seen: Seen) -> End | None:
    """An engine that has started, and lacks a pod: no new one can take its place."""
    head = seen.pod
    if head is None or head.deleting or head.over or head.engine is None:
        return None
    if not (seen.nodes > 1 and head.engine.started):
        return None
    there = {pod.rank for pod in seen.followers if pod.group == head.uid}
    gone = [str(rank) for rank in range(1, seen.nodes) if rank not in there]
    if not gone:
        return None
    text = f"the pod of rank {', '.join(gone)} is gone"
    return End(reason=Reason.NODE_POD_GONE, message=text, failure=False)


def _weight(end: End) -> int:
    if not end.failure:
        return 0
    return {Reason.EVICTED: 1, Reason.OOM_KILLED: 2}.get(end.reason, 3)


def _on_lost_node(seen: Seen, pod: PodSeen) -> bool:
    if pod is seen.pod:
        return seen.node is not None and seen.node.lost
    return pod.name in seen.lost


def _end(pod: PodSeen, *, lost: bool) -> End | None:
    if not (pod.deleting or pod.over):
        return None
    if pod.deleting and lost:
        text = f"its node {pod.node} is lost"
        return End(reason=Reason.NODE_LOST, message=text, failure=False)
    if pod.reason == _EVICTED:
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
    return End(reason=Reason.POD_FAILED, message=text or pod.phase, failure=True)


def tally(replica: Replica, spec: RolloutSpec, seen: Seen, now: float) -> Restarts | None:
    """Return what ``status.restarts`` has to say; None while nothing ever ended."""
    wanted = pod_hash(spec)
    known = replica.status.restarts
    if known is not None and known.pod_hash != wanted:
        known = known.model_copy(update={"pod_hash": wanted, "consecutive": 0})
    left = steady_in(replica, now)
    if known is not None and known.consecutive and left is not None and left <= 0:
        known = known.model_copy(update={"consecutive": 0})
    members = group_of(seen)
    pod = members[0] if members else None
    if pod is None or pod.owner is not Ownership.OURS or pod.hash != wanted:
        return known
    # a group is counted once, by its head
    uid = pod.group or pod.uid
    end = end_of(seen)
    if end is not None:
        if known is not None and known.pod_uid == uid and known.pod_ended:
            return known
        return _count(known, pod, end, now, ended=True)
    return known if pod.deleting or pod.final else _engine(known, pod, now)


def given_up(spec: RolloutSpec, counted: Restarts) -> Verdict:
    """Return what is said of a replica that failed too often."""
    return Verdict(
        reason=Reason.CRASH_LOOP,
        message=f"gave up after {spec.restart_policy.max_restarts} restarts in a row; the last end "
        f"({counted.last_reason}): {counted.message}. Change what a new pod is made of (model, "
        "image, engineArgs, template…) or raise spec.restartPolicy.maxRestarts",
        stalled=True,
    )


def newly_counted(before: Restarts | None, after: Restarts | None) -> dict[str, int]:
    """Return how many ends ``after`` counts that ``before`` did not, by reason."""
    known = {entry.reason: entry.count for entry in before.by_reason} if before else {}
    new = {entry.reason: entry.count for entry in after.by_reason} if after else {}
    return {r: n - known.get(r, 0) for r, n in new.items() if n > known.get(r, 0)}


def steady_in(replica: Replica, now: float) -> float | None:
    """Seconds until the failures are forgotten; None while the replica is not available."""
    available = replica.status.condition(ConditionType.AVAILABLE)
    if replica.spec is None or available is None or available.status != "True":
        return None
    return (
        unix(available.last_transition_time) + replica.spec.restart_policy.reset_after_seconds - now
    )


def exhausted(policy: RestartPolicy, restarts: Restarts | None) -> bool:
    """Tell whether the replica has failed too often in a row."""
    return restarts is not None and restarts.consecutive > policy.max_restarts


def next_start(policy: RestartPolicy, restarts: Restarts) -> float:
    """Return the unix time before which no pod follows the one that failed."""
    doublings = min(max(restarts.consecutive - 1, 0), 30)
    pause = min(policy.backoff_seconds << doublings, policy.backoff_limit_seconds)
    return unix(restarts.last_at) + pause


def out_of_memory(container: ContainerSeen) -> bool:
    """Tell whether the kernel ended the container since its memory limit was reached."""
    return container.exit_reason == _OOM_KILLED


def death(container: ContainerSeen) -> str:
    """Say how a container ended."""
    reason = container.exit_reason or "Error"
    if container.exit_message:
        killed = f"{reason}: " if out_of_memory(container) else ""
        return killed + container.exit_message
    return f"{reason}, exit code {container.exit_code}; see its log"


def _engine(known: Restarts | None, pod: PodSeen, now: float) -> Restarts | None:
    engine = pod.engine
    if engine is None:
        return known
    # kubelet counts an exit only when it starts the container again
    exits = engine.restarts + (engine.exit_code is not None and not engine.running)
    same = known is not None and known.pod_uid == pod.uid
    counted = known.engine_exits if known is not None and same else 0
    if exits <= counted:
        return known
    if not same and exits > 1:
        # of a pod that an earlier operator looked after: its past is not held against it
        update = {"pod_uid": pod.uid, "pod_ended": False, "engine_exits": exits}
        return (known or Restarts(pod_hash=pod.hash)).model_copy(update=update)
    reason = Reason.OOM_KILLED if out_of_memory(engine) else Reason.ENGINE_FAILED
    end = End(reason=reason, message=death(engine), failure=True)
    return _count(known, pod, end, now, times=exits - counted, exits=exits)


def _count(
    known: Restarts | None,
    pod: PodSeen,
    end: End,
    now: float,
    *,
    times: int = 1,
    ended: bool = False,
    exits: int | None = None,
) -> Restarts:
    before = known or Restarts()
    uid = pod.group or pod.uid
    same = before.pod_uid == uid
    counts = {entry.reason: entry.count for entry in before.by_reason}
    counts[end.reason] = counts.get(end.reason, 0) + times
    return Restarts(
        total=before.total + times,
        consecutive=before.consecutive + (times if end.failure else 0),
        by_reason=tuple(RestartCount(reason=r, count=n) for r, n in sorted(counts.items())),
        last_at=rfc3339(now),
        last_reason=end.reason,
        message=shorten(end.message),
        pod_hash=pod.hash,
        pod_uid=uid,
        pod_ended=ended,
        engine_exits=exits if exits is not None else before.engine_exits if same else 0,
    )

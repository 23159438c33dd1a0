"""What ended a pod or its engine, how often, and when the next one may start.

All of it stands in ``status.restarts``, written before a pod that failed is replaced: an operator
that restarts in between neither forgets a failure nor counts it twice.
"""

from typing import Final

from rollout_operator.api.conditions import ConditionType, Reason, shorten
from rollout_operator.api.replica import Replica
from rollout_operator.api.spec import RestartPolicy, RolloutSpec
from rollout_operator.api.status import RestartCount, Restarts
from rollout_operator.api.times import rfc3339, unix
from rollout_operator.plan.actions import Verdict
from rollout_operator.plan.ends import End, end_of, group_of
from rollout_operator.plan.manifests import pod_hash
from rollout_operator.plan.observed import Ownership, PodSeen, Seen
from rollout_operator.plan.obstacle import death, out_of_memory
from rollout_pod.protocol import PodPhase

_FAILURES: Final = frozenset({Reason.POD_FAILED, Reason.ENGINE_FAILED, Reason.OOM_KILLED})


def counted_end(counted: Restarts | None, seen: Seen) -> End | None:
    """Return the end of the present pods that was counted; None where none was.

    What the others do afterwards, or that they are gone, changes nothing of it.
    """
    members = group_of(seen)
    if counted is None or not members:
        return None
    uid = members[0].group or members[0].uid
    reason = next((known for known in Reason if known == counted.last_reason), None)
    if (counted.pod_uid, counted.pod_ended) != (uid, True) or reason is None:
        return None
    # of the evictions only kubelet's own is a failure
    evicted = reason is Reason.EVICTED and any(p.evicted_by_kubelet for p in members)
    return End(reason=reason, message=counted.message, failure=evicted or reason in _FAILURES)


def tally(replica: Replica, spec: RolloutSpec, seen: Seen, now: float) -> Restarts | None:
    """Return what ``status.restarts`` has to say; None while nothing ever ended."""
    wanted = pod_hash(spec)
    known = replica.status.restarts
    if known is not None and known.pod_hash != wanted:
        known = known.model_copy(update={"pod_hash": wanted, "consecutive": 0})
    left = steady_in(replica, seen, now)
    if known is not None and known.consecutive and left is not None and left <= 0:
        known = known.model_copy(update={"consecutive": 0})
    members = group_of(seen)
    pod = members[0] if members else None
    if pod is None or pod.owner is not Ownership.OURS or pod.hash != wanted:
        return known
    # a group is counted once, by its head
    uid = pod.group or pod.uid
    end = end_of(spec, seen, now)
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


def steady_in(replica: Replica, seen: Seen, now: float) -> float | None:
    """Seconds until the failures are forgotten; None while the replica neither is available nor
    sleeps.

    Sleep interrupts availability, and is no trouble: an engine that has run through ever since is
    as good, counted from when its start must have been over.
    """
    spec, available = replica.spec, replica.status.condition(ConditionType.AVAILABLE)
    if spec is None or available is None:
        return None
    serves = available.status == "True"
    if not (serves or available.reason == Reason.SLEEPING):
        return None
    since = [unix(available.last_transition_time)] if serves else []
    engine = seen.pod.engine if seen.pod is not None else None
    if engine is not None and engine.running and engine.started_at:
        last = replica.status.restarts
        # it started after the failure, whatever its node's clock says
        started = max(engine.started_at, unix(last.last_at) if last is not None else 0.0)
        since.append(started + spec.load_timeout_seconds)
    return min(since) + spec.restart_policy.reset_after_seconds - now if since else None


def is_up(replica: Replica, seen: Seen) -> bool:
    """Tell whether the head's engine is up: it serves, or sleeps as asked, and is no failure."""
    pod = seen.pod
    if pod is None or pod.deleting:
        return False
    if pod.ready:
        return True
    # kubelet asks one that it starts again anew, before anything is heard of that
    if not (pod.answering and pod.engine is not None and pod.engine.started):
        return False
    if seen.report is None or seen.report.state is None:
        # until it is asked, what the status says of it stands
        available = replica.status.condition(ConditionType.AVAILABLE)
        return available is not None and available.reason == Reason.SLEEPING
    return seen.report.state.phase not in (PodPhase.LOADING, PodPhase.FAILED)


def exhausted(policy: RestartPolicy, restarts: Restarts | None) -> bool:
    """Tell whether the replica has failed too often in a row."""
    return restarts is not None and restarts.consecutive > policy.max_restarts


def next_start(policy: RestartPolicy, restarts: Restarts) -> float:
    """Return the unix time before which no pod follows the one that failed."""
    doublings = min(max(restarts.consecutive - 1, 0), 30)
    pause = min(policy.backoff_seconds << doublings, policy.backoff_limit_seconds)
    return unix(restarts.last_at) + pause


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

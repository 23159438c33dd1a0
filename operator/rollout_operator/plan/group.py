"""What follows for the pods of a replica that spans nodes: they live and end as one."""

from collections.abc import Callable
from typing import Any, Final

from rollout_operator.api.conditions import Reason
from rollout_operator.api.replica import Replica
from rollout_operator.api.spec import RolloutSpec
from rollout_operator.api.status import Restarts
from rollout_operator.api.times import rfc3339
from rollout_operator.plan.actions import CreatePod, DeletePod, Plan, Verdict
from rollout_operator.plan.ends import OVERDUE_S, End, end_of, missing_ranks, shows_at
from rollout_operator.plan.manifests import pod_hash
from rollout_operator.plan.observed import PodSeen, Seen
from rollout_operator.plan.restarts import counted_end, exhausted, given_up, is_up, next_start
from rollout_pod.protocol import DesiredDocument

JsonObject = dict[str, Any]

DELETING_RETRY_S: Final = 10.0
MIN_LIFE_S: Final = 10.0
"""A pod that is over sooner, by no fault of its own, is replaced only then: that must not spin."""


def plan_group(
    replica: Replica,
    spec: RolloutSpec,
    seen: Seen,
    now: float,
    *,
    make_pod: Callable[[int, PodSeen | None], JsonObject],
    steer: DesiredDocument | None,
    counted: Restarts | None,
) -> Plan:
    """Return what to do with the pods of all ranks (``make_pod`` builds one, of a rank
    and, where that is not 0, behind a head).

    A group is a head and the pods that bear its uid. The head is made when no other pod is left,
    the others when it is there; when one of them ends, or is not what the spec asks for, all go
    before a new head comes. Planning again on the result does nothing.
    """
    head, wanted = seen.pod, pod_hash(spec)
    end = counted_end(counted, seen) or end_of(spec, seen, now)
    shows = shows_at(seen, now)
    if end is None and shows is not None and head is not None and head.hash == wanted:
        verdict = Verdict(reason=Reason.POD_REPLACING, message=_UNASKED.format(rfc3339(shows)))
        return Plan(document=steer, verdict=verdict, requeue_after=shows - now)
    whole = head is not None and end is None and not _ends(seen)
    refusal = seen.refusal if seen.refusal and seen.refusal.hash == wanted else None
    if refusal is not None and now < refusal.retry_at and (whole or not _pods(seen)):
        complete = head is not None and head.hash == wanted and not missing_ranks(spec, seen)
        if not complete:
            verdict = Verdict(
                reason=refusal.reason,
                message=refusal.message,
                stalled=refusal.reason is Reason.INVALID_TEMPLATE,
            )
            return Plan(document=steer, verdict=verdict, requeue_after=refusal.retry_at - now)
    written = counted == replica.status.restarts
    failed = counted is not None and exhausted(spec.restart_policy, counted)
    if counted is not None and failed and not (whole and is_up(replica, seen)):
        return _give_up(spec, seen, counted, written=written)
    if head is not None and whole and head.hash != wanted:
        # checked by the API server first; the others follow when it is on its way
        return Plan(
            actions=(
                DeletePod(
                    name=head.name,
                    uid=head.uid,
                    reason=Reason.POD_REPLACING,
                    message=f"pod {head.name} is replaced: the spec changed",
                    replacement=make_pod(0, None),
                    replacement_hash=wanted,
                ),
            )
        )
    if head is not None and whole:
        strays, waits = _let_go(seen, _strays(spec, seen), _STRAY, now)
        missing = missing_ranks(spec, seen)
        made = tuple(CreatePod(manifest=make_pod(r, head), hash=wanted) for r in missing)
        return Plan(
            actions=(*strays, *made), document=steer, requeue_after=min(waits, default=None)
        )
    if not _pods(seen):
        return Plan(actions=(CreatePod(manifest=make_pod(0, None), hash=wanted),))
    return _end_all(spec, seen, end, counted, now, written=written, steer=steer)


_UNASKED: Final = (
    "a pod has drained, and nothing tells yet who asked it to: that shows when the pods of all "
    "nodes are over, or is given up at {}"
)
_STRAY: Final = End(reason=Reason.POD_REPLACING, message="of an earlier group", failure=False)


def _pods(seen: Seen) -> tuple[PodSeen, ...]:
    return (*((seen.pod,) if seen.pod else ()), *seen.followers)


def _strays(spec: RolloutSpec, seen: Seen) -> tuple[PodSeen, ...]:
    """Followers of another head than the present one, or of a rank that nobody asks for."""
    uid = seen.pod.uid if seen.pod else ""
    return tuple(p for p in seen.followers if p.group != uid or p.rank >= spec.nodes)


def _ends(seen: Seen) -> bool:
    """Whether a pod of the head's group is on its way out."""
    uid = seen.pod.uid if seen.pod else ""
    members = [pod for pod in seen.followers if pod.group == uid]
    return any(p.deleting or p.over for p in (*members, *((seen.pod,) if seen.pod else ())))


def _give_up(spec: RolloutSpec, seen: Seen, counted: Restarts, *, written: bool) -> Plan:
    verdict = given_up(spec, counted)
    # those that are over hold no resources, but their logs
    live = [pod for pod in _pods(seen) if not (pod.deleting or pod.over)]
    if not live or not written:
        return Plan(verdict=verdict, requeue_after=None if written else 0.0)
    end = End(reason=Reason.CRASH_LOOP, message="it is not started again", failure=True)
    return Plan(actions=tuple(_delete(pod, end) for pod in live))


def _end_all(
    spec: RolloutSpec,
    seen: Seen,
    end: End | None,
    counted: Restarts | None,
    now: float,
    *,
    written: bool,
    steer: DesiredDocument | None,
) -> Plan:
    """Ask what lives to end, and keep what is over, for its log, until the next group may start."""
    pods = _pods(seen)
    why = end or End(reason=Reason.POD_REPLACING, message="the group ends", failure=False)
    start = max((p.created + MIN_LIFE_S for p in pods if p.over), default=now)
    if why.failure and counted is not None:
        start = next_start(spec.restart_policy, counted)
    if all(pod.hash != pod_hash(spec) for pod in pods):
        # what failed is not what comes next
        start = now
        if why.failure:
            why = End(reason=Reason.POD_REPLACING, message="the spec changed", failure=False)
    message = f"{why.message}; the pods of all nodes are replaced"
    if start > now:
        message += f". The next ones start at {rfc3339(start)}"
    overdue = [p.delete_by + OVERDUE_S for p in pods if p.deleting and seen.on_lost_node(p)]
    if overdue:
        message += f", once the lost node tells of its pod's end, or at {rfc3339(max(overdue))}"
    verdict = Verdict(reason=why.reason, message=message)
    if not written:
        return Plan(verdict=verdict, requeue_after=0.0)
    actions, waits = _let_go(seen, pods, why, now, start)
    if actions:
        return Plan(actions=actions)
    # one that is fenced is still listened to: what it says is why it goes
    fenced = steer if why.reason is Reason.FENCED else None
    return Plan(verdict=verdict, document=fenced, requeue_after=min(waits))


def _let_go(
    seen: Seen, pods: tuple[PodSeen, ...], why: End, now: float, start: float | None = None
) -> tuple[tuple[DeletePod, ...], list[float]]:
    """Return what ends the pods, and the seconds after which to look again; those that are over
    are kept until ``start``.
    """
    actions: list[DeletePod] = []
    waits: list[float] = []
    for pod in pods:
        if pod.deleting:
            if now >= pod.delete_by + OVERDUE_S and seen.on_lost_node(pod):
                text = f"its node {pod.node} is lost"
                lost = End(reason=Reason.NODE_LOST, message=text, failure=False)
                actions.append(_delete(pod, lost, force=True))
            else:
                waits.append(DELETING_RETRY_S)
        elif pod.over and start is not None and start > now:
            waits.append(start - now)
        else:
            actions.append(_delete(pod, why))
    return tuple(actions), waits


def _delete(pod: PodSeen, end: End, *, force: bool = False) -> DeletePod:
    message = f"pod {pod.name} is {'given up' if force else 'replaced'}: {end.message}"
    return DeletePod(name=pod.name, uid=pod.uid, reason=end.reason, message=message, force=force)

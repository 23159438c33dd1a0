"""The operator's one decision: what follows from what was seen."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from rollout_operator.api.conditions import Reason
from rollout_operator.api.replica import Replica
from rollout_operator.api.spec import RolloutSpec
from rollout_operator.api.status import Restarts
from rollout_operator.api.times import rfc3339
from rollout_operator.plan import manifests, restarts
from rollout_operator.plan.actions import (
    Action,
    ApplyService,
    ChildAction,
    CreatePod,
    CreateSecret,
    DeletePod,
    Plan,
    RepairSecret,
    Verdict,
    child_of,
)
from rollout_operator.plan.document import render_document
from rollout_operator.plan.ends import OVERDUE_S, End, end_of
from rollout_operator.plan.group import DELETING_RETRY_S, MIN_LIFE_S, plan_group
from rollout_operator.plan.observed import ChildRefusal, Ownership, PodSeen, Seen
from rollout_operator.plan.restarts import exhausted, given_up, is_up, next_start
from rollout_operator.plan.template import TemplateError
from rollout_pod.protocol import DesiredDocument

FOREIGN_RETRY_S: Final = 30.0
PREDECESSOR_RETRY_S: Final = 2.0
"""Nothing tells of a Secret that the garbage collector removed."""
UNWATCHED_RETRY_S: Final = 30.0
"""Nothing tells of a pod that lost our labels; we may not give them back."""


@dataclass(frozen=True, kw_only=True)
class PodDefaults:
    """What the operator gives a pod where the spec says nothing. Fixed when the pod is created."""

    image: str
    image_pull_policy: str = "IfNotPresent"


def make_plan(replica: Replica, seen: Seen, now: float, *, defaults: PodDefaults) -> Plan:
    """Return what to do next (``now``: unix seconds). Planning again on the result does nothing."""
    if replica.deleting:
        return Plan()  # owner references remove the children; SIGTERM drains
    if replica.spec is None:
        return _invalid_spec(replica, replica.invalid)
    try:
        document = render_document(replica, replica.spec)
    except ValueError as error:
        return _invalid_spec(replica, str(error))
    pod = seen.pod
    steer = document if pod and pod.owner is Ownership.OURS and not pod.deleting else None
    counted = restarts.tally(replica, replica.spec, seen, now)
    verdict, retry = _strangers(seen)
    if verdict is not None:
        return Plan(document=steer, verdict=verdict, restarts=counted, requeue_after=retry)
    children, refused = _children(replica, seen, now)
    make_pod = partial(_make_pod, replica, replica.spec, document, defaults)
    try:
        manifest = make_pod(0, None)
    except TemplateError as error:
        verdict = Verdict(reason=Reason.INVALID_TEMPLATE, message=f"spec.{error}", stalled=True)
        retry = min((one.retry_at - now for one in refused), default=None)
        return Plan(
            actions=children,
            document=steer,
            verdict=verdict,
            restarts=counted,
            requeue_after=retry,
        )
    if replica.spec.nodes > 1 or seen.followers:
        rest = plan_group(
            replica, replica.spec, seen, now, make_pod=make_pod, steer=steer, counted=counted
        )
    else:
        rest = _pod(replica, replica.spec, seen, now, manifest, steer, counted)
    if refused:
        rest = _held_up(rest, seen, refused, steer)
    waits = [rest.requeue_after, *(one.retry_at - now for one in refused)]
    if counted is not None and counted.consecutive:
        waits.append(restarts.steady_in(replica, seen, now))
    if not all(member.watched for member in (*((pod,) if pod else ()), *seen.followers)):
        waits.append(UNWATCHED_RETRY_S)
    return replace(
        rest,
        actions=children + rest.actions,
        restarts=counted,
        requeue_after=min((wait for wait in waits if wait is not None), default=None),
    )


def _make_pod(
    replica: Replica,
    spec: RolloutSpec,
    document: DesiredDocument,
    defaults: PodDefaults,
    rank: int,
    head: PodSeen | None,
) -> manifests.JsonObject:
    return manifests.pod(
        replica,
        spec,
        document,
        # one engine is of one image, whichever operator made its head
        default_image=(head.image if head is not None else "") or defaults.image,
        image_pull_policy=defaults.image_pull_policy,
        rank=rank,
        group=head.uid if head is not None else "",
    )


def _invalid_spec(replica: Replica, message: str) -> Plan:
    verdict = Verdict(reason=Reason.INVALID_SPEC, message=message, stalled=True)
    # what was counted stays so: the same end must not count again once the spec is mended
    return Plan(verdict=verdict, restarts=replica.status.restarts)


def _strangers(seen: Seen) -> tuple[Verdict | None, float | None]:
    children = [child for child in (seen.secret, *seen.services) if child is not None]
    owners = [(child.kind, child.name, child.owner) for child in children]
    pods = (*((seen.pod,) if seen.pod else ()), *seen.followers)
    owners += [("Pod", pod.name, pod.owner) for pod in pods]
    foreign = [f"{kind} {name}" for kind, name, owner in owners if owner is Ownership.FOREIGN]
    if foreign:
        message = (
            f"{', '.join(foreign)}: there already, and not of this replica; it is left alone. "
            "Delete or rename it, or give the replica another name"
        )
        verdict = Verdict(reason=Reason.FOREIGN_OBJECT, message=message, stalled=True)
        return verdict, FOREIGN_RETRY_S
    old = [f"{kind} {name}" for kind, name, owner in owners if owner is Ownership.PREDECESSOR]
    if old:
        message = f"waits until what belongs to an earlier replica is gone: {', '.join(old)}"
        verdict = Verdict(reason=Reason.WAITING_FOR_PREDECESSOR, message=message)
        return verdict, PREDECESSOR_RETRY_S
    return None, None


def _children(
    replica: Replica, seen: Seen, now: float
) -> tuple[tuple[Action, ...], tuple[ChildRefusal, ...]]:
    """Return what makes or mends Secret and Services, and why it is too early for the rest."""
    actions: list[ChildAction] = []
    if seen.secret is None:
        actions.append(CreateSecret(manifest=manifests.secret(replica)))
    elif not seen.secret.complete:
        actions.append(RepairSecret(name=seen.secret.name))
    for manifest, child in zip(manifests.services(replica), seen.services, strict=True):
        if child is None or not child.complete:
            actions.append(ApplyService(manifest=manifest))
    early = {one.child: one for one in seen.refused if now < one.retry_at}
    due = tuple(action for action in actions if child_of(action) not in early)
    return due, tuple(early[child_of(a)] for a in actions if child_of(a) in early)


def _held_up(
    rest: Plan, seen: Seen, refused: tuple[ChildRefusal, ...], steer: DesiredDocument | None
) -> Plan:
    """Return what is left of a plan for the pods of a replica of which a child is refused.

    Without its Secret and Services no pod is made, and none that works is given up for another.
    """
    actions = rest.actions
    if seen.secret is None or None in seen.services:
        actions = tuple(action for action in actions if not _makes_room(action))
    verdict = Verdict(reason=refused[0].reason, message=refused[0].message)
    return replace(
        rest,
        actions=actions,
        verdict=rest.verdict or verdict,
        document=rest.document if actions == rest.actions else steer,
    )


def _makes_room(action: Action) -> bool:
    """Tell whether it is, or leads to, a new pod while the old one could go on."""
    return isinstance(action, CreatePod) or (
        isinstance(action, DeletePod) and action.replacement is not None
    )


def _pod(
    replica: Replica,
    spec: RolloutSpec,
    seen: Seen,
    now: float,
    manifest: manifests.JsonObject,
    steer: DesiredDocument | None,
    counted: Restarts | None,
) -> Plan:
    pod, wanted = seen.pod, manifests.pod_hash(spec)
    refusal = seen.refusal if seen.refusal and seen.refusal.hash == wanted else None
    if refusal is not None and now < refusal.retry_at and (pod is None or pod.hash != wanted):
        verdict = Verdict(
            reason=refusal.reason,
            message=refusal.message,
            stalled=refusal.reason is Reason.INVALID_TEMPLATE,
        )
        if pod is None or not (pod.deleting or pod.over):
            return Plan(document=steer, verdict=verdict, requeue_after=refusal.retry_at - now)
    written = counted == replica.status.restarts
    if counted is not None and exhausted(spec.restart_policy, counted) and not is_up(replica, seen):
        return _give_up(spec, pod, counted, written=written)
    if pod is None:
        return Plan(actions=(CreatePod(manifest=manifest, hash=wanted),))
    end = end_of(spec, seen, now)
    if pod.deleting:
        return _deleting(pod, end, now, written=written)
    if pod.hash != wanted:
        return Plan(
            actions=(
                DeletePod(
                    name=pod.name,
                    uid=pod.uid,
                    reason=Reason.POD_REPLACING,
                    message=f"pod {pod.name} is replaced: the spec changed",
                    replacement=None if pod.over else manifest,
                    replacement_hash=wanted,
                ),
            )
        )
    if end is not None and counted is not None:
        rest = _replace(spec, pod, end, counted, now, written=written)
        # one that is fenced is still listened to: what it says is why it goes
        return rest if rest.actions else replace(rest, document=steer)
    return Plan(document=steer)


def _give_up(spec: RolloutSpec, pod: PodSeen | None, counted: Restarts, *, written: bool) -> Plan:
    verdict = given_up(spec, counted)
    # a pod that is over holds no resources, but its log
    if pod is None or pod.deleting or pod.over or not written:
        return Plan(verdict=verdict, requeue_after=None if written else 0.0)
    return _delete(pod, Reason.CRASH_LOOP, f"pod {pod.name} is not started again")


def _deleting(pod: PodSeen, end: End | None, now: float, *, written: bool) -> Plan:
    lost = end is not None and end.reason is Reason.NODE_LOST
    if end is not None and lost and written and now >= pod.delete_by + OVERDUE_S:
        message = f"pod {pod.name} is given up: {end.message}"
        return _delete(pod, Reason.NODE_LOST, message, force=True)
    reason, message = Reason.POD_REPLACING, f"pod {pod.name} drains; a new one follows"
    if end is not None:
        reason, message = end.reason, f"pod {pod.name} ends ({end.message}); a new one follows"
    if lost:
        message += f", once the node tells of the end, or at {rfc3339(pod.delete_by + OVERDUE_S)}"
    verdict = Verdict(reason=reason, message=message)
    return Plan(verdict=verdict, requeue_after=DELETING_RETRY_S if written else 0.0)


def _replace(
    spec: RolloutSpec, pod: PodSeen, end: End, counted: Restarts, now: float, *, written: bool
) -> Plan:
    start = pod.created + MIN_LIFE_S if pod.over else now
    if end.failure:
        start = next_start(spec.restart_policy, counted)
    message = f"pod {pod.name} is replaced: {end.message}"
    if written and start <= now:
        return _delete(pod, end.reason, message)
    if start > now:
        message += f". The next one starts at {rfc3339(start)}"
    verdict = Verdict(reason=end.reason, message=message)
    return Plan(verdict=verdict, requeue_after=max(0.0, start - now))


def _delete(pod: PodSeen, reason: Reason, message: str, *, force: bool = False) -> Plan:
    action = DeletePod(name=pod.name, uid=pod.uid, reason=reason, message=message, force=force)
    return Plan(actions=(action,))

"""The operator's one decision: what follows from what was seen."""

from dataclasses import dataclass
from typing import Final

from rollout_operator.api.conditions import Reason
from rollout_operator.api.replica import Replica
from rollout_operator.api.spec import RolloutSpec
from rollout_operator.plan import manifests
from rollout_operator.plan.actions import (
    Action,
    ApplyService,
    CreatePod,
    CreateSecret,
    DeletePod,
    Plan,
    RepairSecret,
    Verdict,
)
from rollout_operator.plan.document import render_document
from rollout_operator.plan.observed import Ownership, PodSeen, Seen
from rollout_operator.plan.template import TemplateError
from rollout_pod.protocol import DesiredDocument

FOREIGN_RETRY_S: Final = 30.0
PREDECESSOR_RETRY_S: Final = 2.0
"""Nothing tells of a Secret that the garbage collector removed."""
DELETING_RETRY_S: Final = 10.0
MIN_LIFE_S: Final = 10.0
"""A pod that failed sooner is replaced only then: evictions must not spin."""


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
        return Plan(verdict=_invalid_spec(replica.invalid))
    try:
        document = render_document(replica, replica.spec)
    except ValueError as error:
        return Plan(verdict=_invalid_spec(str(error)))
    pod = seen.pod
    steer = document if pod and pod.owner is Ownership.OURS and not pod.deleting else None
    verdict, retry = _strangers(seen)
    if verdict is not None:
        return Plan(document=steer, verdict=verdict, requeue_after=retry)
    children = _children(replica, seen)
    try:
        manifest = manifests.pod(
            replica,
            replica.spec,
            document,
            default_image=defaults.image,
            image_pull_policy=defaults.image_pull_policy,
        )
    except TemplateError as error:
        verdict = Verdict(reason=Reason.INVALID_TEMPLATE, message=f"spec.{error}", stalled=True)
        return Plan(actions=children, document=steer, verdict=verdict)
    rest = _pod(replica.spec, seen, now, manifest, steer)
    return Plan(
        actions=children + rest.actions,
        document=rest.document,
        verdict=rest.verdict,
        requeue_after=rest.requeue_after,
    )


def _invalid_spec(message: str) -> Verdict:
    return Verdict(reason=Reason.INVALID_SPEC, message=message, stalled=True)


def _strangers(seen: Seen) -> tuple[Verdict | None, float | None]:
    children = [child for child in (seen.secret, *seen.services) if child is not None]
    owners = [(child.kind, child.name, child.owner) for child in children]
    if seen.pod is not None:
        owners.append(("Pod", seen.pod.name, seen.pod.owner))
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


def _children(replica: Replica, seen: Seen) -> tuple[Action, ...]:
    actions: list[Action] = []
    if seen.secret is None:
        actions.append(CreateSecret(manifest=manifests.secret(replica)))
    elif not seen.secret.complete:
        actions.append(RepairSecret(name=seen.secret.name))
    for manifest, child in zip(manifests.services(replica), seen.services, strict=True):
        if child is None or not child.complete:
            actions.append(ApplyService(manifest=manifest))
    return tuple(actions)


def _pod(
    spec: RolloutSpec,
    seen: Seen,
    now: float,
    manifest: manifests.JsonObject,
    steer: DesiredDocument | None,
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
    if pod is None:
        return Plan(actions=(CreatePod(manifest=manifest, hash=wanted),))
    if pod.deleting:
        verdict = Verdict(
            reason=Reason.POD_REPLACING, message=f"pod {pod.name} drains; a new one follows"
        )
        return Plan(verdict=verdict, requeue_after=DELETING_RETRY_S)
    if pod.over:
        return _replace_failed(pod, now)
    if seen.report is not None and seen.report.fenced:
        message = f"pod {pod.name} obeys another owner or a later generation; it is replaced"
        return _delete(pod, Reason.FENCED, message)
    if pod.hash != wanted:
        action = DeletePod(
            name=pod.name,
            uid=pod.uid,
            reason=Reason.POD_REPLACING,
            message=f"pod {pod.name} is replaced: the spec changed",
            replacement=manifest,
            replacement_hash=wanted,
        )
        return Plan(actions=(action,))
    return Plan(document=steer)


def _replace_failed(pod: PodSeen, now: float) -> Plan:
    message = f"pod {pod.name} is over ({pod.failure or pod.phase}); it is replaced"
    wait = pod.created + MIN_LIFE_S - now
    if wait > 0:
        verdict = Verdict(reason=Reason.POD_FAILED, message=message)
        return Plan(verdict=verdict, requeue_after=wait)
    return _delete(pod, Reason.POD_FAILED, message)


def _delete(pod: PodSeen, reason: Reason, message: str) -> Plan:
    return Plan(actions=(DeletePod(name=pod.name, uid=pod.uid, reason=reason, message=message),))

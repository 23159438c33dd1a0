"""What may be done to the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_operator.api.conditions import Reason
from rollout_operator.api.status import Restarts
from rollout_pod.protocol import DesiredDocument

Manifest = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CreateSecret:
    """Create the Secret; whoever executes this adds a random token."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class RepairSecret:
    """Give our Secret, which lost its token, a new one."""

    name: str


@dataclass(frozen=True, kw_only=True)
class ApplyService:
    """Apply a Service server-side."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class CreatePod:
    """Create the pod."""

    manifest: Manifest
    hash: str


@dataclass(frozen=True, kw_only=True)
class DeletePod:
    """Delete the pod with its grace period: it drains."""

    name: str
    uid: str
    reason: Reason
    message: str
    force: bool = False
    """Do not wait for its kubelet, which is lost."""
    replacement: Manifest | None = None
    """Checked first: a pod that works is not given up for one that the API server refuses."""
    replacement_hash: str = ""


ChildAction = CreateSecret | RepairSecret | ApplyService
Action = ChildAction | CreatePod | DeletePod


def child_of(action: ChildAction) -> str:
    """Return which child is made or mended, as messages name it."""
    if isinstance(action, RepairSecret):
        return f"Secret {action.name}"
    return f"{action.manifest['kind']} {action.manifest['metadata']['name']}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the replica is not there yet, known before a pod is asked."""

    reason: Reason
    message: str
    stalled: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do now."""

    actions: tuple[Action, ...] = ()
    """In this order."""
    document: DesiredDocument | None = None
    """What the pod has to be told; None where there is none to tell."""
    verdict: Verdict | None = None
    restarts: Restarts | None = None
    """What ``status.restarts`` must say. Whatever an end brings about waits until it is written."""
    requeue_after: float | None = None
    """Look again after so many seconds even if nothing happens."""

"""Kubernetes Events: one for each transition that a person may care for."""

import secrets
from typing import Any, Final, Literal

from rollout_operator.api import names
from rollout_operator.api.conditions import Condition, ConditionType, Reason, shorten
from rollout_operator.api.replica import Replica
from rollout_operator.api.status import ReplicaStatus
from rollout_operator.api.times import rfc3339

JsonObject = dict[str, Any]
Kind = Literal["Normal", "Warning"]

_MAX_MESSAGE: Final = 1024
_NORMAL: Final = frozenset({Reason.SERVING, Reason.PAUSED, Reason.SLEEPING})
_WARNINGS: Final = frozenset(
    {
        Reason.INVALID_SPEC,
        Reason.FOREIGN_OBJECT,
        Reason.INVALID_TEMPLATE,
        Reason.ENGINE_FAILED,
        Reason.ENGINE_RESTARTING,
        Reason.OOM_KILLED,
        Reason.CRASH_LOOP,
        Reason.UPDATE_FAILED,
        Reason.SLEEP_UNSUPPORTED,
        Reason.POD_FORBIDDEN,
        Reason.QUOTA_EXCEEDED,
        Reason.UNSCHEDULABLE,
        Reason.VOLUME_UNAVAILABLE,
        Reason.EVICTED,
        Reason.PREEMPTED,
        Reason.NODE_SHUTDOWN,
        Reason.NODE_LOST,
        Reason.IMAGE_PULL_FAILED,
        Reason.POD_CONFIG_ERROR,
        Reason.WEIGHTS_AGENT_FAILED,
        Reason.WEIGHTS_UNAVAILABLE,
        Reason.POD_UNREACHABLE,
        Reason.UNAUTHORIZED,
        Reason.DOCUMENT_REFUSED,
        Reason.INTERNAL_ERROR,
        Reason.POISONED,
    }
)


_UPDATING: Final = frozenset({Reason.UPDATING, Reason.AWAITING_PUSH, Reason.LOADING_WEIGHTS})
"""That it serves again after these is told by what it holds."""


def transitions(old: ReplicaStatus, new: ReplicaStatus) -> list[tuple[Kind, str, str]]:
    """Return the events that the step from ``old`` to ``new`` is worth: type, reason, message."""
    before, after = old.condition(ConditionType.READY), new.condition(ConditionType.READY)
    committed = new.last_committed
    if committed is not None and committed != old.last_committed:
        text = f"every rank holds {committed.version}"
        updated: list[tuple[Kind, str, str]] = [("Normal", "WeightsCommitted", text)]
        if old.last_committed is not None and before is not None and before.reason in _UPDATING:
            return updated
        return updated + _changed(before, after)
    return _changed(before, after)


def _changed(before: Condition | None, after: Condition | None) -> list[tuple[Kind, str, str]]:
    if after is None or (before is not None and before.reason == after.reason):
        return []
    if after.reason in _NORMAL:
        return [("Normal", after.reason, after.message)]
    if after.reason in _WARNINGS:
        return [("Warning", after.reason, after.message)]
    return []


def event(replica: Replica, kind: Kind, reason: str, message: str, *, now: float) -> JsonObject:
    """Build one event about the replica."""
    stamp = rfc3339(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{replica.name}.{secrets.token_hex(8)}",
            "namespace": replica.namespace,
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": replica.name,
            "namespace": replica.namespace,
            "uid": replica.uid,
        },
        "type": kind,
        "reason": reason,
        "message": shorten(message, _MAX_MESSAGE),
        "source": {"component": names.MANAGER},
        "reportingComponent": names.MANAGER,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }

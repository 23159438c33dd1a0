"""Whether a RolloutReplica has become what was asked of it: pure.

Level-triggered: only the newest object counts, and what it says of an older generation does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from rollout_client.verdict import Failed, Failure, Reached, Verdict, Waiting

BASE: Final = "base"
"""The name of the model's own checkpoint, which the API says by the absence of weightVersion."""

_RESIZING: Final = (
    "", "Waking", "FallingAsleep", "EngineStarting", "EngineRestarting", "PodCreating",
    "PodStarting", "PodReplacing", "PodFailed", "PodUnreachable",
)  # fmt: skip
"""Reasons of ``Ready`` that say nothing of what is resident, or that it is on its way."""

Object = Mapping[str, Any]


class Goal(StrEnum):
    """What is waited for."""

    PAUSED = "paused"
    """The gate is closed, and every caller has its partial."""
    RESUMED = "resumed"
    WEIGHTS = "weights"
    """Every rank holds the version."""
    READY = "ready"
    """It is all that its spec says."""
    ASLEEP = "asleep"
    """Exactly what the spec names sleeps."""
    AWAKE = "awake"
    """What the spec does not name is resident; what it holds is another matter."""
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What was asked of which object."""

    name: str
    uid: str
    generation: int
    """``metadata.generation`` of the answer to our own write."""
    goal: Goal
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``spec`` that we wrote; None for one that we removed."""
    history: tuple[Object, ...] = ()
    """The updates that were over when we wrote."""


def judge(ask: Ask, body: Object | None) -> Verdict:
    """Compare the newest object with what was asked; None where there is none."""
    gone = body is None or body["metadata"]["uid"] != ask.uid
    if ask.goal is Goal.GONE:
        return Reached() if gone else Waiting(progress="is being deleted")
    if body is None or gone:
        return Failed(kind=Failure.GONE, message=f"{ask.name} was deleted meanwhile")
    status: Object = body.get("status") or {}
    if (change := _overruled(ask, body)) is not None:
        if ask.goal is Goal.WEIGHTS and _was_committed(ask, status):
            return Reached()
        return Failed(kind=Failure.SUPERSEDED, message=change)
    if status.get("observedGeneration", 0) < ask.generation:
        return Waiting(progress="the operator has yet to see the change")
    conditions = {
        c["type"]: c
        for c in status.get("conditions") or ()
        if c.get("observedGeneration", 0) >= ask.generation
    }
    if _is_reached(ask, status, conditions):
        return Reached()
    return _failure(ask, conditions) or Waiting(progress=progress(status))


def progress(status: Object) -> str:
    """One line for people: the phase, the versions, and how far the update is."""
    nothing: Object = {}
    ready = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), nothing)
    update = status.get("weightUpdate") or {}
    parts = [str(status.get("phase") or "Pending")]
    if status.get("weightVersion"):
        parts.append(f"holds {status['weightVersion']}")
    if update and update.get("phase") not in (None, "Committed", "Rejected"):
        parts.append(f"{update['phase'].lower()} {update['target']}")
    if ready.get("status") != "True" and ready.get("message"):
        parts.append(ready["message"])
    return "; ".join(parts)


def _overruled(ask: Ask, body: Object) -> str | None:
    """Last writer wins: say so where ours is not the last word any more."""
    spec = body.get("spec") or {}
    for name, value in ask.fields.items():
        now = spec.get(name)
        if name == "paused":
            now, value = bool(now), bool(value)
        if now != value:
            return (
                f"another writer set spec.{name} to {now!r} before {value!r} was reached "
                f"(generation {body['metadata'].get('generation')}, ours was {ask.generation}); "
                "the last writer wins"
            )
    return None


def _was_committed(ask: Ask, status: Object) -> bool:
    """It was reached, and was changed again before we saw it."""
    wanted = ask.fields.get("weightVersion") or BASE
    return any(
        entry["version"] == wanted and entry["phase"] == "Committed" and entry not in ask.history
        for entry in status.get("history") or ()
    )


def _is_reached(ask: Ask, status: Object, conditions: Mapping[str, Object]) -> bool:
    def has(kind: str, value: str) -> bool:
        return bool(conditions.get(kind, {}).get("status") == value)

    match ask.goal:
        case Goal.PAUSED:
            return has("Paused", "True")
        case Goal.RESUMED:
            return has("Paused", "False") and conditions["Paused"].get("reason") == "NotPaused"
        case Goal.ASLEEP:
            return _ready_reason(conditions) in ("Sleeping", "WaitingForWake")
        case Goal.AWAKE:
            reason = _ready_reason(conditions)
            has_moved = reason != "Updating" or status.get("phase") != "Sleeping"
            return has_moved and reason not in _RESIZING
        case Goal.WEIGHTS:
            wanted = ask.fields.get("weightVersion") or BASE
            return has("WeightsReady", "True") and status.get("weightVersion") == wanted
        case _:
            return has("Ready", "True")


def _ready_reason(conditions: Mapping[str, Object]) -> str:
    return str(conditions.get("Ready", {}).get("reason", ""))


def _failure(ask: Ask, conditions: Mapping[str, Object]) -> Failed | None:
    stalled, ready = conditions.get("Stalled", {}), conditions.get("Ready", {})
    of_weights = ask.goal in (Goal.WEIGHTS, Goal.READY)
    if stalled.get("status") == "True":
        kind = Failure.STALLED
        if stalled.get("reason") == "UpdateFailed":
            if not of_weights:
                return None  # it pauses and resumes all the same
            kind = Failure.UPDATE_FAILED
        return Failed(kind=kind, message=_told(ask.name, stalled))
    if of_weights and ready.get("reason") == "WeightsUnavailable":
        return Failed(kind=Failure.WEIGHTS_UNAVAILABLE, message=_told(ask.name, ready))
    return None


def _told(name: str, condition: Object) -> str:
    return f"{name}: {condition.get('reason')}: {condition.get('message') or 'no message'}"

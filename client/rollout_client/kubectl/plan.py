"""What the plugin shows and decides: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rollout_client.kube.judge import BASE

Object = Mapping[str, Any]
NOTHING: Final[Object] = {}
PLACEHOLDER: Final = "{version}"


class CannotUndo(Exception):
    """Says why, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A version to go back to."""

    version: str
    step: int | None


def wanted(body: Object) -> str:
    """The version that the spec asks for."""
    return str((body.get("spec") or NOTHING).get("weightVersion") or BASE)


def undo_target(body: Object) -> Target:
    """The version that was committed before the one that is asked for now.

    Raises:
        CannotUndo: the history knows none, or it cannot be had from ``spec.weights.source`` now.
    """
    name, now = body["metadata"]["name"], wanted(body)
    hint = f"name a version: kubectl rr update {name} VERSION"
    for entry in (body.get("status") or NOTHING).get("history") or ():
        if entry["phase"] != "Committed" or entry["version"] == now:
            continue
        source = _place(entry.get("source"))
        if source is not None and source != (there := _source(body, entry["version"])):
            raise CannotUndo(
                f"{entry['version']} came from {source}, but spec.weights.source now means "
                f"{there or 'nothing'}; change it, or {hint}"
            )
        return Target(version=entry["version"], step=entry.get("step"))
    raise CannotUndo(f"the history of {name} knows no version before {now}; {hint}")


def _source(body: Object, version: str) -> str | None:
    weights = (body.get("spec") or NOTHING).get("weights") or NOTHING
    place = _place(weights.get("source"))
    return place.replace(PLACEHOLDER, version) if place else None


def _place(source: Object | None) -> str | None:
    """A folder, or the folder's URL."""
    found = source or NOTHING
    place = found.get("path") or found.get("url")
    return str(place) if place else None


def condition(body: Object, kind: str) -> Object:
    """A condition of the status; empty where there is none."""
    found = (body.get("status") or NOTHING).get("conditions") or ()
    return next((c for c in found if c["type"] == kind), NOTHING)


def is_current(body: Object) -> bool:
    """The status speaks of the newest spec."""
    seen = (body.get("status") or NOTHING).get("observedGeneration", 0)
    return bool(seen >= body["metadata"].get("generation", 0))


def status_rows(bodies: Sequence[Object]) -> list[tuple[str, ...]]:
    """One row a replica: name, ready, phase, weights, target, paused, why it is not ready."""
    rows: list[tuple[str, ...]] = []
    for body in sorted(bodies, key=lambda b: str(b["metadata"]["name"])):
        status, ready = body.get("status") or NOTHING, condition(body, "Ready")
        fresh = is_current(body)
        why = ready.get("message", "") if ready.get("status") != "True" else ""
        rows.append(
            (
                str(body["metadata"]["name"]),
                str(ready.get("status", "Unknown")) if fresh else "Unknown",
                str(status.get("phase", "")),
                str(status.get("weightVersion", "")),
                wanted(body),
                "yes" if (body.get("spec") or NOTHING).get("paused") else "no",
                str(why) if fresh else "the operator has yet to see the newest change",
            )
        )
    return rows


def history_rows(body: Object) -> list[tuple[str, ...]]:
    """One row an update, the newest first: version, step, result, finished, took, paused, by."""
    return [
        (
            str(entry["version"]),
            "" if entry.get("step") is None else str(entry["step"]),
            str(entry["phase"]),
            str(entry.get("finishedAt") or ""),
            _took(entry.get("startedAt"), entry.get("finishedAt")),
            "" if entry.get("pausedSeconds") is None else f"{entry['pausedSeconds']:.2f} s",
            str(entry.get("by") or "unknown"),
        )
        for entry in (body.get("status") or NOTHING).get("history") or ()
    ]


def _took(start: str | None, end: str | None) -> str:
    if not start or not end:
        return ""
    seconds = (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    return f"{seconds:.0f} s"

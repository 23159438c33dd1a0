"""What the agent says of what went wrong. Pure but for the log."""

import logging
from typing import Any

from rollout_pod.weights import agent_wire
from rollout_pod.weights.headers import SourceError
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.segment import RoomError
from rollout_pod.weights.session_errors import ManifestError, RanksError, TransferFailed
from rollout_pod.weights.wire import Report

log = logging.getLogger(__name__)


def reports(session: str, found: tuple[LoadReport, ...]) -> tuple[Report, ...]:
    """The ranks' reports, as they travel."""
    return tuple(Report.of(session, report) for report in found)


def failed(id: int, error: Any, message: str, *, retryable: bool) -> agent_wire.Failed:
    """An answer; ``error`` is one of the protocol's words."""
    return agent_wire.Failed(id=id, error=error, message=message[:8000], retryable=retryable)


def unknown(id: int, session: str, what: str) -> agent_wire.Failed:
    """The answer about a session that has not come so far here."""
    text = f"session {session!r} is not {what} here; stage it again"
    return failed(id, "session", text, retryable=True)


def failure(request: agent_wire.ToAgent, error: Exception) -> agent_wire.Failed:
    """The answer that an exception stands for."""
    id, text = request.id, str(error) or type(error).__name__
    if isinstance(error, SourceError):
        return failed(id, "source", text, retryable=error.retryable)
    if isinstance(error, RoomError):
        return failed(id, "room", text, retryable=error.retryable)
    if isinstance(error, ManifestError):
        return failed(id, "manifest", text, retryable=False)
    if isinstance(error, RanksError):
        return failed(id, "ranks", text, retryable=error.retryable)
    if isinstance(error, TransferFailed) and isinstance(request, agent_wire.Send):
        found = reports(request.session, error.reports)
        return agent_wire.Failed(
            id=id, error="transfer", message=text[:8000], retryable=True, ranks=found
        )
    if isinstance(error, TimeoutError):
        return failed(id, "timeout", text, retryable=True)
    log.error("a request failed", exc_info=error)
    return failed(id, "internal", f"{type(error).__name__}: {text}", retryable=True)

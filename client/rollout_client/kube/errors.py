"""What steering a RolloutReplica can fail with."""

from collections.abc import Mapping
from typing import Any

from rollout_client.verdict import Failure


class KubeError(Exception):
    """The base of all errors of ``rollout_client.kube``."""


class ApiError(KubeError):
    """The API server refused a request, or was not reached (``code`` is 0)."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}" if reason else message)
        self.code = code
        self.reason = reason

    @property
    def is_passing(self) -> bool:
        """Worth another try."""
        return self.code in (0, 408, 410, 429) or self.code >= 500


class ReplicaError(KubeError):
    """A replica did not become what was asked of it; ``status`` is the last one that was seen."""

    def __init__(self, message: str, *, status: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = dict(status)


class Stalled(ReplicaError):
    """Nothing happens before somebody mends something; the message says what."""


class UpdateFailed(Stalled):
    """The version failed too often; the replica serves the one before it."""


class WeightsUnavailable(ReplicaError):
    """The version cannot be had from its source at the moment; the replica keeps trying."""


class Superseded(ReplicaError):
    """Another writer changed the same field before the replica had got there."""


class ReplicaGone(ReplicaError):
    """There is no such replica (any more)."""


class WaitTimeout(ReplicaError):
    """The time was over before; the replica goes on by itself."""


ERRORS: Mapping[Failure, type[ReplicaError]] = {
    Failure.STALLED: Stalled,
    Failure.UPDATE_FAILED: UpdateFailed,
    Failure.WEIGHTS_UNAVAILABLE: WeightsUnavailable,
    Failure.SUPERSEDED: Superseded,
    Failure.GONE: ReplicaGone,
}

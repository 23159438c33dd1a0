"""What a rollout can fail with. Every error carries the partial, so that no token is lost by it."""

from rollout_client.rollout import Rollout
from rollout_pod.protocol import Problem


class RolloutError(Exception):
    """The rollout did not finish; ``partial`` is what its caller holds."""

    def __init__(self, message: str, *, partial: Rollout) -> None:
        super().__init__(message)
        self.partial = partial


class DeadlineExceeded(RolloutError):
    """``deadline_s`` is over. ``partial`` lacks what the attempt that ran then had generated."""


class RequestRefused(RolloutError):
    """The pod refused the request for good (a status of 4xx)."""

    def __init__(
        self, message: str, *, status: int, problem: Problem | None, partial: Rollout
    ) -> None:
        super().__init__(message, partial=partial)
        self.status = status
        self.problem = problem
        """The pod's own words and its stable ``code``; None where a proxy answered."""


class EngineFailed(RolloutError):
    """The engine failed this rollout several times in a row."""


class ProtocolError(RolloutError):
    """An answer that is none: not the document, or one that contradicts itself."""

"""What a rollout can fail with. Every error carries the partial, so that no token is lost by it."""

from collections.abc import Sequence

from rollout_client.rollout import Rollout
from rollout_pod.protocol import Problem


class _Portable(Exception):
    """May be pickled, as other processes do that hand errors on (Ray, multiprocessing)."""

    def __reduce__(self) -> tuple[object, ...]:
        # the default calls the class with ``args`` alone, which lack what is given by keyword
        return _remake, (type(self), self.args, self.__dict__)


def _remake(kind: type[_Portable], args: tuple[object, ...], state: dict[str, object]) -> _Portable:
    made = kind.__new__(kind, *args)
    made.__dict__.update(state)
    return made


class RolloutError(_Portable):
    """The rollout did not finish; ``partial`` is what its caller holds."""

    def __init__(self, message: str, *, partial: Rollout) -> None:
        super().__init__(message)
        self.partial = partial


class DeadlineExceeded(RolloutError):
    """``deadline_s`` is over. ``partial`` holds all that has arrived, the running attempt's too."""


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


class RetriesExhausted(RolloutError):
    """Too many attempts in a row brought no token."""


class RolloutCancelled(RolloutError):
    """Somebody cut it by its id (``DELETE /v1/rollout/requests/{id}``), or its caller gave up."""


class ProtocolError(RolloutError):
    """An answer that is none: not the document, or one that contradicts itself."""


class GroupFailed(_Portable):
    """Not every rollout of a group finished; ``results`` has all of them, in order."""

    def __init__(self, message: str, *, results: Sequence[Rollout | RolloutError]) -> None:
        super().__init__(message)
        self.results = tuple(results)

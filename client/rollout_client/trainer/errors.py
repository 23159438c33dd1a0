"""What steering replicas for a trainer can fail with."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from rollout_client.trainer.results import ReplicaResult


class AdapterError(Exception):
    """One replica did not become what was asked of it; the base of all others.

    ``results`` says what became of all replicas of the call, this one's error included.
    """

    def __init__(self, message: str, *, target: str = "") -> None:
        super().__init__(message)
        self.target = target
        self.results: Mapping[str, ReplicaResult] = {}


class Superseded(AdapterError):
    """Another writer asked for something else before this was reached: the last one wins."""


class UpdateFailed(AdapterError):
    """The version was rejected, or its bytes did not arrive whole; the message says what is served
    instead.
    """


class WeightsUnavailable(AdapterError):
    """The version cannot be had from its source at the moment; the replica keeps trying."""


class Refused(AdapterError):
    """The replica will not do it as it is; the message says what to change."""


class Asleep(Refused):
    """The engine's weights are released: ``resume(("weights",))`` first."""


class OwnedByOperator(Refused):
    """A pod that was addressed directly belongs to an operator: name its RolloutReplica instead."""


class Unreachable(AdapterError):
    """Nobody answers there: the pod, its push socket, or the API server."""


class ReplicaGone(AdapterError):
    """There is no such replica (any more)."""


class Late(AdapterError):
    """The time was over before; the message says what was waited for and how far it was.

    The replica goes on by itself, except that a push is given up.
    """


class PeerFailed(AdapterError):
    """The update failed on the rank that sends; raised on the others, which took part in it."""


class ReplicaErrors(ExceptionGroup[AdapterError]):
    """Several replicas were asked, and not all of them became what was asked.

    ``results`` has those that did, too. ``except*`` picks errors by their type, and works as well
    for a call to one replica, which raises its error itself.
    """

    def __new__(cls, errors: Sequence[AdapterError], results: Mapping[str, ReplicaResult]) -> Self:
        """Count in the message: no half success is hidden."""
        count = f"{len(errors)} of {len(results)} replicas failed"
        made = super().__new__(cls, f"{count}: {'; '.join(map(str, errors))}", errors)
        made.results = results
        return made

    results: Mapping[str, ReplicaResult]

    def __reduce__(self) -> tuple[Any, ...]:
        """For those who carry it between processes."""
        return type(self), (list(self.exceptions), self.results)

    def derive(self, excs: Sequence[AdapterError]) -> "ReplicaErrors":  # type: ignore[override]
        """See ``ExceptionGroup``."""
        return ReplicaErrors(excs, self.results)

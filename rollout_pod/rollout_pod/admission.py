"""What may happen to a request at the gate and behind it, and to all of them at once."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout_pod.engine.base import EngineDelta, EngineOutput
from rollout_pod.protocol import CancelReason, WeightsRef


class NotReady(Exception):
    """No version is committed: nothing may be served."""


class Draining(Exception):
    """The pod is on its way out."""


class DuplicateRequest(Exception):
    """A request with this id is alive."""


class GateStayedClosed(Exception):
    """A parked request's time is over."""


class CancelTimeout(Exception):
    """The engine did not let go of its requests in time."""


@dataclass(frozen=True)
class Admission:
    """What was in force when a request passed the gate."""

    weights: WeightsRef
    generation: int


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) were sampled by ``weights``."""

    weights: WeightsRef
    start: int
    end: int


@dataclass(frozen=True)
class Finished:
    """The engine's final output, with the reason if it was cut."""

    output: EngineOutput
    admission: Admission
    cancel_reason: CancelReason | None
    spans: tuple[Span, ...]
    """Cover all tokens of ``output``."""


OnTokens = Callable[[EngineDelta, WeightsRef], None]
"""Told of tokens as they come, and of the version that sampled them."""


@dataclass(frozen=True)
class Refused:
    """The gate was closed; the engine never saw the request."""

    generation: int
    cancel_reason: CancelReason = CancelReason.REFUSED


@dataclass
class Live:
    """A request that the engine has."""

    engine_id: str
    admission: Admission
    is_tracked: bool
    """Its tokens are noted as they come, so that they may be of several versions. Others are cut
    before the weights change: all of their tokens are of the version that they were admitted to."""
    task: asyncio.Task[EngineOutput] = field(init=False)
    cancel_reason: CancelReason | None = None
    spans: list[Span] = field(default_factory=list)

    def note(self, weights: WeightsRef, count: int) -> None:
        """``count`` tokens came, sampled by ``weights``."""
        start = end = self.spans[-1].end if self.spans else 0
        if self.spans and self.spans[-1].weights == weights:
            start = self.spans.pop().start
        self.spans.append(Span(weights, start, end + count))

    def spans_of(self, output: EngineOutput) -> tuple[Span, ...]:
        """Which version sampled which tokens of the final output."""
        n = len(output.token_ids)
        if not self.is_tracked:
            return (Span(self.admission.weights, 0, n),) if n else ()
        noted = self.spans[-1].end if self.spans else 0
        if noted != n:
            raise AssertionError(f"{noted} tokens were noted of {n}")
        return tuple(self.spans)


@dataclass(frozen=True)
class CancelCounts:
    """What one ``cancel`` did."""

    aborted: int
    finished: int
    """Ended by themselves while the cancel went on."""
    tokens_returned: int
    """Of the aborted ones."""
    kept: int
    """Still in the engine."""
    seconds: float

"""What follows from an attempt: pure.

An attempt is one request to one replica. It ends in an outcome; ``judge`` says what comes next.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from rollout_pod.protocol import CancelReason, Problem, ProblemCode

REST_S: Final = 1.0
"""How long a replica that failed is left alone while others can be asked."""

MAX_ASKED_S: Final = 60.0
"""The longest ``Retry-After`` that is believed."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The rollout is finished."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The replica returned a partial."""

    reason: CancelReason | None


@dataclass(frozen=True, kw_only=True)
class Lost:
    """No end came: refused, reset, silent, or cut in the middle. The pod may still run it."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """The replica, or a proxy before it, says: not now."""

    why: str
    code: ProblemCode | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineTrouble:
    """The engine failed the attempt."""

    why: str
    retry_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The replica refused the request for good."""

    why: str
    status: int
    problem: Problem | None = None

    @property
    def is_duplicate(self) -> bool:
        """It runs a request of this id at the moment."""
        return self.problem is not None and self.problem.code is ProblemCode.DUPLICATE_REQUEST


@dataclass(frozen=True, kw_only=True)
class Nonsense:
    """An answer that is none."""

    why: str


Outcome = Ended | Cut | Lost | Unavailable | EngineTrouble | Refused | Nonsense


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When a rollout is given up before its deadline.

    Args:
        engine_failures: Engine errors in a row, no token between them.
        failures: Failures of any kind in a row, no token between them. Pauses do not count.
    """

    engine_failures: int = 5
    failures: int = 100

    def __post_init__(self) -> None:
        for name in ("engine_failures", "failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What went wrong since the last token."""

    failures: int = 0
    engine_failures: int = 0
    is_lost: bool = False
    """A connection broke at some time: an attempt of ours may still be alive in a pod."""


class GiveUp(StrEnum):
    """Why nothing more is tried."""

    REFUSED = "refused"
    ENGINE = "engine"
    RETRIES = "retries"
    PROTOCOL = "protocol"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Done:
    """The rollout is whole."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Give up."""

    kind: GiveUp
    why: str


@dataclass(frozen=True, kw_only=True)
class Again:
    """Ask again for what is missing."""

    counts: Counts
    why: str
    backoff: bool
    """At growing intervals, so that no replica is asked in a tight loop."""
    rest_s: float = 0.0
    """Leave this replica alone for so long, if there is another one."""
    asked_s: float = 0.0
    """The replica itself asked to be left alone for so long."""


Verdict = Done | Stop | Again


def judge(outcome: Outcome, *, gained: int, counts: Counts, policy: Policy) -> Verdict:
    """Say what comes after an attempt that brought ``gained`` tokens."""
    if gained:
        counts = Counts(is_lost=counts.is_lost)

    def failed(
        counts: Counts, why: str, *, rest_s: float = REST_S, asked_s: float = 0.0
    ) -> Verdict:
        count = counts.failures + 1
        if count >= policy.failures:
            told = f"{count} attempts in a row brought no token: {why}"
            return Stop(kind=GiveUp.RETRIES, why=told)
        return Again(
            counts=replace(counts, failures=count),
            why=why,
            backoff=not gained,
            rest_s=rest_s,
            asked_s=asked_s,
        )

    match outcome:
        case Ended():
            return Done()
        case Cut(reason=CancelReason.CANCELLED):
            return Stop(kind=GiveUp.CANCELLED, why="cut by its id")
        case Cut(reason=reason):
            rest = REST_S if reason is CancelReason.DRAINING else 0.0
            return Again(counts=counts, why=f"cut: {reason}", backoff=not gained, rest_s=rest)
        case Nonsense(why=why):
            return Stop(kind=GiveUp.PROTOCOL, why=why)
        case Refused() if not (outcome.is_duplicate and counts.is_lost):
            return Stop(kind=GiveUp.REFUSED, why=outcome.why)
        case Refused(why=why):
            # the attempt whose connection broke has not left the pod yet
            return failed(counts, why, rest_s=0.0)
        case Lost(why=why):
            return failed(replace(counts, is_lost=True), why)
        case Unavailable(code=ProblemCode.GATE_CLOSED, why=why):
            asked = _asked(outcome.retry_after_s)
            return Again(counts=counts, why=why, backoff=True, rest_s=REST_S, asked_s=asked)
        case Unavailable(why=why):
            return failed(counts, why, asked_s=_asked(outcome.retry_after_s))
        case EngineTrouble(why=why):
            count = counts.engine_failures + 1
            if count >= policy.engine_failures:
                return Stop(kind=GiveUp.ENGINE, why=f"{why} ({count} times in a row)")
            counts = replace(counts, engine_failures=count)
            return failed(counts, why, asked_s=_asked(outcome.retry_after_s))


def _asked(retry_after_s: float | None) -> float:
    return min(retry_after_s or 0.0, MAX_ASKED_S)

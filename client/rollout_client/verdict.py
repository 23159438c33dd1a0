"""What a look at a replica can come to: it is so, it is on its way, or it will not be so. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class Failure(StrEnum):
    """Why it is not waited for any longer."""

    STALLED = "stalled"
    UPDATE_FAILED = "update failed"
    WEIGHTS_UNAVAILABLE = "weights unavailable"
    SUPERSEDED = "superseded"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Reached:
    """It is so."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """It is on its way."""

    progress: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """It will not be so by waiting."""

    kind: Failure
    message: str


Verdict = Reached | Waiting | Failed

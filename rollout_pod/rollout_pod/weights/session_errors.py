"""What can go wrong with a session, as its sender sees it."""

from collections.abc import Sequence

from rollout_pod.weights.manifest import shorten
from rollout_pod.weights.report import LoadReport


class SessionError(Exception):
    """Base of all that can go wrong with a session."""


class RanksError(SessionError):
    """A rank is not there, is busy, or is another than was addressed.

    ``retryable``: the same session may succeed later without anybody mending anything.
    """

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class ManifestError(SessionError):
    """The ranks do not take this manifest. ``problems`` are those of all ranks."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(shorten(problems, 8)))
        self.problems = tuple(problems)


class TransferFailed(SessionError):
    """The bytes did not arrive whole. ``reports`` are those that came in."""

    def __init__(self, message: str, reports: Sequence[LoadReport] = ()) -> None:
        super().__init__(message)
        self.reports = tuple(reports)

"""What a place of files behind a network has to offer, and what can go wrong with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from rollout_pod.weights.headers import SourceError

TEMPORARY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers of a server that may be others in a while."""

Put = Callable[[int, bytes], None]
"""Takes bytes and their position in the file."""


class Transient(SourceError):
    """Worth another try at once; ``after`` is how many seconds the server asked to wait."""

    def __init__(self, message: str, *, after: float | None = None) -> None:
        super().__init__(message, retryable=True)
        self.after = after


class Changed(SourceError):
    """A file is no longer what it was: nothing that was read of it is of use."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: changed while it was read; a version's files must not change once they are "
            "complete",
            retryable=True,
        )


@dataclass(frozen=True)
class Patience:
    """How long a server is waited for. Seconds."""

    connect_s: float = 10.0
    stall_s: float = 30.0
    """Without a byte."""
    piece_s: float = 300.0
    """For one piece, where only a whole one can be waited for."""
    attempts: int = 6
    first_wait_s: float = 0.2
    longest_wait_s: float = 15.0


@dataclass(frozen=True)
class RemoteFile:
    """A file as it was when its first bytes were read."""

    name: str
    size: int
    tag: str
    """What the server calls this content; empty if nothing."""


class Store(Protocol):
    """A folder. For one event loop. All but ``close`` raise ``SourceError`` (``Transient`` where
    another try may help); a message names the file and holds no secret.
    """

    async def names(self) -> frozenset[str] | None:
        """The files' names; None where they cannot be listed."""

    async def known_sums(self) -> Mapping[str, str]:
        """The SHA-256 of files, as far as the store itself knows them."""

    async def content(self, name: str, limit: int) -> bytes | None:
        """All bytes of a small file, or a few more than ``limit``; None if it is not there."""

    async def head(self, name: str, nbytes: int) -> tuple[RemoteFile, bytes]:
        """Size, tag and the first bytes (fewer if the file is shorter)."""

    async def read(self, file: RemoteFile, start: int, stop: int, put: Put) -> None:
        """Exactly these bytes, in order; what was put before an error counts. Raises where the file
        is no longer what it was.
        """

    async def check(self, file: RemoteFile) -> None:
        """Raise if the file is no longer what it was and ``read`` could not have noticed."""

    async def close(self) -> None:
        """Close the connections."""

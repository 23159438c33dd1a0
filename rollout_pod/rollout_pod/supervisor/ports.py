"""What the supervisor asks of the weights agent (``rollout_pod.weights.agent_client``)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class Staged(Protocol):
    """A version whose bytes are at hand and whose manifest every rank accepted."""

    @property
    def bytes(self) -> int:
        """Of all its tensors."""

    @property
    def tensors(self) -> int:
        """How many."""

    @property
    def seconds(self) -> float:
        """That it took."""

    @property
    def transport(self) -> str:
        """Picked by hello."""

    @property
    def sample(self) -> str:
        """A digest of its tensors' names and of some bytes of each: the same on all nodes."""

    @property
    def sums(self) -> str:
        """A digest of the hashes of its files; empty where they are not known."""


class Sent(Protocol):
    """A version that was sent to the last byte."""

    @property
    def bytes(self) -> int:
        """Of all its tensors."""

    @property
    def seconds(self) -> float:
        """That it took."""


class WeightsAgent(Protocol):
    """The process that has the bytes. All calls end by their deadline."""

    async def stage(
        self,
        *,
        session: str,
        version: str,
        path: str,
        rank_sockets: Sequence[Path],
        bucket_bytes: int,
        timeout_s: float,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Staged:
        """Fetch a version and let every rank check its manifest; raises ``StageError``."""

    async def send(self, *, session: str, timeout_s: float) -> Sent:
        """Stream the staged version to every rank; raises ``TransferError``."""

    async def committed(self, *, session: str) -> None:
        """The session's version is the committed one: keep its bytes."""

    async def discard(self, *, session: str) -> None:
        """Nobody waits for this session any more."""

    async def close(self) -> None:
        """End the connection."""

"""What became of each replica of a call."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout_client.trainer.errors import AdapterError
    from rollout_pod.weights.trainer import SentWeights


@dataclass(frozen=True, kw_only=True)
class ReplicaResult:
    """One replica after a call."""

    target: str
    """Its name, or the URL of its admin port."""
    seconds: float
    """From the call to its end here."""
    phase: str = ""
    """What the replica said last that it does; empty where it said nothing."""
    weight_version: str | None = None
    """The version that every rank of it holds; None where there is none, or nobody knows."""
    sent: "SentWeights | None" = None
    """How the bytes travelled; None where none were sent (a version that it fetched or held)."""
    error: "AdapterError | None" = None

    @property
    def ok(self) -> bool:
        """Whether it became what was asked."""
        return self.error is None

"""How a replica is told what to become, whoever owns it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollout_client.trainer.wishes import Hold, Wish
from rollout_pod.protocol import StateDocument


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a replica said of itself last."""

    phase: str = ""
    weight_version: str | None = None


class Following(Protocol):
    """A wish that was accepted."""

    async def reached(self) -> Facts:
        """Wait until it is so.

        Raises:
            AdapterError: it will not be so by waiting.
        """


class Control(Protocol):
    """One replica."""

    name: str
    run_dir: Path | None
    told: str
    """One line for people: how far it was when it was seen last."""

    async def wish(self, wish: Wish) -> Following:
        """Write down what is wanted, after what is there already.

        Raises:
            AdapterError: it was not accepted.
        """

    async def check_update(self, wish: Hold) -> None:
        """Before a version is asked for: whether that can come to anything.

        Raises:
            Asleep: its weights are released.
            Refused: its versions come from elsewhere.
        """

    def has_forgotten(self, state: StateDocument) -> bool:
        """Whether it began anew without what it was told last."""

    async def clear_caches(self, timeout_s: float) -> Facts:
        """Clear every cache of the engine.

        Raises:
            AdapterError: a cache was in use all the time, or it cannot be done from here.
        """

    async def facts(self) -> Facts:
        """What it says of itself now.

        Raises:
            AdapterError: it says nothing.
        """

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""


def asleep_text(name: str) -> str:
    """Why no version can be loaded, and what to do."""
    return (
        f"{name}: the engine's weights are released, and nothing can be loaded into them: "
        'resume(("weights",)) first'
    )

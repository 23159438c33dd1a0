"""Engines by name: what installed packages offer as entry points ``rollout_pod.engines``."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from rollout_pod.engine.base import Engine, EngineSettings

GROUP = "rollout_pod.engines"


class EngineChoiceError(Exception):
    """The engine that was asked for cannot be made; says which there are, or what is wrong."""


def installed() -> dict[str, EntryPoint]:
    """All engines by name. Of two of one name the first on Python's path counts, as for modules."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found


def create(name: str, settings: EngineSettings) -> Engine:
    """Make the engine of this name; it is not started.

    Raises:
        EngineChoiceError: none is called so, or its package is broken.
    """
    found = installed()
    if name not in found:
        there = ", ".join(sorted(found)) or f"none (no package offers an entry point {GROUP!r})"
        raise EngineChoiceError(f"no engine {name!r} is installed; there are: {there}")
    entry = found[name]
    try:
        make: Callable[[EngineSettings], Engine] = entry.load()
    except (ImportError, AttributeError) as error:
        raise EngineChoiceError(
            f"engine {name!r} is installed as {entry.value}, which cannot be imported: {error}"
        ) from error
    return make(settings)

"""A loop whose time passes only when nobody has anything to do: then it jumps to the next timer.

Whatever waits for a deadline costs nothing, and a run depends on nothing but its operations.
"""

import asyncio
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

SPINS = 10_000
"""Turns in a row in which no time passes."""


TURN_S = 1e-6
"""Of a turn in which something was done: a deadline that is nearly there comes."""


class NothingLeft(AssertionError):
    """Nothing will ever happen any more."""


class _Selector(selectors.SelectSelector):
    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Called once in every turn of the loop."""
        loop = self.loop
        loop.turns += 1
        loop.on_turn()
        if timeout is None:
            raise NothingLeft("somebody waits for ever")
        loop.spins = 0 if timeout else loop.spins + 1
        if loop.spins > SPINS:
            raise NothingLeft("somebody turns round and round, and no time passes")
        loop.now += timeout or TURN_S
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Without sockets and threads."""

    def __init__(self) -> None:
        self.now = 1000.0
        """Seconds."""
        self.turns = 0
        self.spins = 0
        self.on_turn: Callable[[], None] = lambda: None
        """Called between any two turns; what it raises ends the run."""
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


@contextmanager
def clock_of(loop: VirtualLoop) -> Iterator[None]:
    """Inside, the modules of pod, operator and client read the loop's clock."""
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time, perf_counter=loop.time)
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("rollout_pod.", "rollout_operator.", "rollout_client."))
        and getattr(module, "time", None) is time
    ]
    for module in modules:
        module.time = clock
    try:
        yield
    finally:
        for module in modules:
            module.time = time

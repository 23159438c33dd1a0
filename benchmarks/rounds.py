"""Rounds that fit into the time there is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class TimeBudget:
    """Seconds for all of a benchmark, from now on, the starts of its servers included."""

    seconds: float
    _began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds; negative when they are over."""
        return self._began + self.seconds - time.monotonic()

    def rounds(self, most: int, *, share: float = 1.0) -> "Rounds":
        """At most ``most`` rounds that end within ``share`` of what is left. None where nothing
        is left, else one at least.
        """
        return Rounds(most, time.monotonic() + share * self.left(), self.left() > 0)


@dataclass
class Rounds:
    """An iterator over the numbers of rounds; ``done`` is how many were begun."""

    most: int
    until: float
    begins: bool
    done: int = 0
    _longest: float = 0.0
    _began: float = 0.0

    def __iter__(self) -> "Rounds":
        """The rounds themselves."""
        return self

    def __next__(self) -> int:
        """Begin another round, if it is likely to end in time."""
        now = time.monotonic()
        if self.done:
            self._longest = max(self._longest, now - self._began)
        fits = self.begins if not self.done else now + self._longest <= self.until
        if self.done >= self.most or not fits:
            raise StopIteration
        self._began = now
        self.done += 1
        return self.done - 1


def rotated(kinds: Sequence[str], number: int) -> Sequence[str]:
    """``kinds``, begun with another one each round, and every other round in reverse: none is
    always the first after a pause, or the one after the same other.
    """
    start = number % len(kinds)
    order = [*kinds[start:], *kinds[:start]]
    return order[::-1] if number % 2 else order

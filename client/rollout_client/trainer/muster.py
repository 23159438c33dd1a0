"""Replicas that are sent the same tensors at the same time begin at the same time."""

import threading
import time
from collections.abc import Callable, Collection
from typing import Final

LAG_S: Final = 30.0
"""How long those that are ready wait for one that is not."""


class Missed(Exception):
    """The tensors came once, and this replica was not ready for them."""


class Muster:
    """Senders wait here, each on its thread, before their pods are told to switch.

    Nobody's generation is stopped while somebody else is waited for.

    Args:
        readers: who is expected.
        start: called once, by the first that goes on, when all are here or will not come; with
            those that did not.
        lag_s: the longest wait after the first one came.
    """

    def __init__(
        self, readers: Collection[str], start: Callable[[Collection[str]], None], *, lag_s: float
    ) -> None:
        self._expected = set(readers)
        self._start = start
        self._lag_s = lag_s
        self._change = threading.Condition()
        self._first: float | None = None
        self._left: set[str] = set()
        self._is_open = self._is_started = False

    def arrive(self, reader: str) -> None:
        """Wait for the others. Blocks; again, it returns at once.

        Raises:
            Missed: the others have begun.
        """
        with self._change:
            self._expected.discard(reader)
            self._first = self._first or time.monotonic()
            while not self._is_open and self._expected and reader not in self._left:
                left = self._first + self._lag_s - time.monotonic()
                if left <= 0:
                    self._left |= self._expected
                    break
                self._change.wait(left)
            if reader in self._left:
                raise Missed("the tensors came once, and it was not ready for them in time")
            self._is_open = True
            self._change.notify_all()
            is_mine, self._is_started = not self._is_started, True
            missing = frozenset(self._left)
        if is_mine:
            self._start(missing)

    def leave(self, reader: str) -> None:
        """It does not come (any more). Idempotent."""
        with self._change:
            self._left.add(reader)
            self._expected.discard(reader)
            self._change.notify_all()

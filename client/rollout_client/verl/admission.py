"""verl's own gate: which calls wait, which are sent back, and which must return what they have.

The pod has a gate as well, which others close, too. This one is closed by verl's
``abort_all_requests`` alone, and so tells its partials from those that are nobody's business.
"""

import asyncio
from types import TracebackType
from typing import Self

from rollout_client.rollout import Rollout


class Admission:
    """Of one server; lives in one event loop."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._changed = asyncio.Event()
        self.is_rejecting = False
        self.in_flight = 0

    @property
    def is_open(self) -> bool:
        """Whether calls may be sent to the pod."""
        return self._is_open.is_set()

    def close(self, *, rejecting: bool) -> int:
        """Let later calls wait, or send them back; return how many are in flight.

        A later close says anew what becomes of them, also of those that wait already.
        """
        self._is_open.clear()
        self.is_rejecting = rejecting
        self._wake()
        return self.in_flight

    def open(self) -> None:
        """Let all calls pass. Idempotent."""
        self.is_rejecting = False
        self._is_open.set()
        self._wake()

    def call(self) -> "Call":
        """One call of ``generate``."""
        return Call(self)

    async def changed(self) -> None:
        """Wait for the next ``close`` or ``open``."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Call:
    """One call of ``generate``; a context manager while the pod has it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._was_cut = False

    async def admitted(self) -> bool:
        """Wait behind a closed gate. False: the caller shall ask elsewhere."""
        while not self._admission.is_open:
            if self._admission.is_rejecting:
                return False
            await self._admission.changed()
        return True

    def __enter__(self) -> Self:
        self._admission.in_flight += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._admission.in_flight -= 1

    def was_cut(self, partial: Rollout) -> None:
        """The pod returned a partial."""
        self._was_cut = True

    def must_return(self) -> bool:
        """Whether verl wants what there is, instead of the rest.

        A call that the pod has not begun yet stays with it, as one that arrives now would wait.
        """
        admission = self._admission
        return admission.is_rejecting or (self._was_cut and not admission.is_open)

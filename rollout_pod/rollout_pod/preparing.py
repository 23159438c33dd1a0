"""A request that is being prepared: the gate does not know it yet, and yet it can be cut."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollout_pod.protocol import GenerateRequest

_T = TypeVar("_T")


class Preparing:
    """Its media are fetched, its grammar is compiled: what may take minutes."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.cut = asyncio.Event()
        """Set to end it."""

    async def finished(
        self,
        work: Coroutine[None, None, _T],
        gone: Callable[[], Coroutine[None, None, None]] | None,
    ) -> _T | None:
        """What ``work`` comes to, or raises; None where the request was cut, or its caller has
        gone, before that.
        """
        task = asyncio.ensure_future(work)
        waits: list[asyncio.Future[Any]] = [task, asyncio.ensure_future(self.cut.wait())]
        if gone is not None:
            waits.append(asyncio.ensure_future(gone()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:  # nothing of it is in the engine
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        # looked at last: whoever cut it meanwhile was told that it is cut
        return None if self.cut.is_set() or task.cancelled() else task.result()

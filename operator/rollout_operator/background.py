"""One task that an object owns."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any


class Background:
    """Started once, ended and waited for by ``stop``."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin ``work``."""
        # an empty context: else the task would keep alive what some caller's context holds
        self._task = asyncio.create_task(work, context=contextvars.Context())

    async def stop(self) -> None:
        """Cancel it and wait until it has ended. Nothing happens if it was never started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

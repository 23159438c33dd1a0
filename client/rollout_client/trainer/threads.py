"""Work that blocks, on a thread that is never left behind."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def on_thread(work: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
    """Run ``work`` on a thread of its own: pushes wait for each other, and a pool has an end.

    Cancelled, it calls ``cancel`` and waits until ``work`` has ended: nobody reads tensors then.
    """
    with ThreadPoolExecutor(1, "rollout-trainer") as thread:
        running = asyncio.wrap_future(thread.submit(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            cancel()
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()  # whoever cancels does not want to know
            raise

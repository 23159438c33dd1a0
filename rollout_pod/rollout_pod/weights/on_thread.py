"""A blocking call for callers of asyncio, on a thread that is never left behind."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


async def on_thread(call: Callable[[], _T], give_up: Callable[[], None] = lambda: None) -> _T:
    """What ``call`` returns or raises, on a thread of its own: pushes wait for each other, and a
    pool has an end.

    Cancelled, it calls ``give_up``, which makes the call end soon, and waits for that, however
    often it is cancelled: nobody reads tensors when the cancellation goes on.
    """
    cancelled: asyncio.CancelledError | None = None
    with ThreadPoolExecutor(1, "rollout-weights") as thread:
        # no task: a loop that ends would cancel it and leave the thread alone
        work = asyncio.wrap_future(thread.submit(contextvars.copy_context().run, call))
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError as error:
                cancelled = error
                give_up()
    if cancelled is None:
        return work.result()
    work.exception()  # nobody is left to be told of it
    raise cancelled

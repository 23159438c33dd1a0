"""A blocking call for callers of asyncio: cancelled, it is told to give up, and waited for."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def on_thread(call: Callable[[], _T], give_up: Callable[[], None]) -> _T:
    """What ``call`` returns or raises, on a thread. ``give_up`` makes it end soon: the thread has
    ended when the cancellation goes on.
    """
    work = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        give_up()
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()  # nobody is left to be told of it
        raise

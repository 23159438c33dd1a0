"""Calls into file systems, which may hang for good (an NFS server that is gone)."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from rollout_pod.weights.headers import SourceError
from rollout_pod.weights.locations import is_url

TICK_S: Final = 0.1
"""How soon a cancelled call is noticed."""
NOTICE_S: Final = 1.0
"""How long a call may take to notice that it is cancelled; then it is left behind."""

T = TypeVar("T")


class HangError(SourceError):
    """A call that did not end though it was cancelled. Its thread lives on: memory that it was
    given may still be written to.
    """

    def __init__(self, where: Path | str) -> None:
        what = "server" if is_url(str(where)) else "file system"
        super().__init__(f"{where}: reading it hangs; is its {what} reachable?", retryable=True)


class Readers:
    """Runs blocking calls on threads that nobody has to wait for. For one event loop."""

    def __init__(self) -> None:
        self._left: list[threading.Thread] = []

    @property
    def hung(self) -> int:
        """How many calls were left behind and have not ended since."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        return len(self._left)

    async def run(self, call: Callable[[], T], *, path: Path | str, cancel: threading.Event) -> T:
        """The result of ``call``, which should end soon after ``cancel`` is set.

        Args:
            call: runs on a thread of its own.
            path: folder or URL that it reads, for the message.
            cancel: whoever sets a deadline sets this.

        Raises:
            HangError: it goes on ``NOTICE_S`` after ``cancel``. Whatever ``call`` raises.
        """
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        # daemonic, and not of an executor: the interpreter would wait for those at its end
        thread = threading.Thread(
            target=_run, args=(call, done), name="weights-source", daemon=True
        )
        thread.start()
        waiter = asyncio.wrap_future(done)
        cancelled_at: float | None = None
        try:
            while not waiter.done():
                await asyncio.wait({waiter}, timeout=TICK_S)
                if cancel.is_set():
                    now = time.monotonic()
                    cancelled_at = now if cancelled_at is None else cancelled_at
                    if now - cancelled_at >= NOTICE_S and not waiter.done():
                        raise HangError(path)
            return waiter.result()
        finally:
            if not waiter.done():
                waiter.cancel()
                self._left.append(thread)


def _run(call: Callable[[], T], done: "Future[T]") -> None:
    try:
        result = call()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(result)

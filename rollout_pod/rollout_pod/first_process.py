"""What a container's first process has to do for itself."""

import os
import signal
from types import FrameType


def end_by_sigterm() -> None:
    """Let SIGTERM end this process until it has a handler of its own. Call it before the imports
    that take seconds.

    The kernel passes on to a container's first process no signal that it has no handler for
    (pid_namespaces(7)): a pod deleted while it starts would wait for the end of its grace period.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)  # nothing has begun that would have to be put away

"""Ties a worker's life to the server's: vLLM's processes outlive a server that is killed."""

import os
import select
import signal
import threading

SERVER_PID = "ROLLOUT_SERVER_PID"
"""Environment variable of the engine's processes: whose end is theirs."""


def die_with(pid: int) -> None:
    """Kill this process when the process ``pid`` has ended, and leave its terminal group.

    A container whose processes share a namespace with others has no init of its own that would end
    them, and they would keep the GPU's memory. Interrupts from the keyboard are for the server,
    which drains first.
    """
    os.setpgid(0, 0)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        _die()
    threading.Thread(target=_watch, args=(descriptor,), name="orphan-watch", daemon=True).start()


def _watch(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

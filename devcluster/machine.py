"""The machine that a cluster has to itself while it is brought up or taken down."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from devcluster.errors import DevclusterError
from devcluster.report import Reporter

# another `up` may be building
LOCK_TIMEOUT_S = 3600.0


def need_root() -> None:
    """Refuse to work for anyone but root."""
    if os.geteuid() != 0:
        raise DevclusterError("The dev cluster runs a kubelet and containerd: run this as root")


@contextmanager
def machine_lock(report: Reporter) -> Iterator[None]:
    """Let one `up` or `down` work at a time: addresses and ports are the machine's.

    Raises:
        DevclusterError: another one does not come to an end.
    """
    # a folder can be locked as well as a file, and nothing is left behind
    handle = os.open("/var/lib", os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        waiting = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    report.say("waiting for another devcluster command on this machine")
                    waiting = True
                if time.monotonic() > deadline:
                    raise DevclusterError("another devcluster command does not end") from None
                time.sleep(0.2)
        yield
    finally:
        os.close(handle)

"""What the engine's processes print: passed on unchanged, the last of it remembered.

vLLM tells the parent only that a child failed; why, it prints in the child. So while the children
are spawned, this process' stdout and stderr are pipes, which the children inherit, and a thread
copies them to where they went before.
"""

import contextlib
import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import resource_tracker

_KEPT_LINES = 1000
_CHUNK = 1 << 16

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# "(EngineCore pid=7) ERROR 11-30 18:00:00 [core.py:1] ", each part optional
_LOG_PREFIX = re.compile(
    r"^(\([^()]*pid=\d+\)\s*)?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d(\.\d+)? (\[[^\]]*\] ?)?)?"
)
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b: *\S")
# what one process of vLLM says of the failure of another: true, and no help
_HEARSAY = ("root cause", "initialization failed", "EngineDeadError", "died unexpectedly")


def last_error(lines: list[str]) -> str | None:
    """The last line that ends a traceback and says more than that another process failed."""
    for line in reversed(lines):
        text = _LOG_PREFIX.sub("", _ANSI.sub("", line)).strip()
        if _ERROR_LINE.match(text) and not any(word in text for word in _HEARSAY):
            return text
    return None


class OutputTail:
    """Copies and remembers what child processes write to stdout and stderr."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=_KEPT_LINES)
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Processes started inside inherit the pipes. Once only in the life of the object.

        It changes the file descriptors 1 and 2 of the whole process for that time; what this
        process itself prints meanwhile takes the same way.
        """
        # Python's own helper process lives as long as this one: it must not hold the pipes.
        resource_tracker.ensure_running()
        kept = {}
        pipes = {}
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            with contextlib.suppress(ValueError, OSError, AttributeError):
                stream.flush()
            read, write = os.pipe()
            kept[fd] = os.dup(fd)
            pipes[read] = kept[fd]
            os.dup2(write, fd)
            os.close(write)
        self._thread = threading.Thread(
            target=self._pump, args=(pipes,), name="engine-output", daemon=True
        )
        self._thread.start()
        try:
            yield
        finally:
            for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
                with contextlib.suppress(ValueError, OSError, AttributeError):
                    stream.flush()
                os.dup2(kept[fd], fd)

    def last_error(self, *, within_s: float | None = None) -> str | None:
        """The last error line, of the last ``within_s`` seconds if given."""
        since = 0.0 if within_s is None else time.monotonic() - within_s
        return last_error([line for at, line in list(self._lines) if at >= since])

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait until every process that holds the pipes is gone, at most ``timeout_s``."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _pump(self, pipes: dict[int, int]) -> None:
        partial = dict.fromkeys(pipes, b"")
        with selectors.DefaultSelector() as selector:
            for read in pipes:
                selector.register(read, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, _CHUNK)
                    if data:
                        _write_all(pipes[key.fd], data)
                        *lines, partial[key.fd] = (partial[key.fd] + data).split(b"\n")
                        partial[key.fd] = partial[key.fd][-_CHUNK:]
                        now = time.monotonic()
                        self._lines.extend((now, ln.decode(errors="replace")) for ln in lines)
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    os.close(pipes[key.fd])


def _write_all(fd: int, data: bytes) -> None:
    # Nobody may read our own stdout any more; the children must not feel it.
    with contextlib.suppress(OSError):
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

"""Tensors that come only once, for several replicas at the same time."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final

import torch

Pairs = Iterator[tuple[str, torch.Tensor]]

_AHEAD: Final = 1
"""Tensors that wait for one reader: with the one that each side holds, three are alive at most."""
_TICK_S: Final = 0.2


class SourceFailed(Exception):
    """Whoever makes the tensors failed; its error is the cause."""


class Pump:
    """Reads pairs on a thread of its own, once, and hands each to every reader.

    The slowest reader sets the pace; one that is closed is left behind. Nothing is read before
    ``start``.

    Args:
        pairs: made by this, on the thread, when it starts: what it gathers belongs there.
        readers: their names.
        is_drained: read to the end though every reader is closed, since other ranks gather too, or
            ``keep`` wants all of it.
        keep: called with each pair, before the readers get it.
        gpu: the thread's present GPU: gathers go there.
    """

    def __init__(
        self,
        pairs: Callable[[], Pairs],
        readers: tuple[str, ...],
        *,
        is_drained: bool = False,
        keep: Callable[[str, torch.Tensor], None] | None = None,
        gpu: int | None = None,
    ) -> None:
        self._pairs = pairs
        self._is_drained = is_drained
        self._keep = keep
        self._gpu = gpu
        self._readers = {name: _Reader() for name in readers}
        self._thread = threading.Thread(target=self._run, name="tensors", daemon=True)
        self._started = threading.Event()
        self.error: BaseException | None = None
        """What the source failed with."""
        self.is_whole = False
        """All of it was read."""

    def start(self) -> None:
        """Begin to read. Idempotent."""
        if not self._started.is_set():
            self._started.set()
            self._thread.start()

    def join(self) -> None:
        """Wait until nothing is read any more; at once where it was not started. Blocks."""
        if self._started.is_set():
            self._thread.join()

    def pairs(self, name: str) -> Pairs:
        """One reader's pairs, to be read once, on a thread.

        Raises:
            SourceFailed: instead of the pair that could not be made.
        """
        reader = self._readers[name]
        while True:
            item = reader.take()
            if item is None:
                if self.error is not None:
                    raise SourceFailed(f"{type(self.error).__name__}: {self.error}") from self.error
                return
            yield item

    def leave(self, name: str) -> None:
        """This reader takes no more. Idempotent."""
        self._readers[name].close()

    def _run(self) -> None:
        try:
            with present_gpu(self._gpu):
                self.is_whole = self._read()
        except BaseException as error:  # it is told by whoever reads
            self.error = error
        finally:
            for reader in self._readers.values():
                reader.put(None)

    def _read(self) -> bool:
        for name, tensor in self._pairs():
            if self._keep is not None:
                self._keep(name, tensor)
            wanted = [reader.put((name, tensor)) for reader in self._readers.values()]
            if not any(wanted) and not self._is_drained:
                return False
        return True


def present_gpu(index: int | None) -> contextlib.AbstractContextManager[object]:
    """Each thread has one of its own, at first number 0."""
    return contextlib.nullcontext() if index is None else torch.cuda.device(index)


class _Reader:
    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[str, torch.Tensor] | None] = queue.Queue(_AHEAD)
        self._closed = threading.Event()

    def put(self, item: tuple[str, torch.Tensor] | None) -> bool:
        """Whether the reader is still there; waits until it has room."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_TICK_S)
            except queue.Full:
                continue
            return True
        return False

    def take(self) -> tuple[str, torch.Tensor] | None:
        while not self._closed.is_set():
            try:
                return self._queue.get(timeout=_TICK_S)
            except queue.Empty:
                continue
        return None

    def close(self) -> None:
        self._closed.set()
        while not self._queue.empty():  # let go of the tensors
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break

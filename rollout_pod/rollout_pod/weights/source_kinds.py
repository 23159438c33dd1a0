"""The two kinds of sources: a folder, and a URL."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rollout_pod.weights.checkpoint import Checkpoint, verify
from rollout_pod.weights.locations import is_url
from rollout_pod.weights.sources import open_checkpoint, read_tensors

HASHERS: Final = 4


class Source(Protocol):
    """Where a version lies. All calls block; they end soon after ``cancel`` is set, unless a file
    system hangs.
    """

    @property
    def where(self) -> str:
        """Folder or URL."""

    def open(self, cancel: threading.Event) -> Checkpoint:
        """Read and check all headers; no tensor bytes.

        Raises:
            SourceError: as it says; or cancelled.
        """

    def read(
        self,
        checkpoint: Checkpoint,
        target: memoryview,
        offsets: Sequence[int],
        *,
        done: set[int],
        progress: Callable[[int], None],
        cancel: threading.Event,
    ) -> None:
        """Read all tensors to their offsets in ``target``.

        Args:
            checkpoint: whose headers were checked.
            target: writable bytes.
            offsets: where each tensor goes, in the order of ``checkpoint.tensors``.
            done: the pieces that ``target`` holds already; they are not read again. Those that
                come are added; empty where what came is of no use.
            progress: told bytes as they come, and those that were there; called on any thread.
            cancel: ends the reading.

        Raises:
            SourceError: as it says; or cancelled.
        """


@dataclass(frozen=True)
class FolderSource:
    """A folder that this process sees."""

    path: Path

    @property
    def where(self) -> str:
        """See ``Source``."""
        return str(self.path)

    def open(self, cancel: threading.Event) -> Checkpoint:
        """See ``Source``."""
        return open_checkpoint(self.path)

    def read(
        self,
        checkpoint: Checkpoint,
        target: memoryview,
        offsets: Sequence[int],
        *,
        done: set[int],
        progress: Callable[[int], None],
        cancel: threading.Event,
    ) -> None:
        """See ``Source``."""
        read_tensors(checkpoint, target, offsets, progress=progress, cancel=cancel, done=done)


def source_of(where: str) -> Source:
    """The source that a path or a URL names."""
    if not is_url(where):
        return FolderSource(Path(where))
    from rollout_pod.weights.remote import RemoteSource  # with libraries that folders do not need

    return RemoteSource(where.rstrip("/"))


def verify_all(
    checkpoint: Checkpoint, target: memoryview, offsets: Sequence[int], cancel: threading.Event
) -> None:
    """Compare all files with the hashes that are known of them.

    Raises:
        SourceError: one differs; or cancelled.
    """
    with ThreadPoolExecutor(HASHERS, "weights-hash") as pool:
        jobs = [
            pool.submit(verify, checkpoint, target, offsets, file, cancelled=cancel.is_set)
            for file in range(len(checkpoint.sums))
        ]
        for job in jobs:
            job.result()

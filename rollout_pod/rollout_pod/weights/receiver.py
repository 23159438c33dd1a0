"""The receiving end in every engine worker: a thread that talks, a call that loads.

The thread answers greetings and manifests while the engine serves and never touches the model.
``Receiver.load`` runs on the worker's main thread, when the engine is paused.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rollout_pod.weights import wire
from rollout_pod.weights.device import Device
from rollout_pod.weights.loader import Loader, ReplayingLoader
from rollout_pod.weights.loading import LoadError, Loading
from rollout_pod.weights.memory import Memories
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.spec import Expected
from rollout_pod.weights.talking import ERROR_CHARS, Talker

log = logging.getLogger(__name__)

HAND_OVER_S = 0.05
"""The sender waits for the report, which would else be sent when the interpreter comes to it."""
LOOK_S = 5.0
"""How long it may take to look whether the sender of GPU memory is there; in vain, it is not."""


class Receiver:
    """One rank's receiver.

    Args:
        rank: global (data-parallel index x world + rank).
        world: how many ranks hold the model together; a session must address all of them.
        host: named in reports.
        socket_path: where to bind; at most 107 bytes.
        shm_dir: where the sender's segments are mounted here.
        expected: what the boot load recorded, None until it has; called on the thread. Raises
            ``UpdatesUnsupportedError`` where no update can be loaded: each is rejected.
        device: the rank's GPU; without one only shared memory is possible.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        host: str,
        socket_path: Path,
        shm_dir: Path,
        expected: Callable[[], Expected | None],
        device: Device | None = None,
    ) -> None:
        self.rank = rank
        self.socket_path = socket_path
        self._host = host
        self._memories = Memories(shm_dir, device)
        self._talker = Talker(
            rank=rank,
            world=world,
            host=host,
            socket_path=socket_path,
            memories=self._memories,
            expected=expected,
        )

    def start(self) -> None:
        """Bind and start the thread.

        Raises:
            ValueError: the socket's path is too long.
            FileExistsError: something that is no socket lies there.
        """
        self._talker.start()

    def close(self) -> None:
        """End the thread; a load in progress fails. Idempotent."""
        self._talker.close()
        self._memories.close()

    def accepted(self, session: str) -> str:
        """``Manifest.mark`` of a session that this rank has accepted and not yet loaded; empty
        where there is none of this name.
        """
        return self._talker.accepted(session)

    def load(
        self,
        session: str,
        loader: Loader,
        *,
        version: str,
        flush: bool,
        timeout_s: float,
        aside: bool = False,
    ) -> LoadReport:
        """Give the model what ``session`` brings. Blocks; never raises for what a sender does or a
        loader raises: the report says so. After a failure that ``touched`` the model load anew,
        with ``flush``.

        Args:
            session: the session whose manifest this rank has accepted.
            loader: puts the tensors into the model; called on this thread.
            version: must be the manifest's.
            flush: call ``loader.flush`` first: a load before this one failed.
            timeout_s: for all of it; a call of the loader itself is not interrupted.
            aside: the loader leaves the model alone (``shadow.StagingLoader``): this may be called
                while the engine serves, on a thread of its own.
        """
        started = time.monotonic()
        tensors = nbytes = 0
        touched, path, note = False, "", ""
        transport = mode = ""
        steps: dict[str, float] = {}
        claimed, error = self._talker.claim(session, version)
        if claimed is not None:
            incoming, manifest = claimed
            run = Loading(
                incoming=incoming,
                manifest=manifest,
                memories=self._memories,
                loader=loader,
                lock=self._talker.lock,
                post=lambda message: self._talker.post(incoming.peer, message),
                confirm=lambda: self._talker.confirm(incoming, LOOK_S),
                deadline=started + timeout_s,
                steps=steps,
            )
            with self._memories.lock:
                try:
                    tensors, nbytes = run.run(flush=flush)
                except LoadError as problem:
                    error = str(problem)
                except Exception as problem:
                    log.exception("rank %d: loading %s failed", self.rank, version)
                    error = f"{type(problem).__name__}: {problem}"
                finally:
                    self._memories.end_load()
            touched = run.touched and not aside
            path, note = "reference", ""
            mode = incoming.mode
            transport = incoming.transport if mode else ""
            if isinstance(loader, ReplayingLoader):
                path, note = loader.summary()
            error = self._talker.settle(incoming, error)
        report = LoadReport(
            rank=self.rank,
            host=self._host,
            ok=not error,
            version=version,
            tensors=tensors,
            bytes=nbytes,
            seconds=time.monotonic() - started,
            error=error[:ERROR_CHARS],
            touched=touched,
            path=path,
            note=note[:ERROR_CHARS],
            steps=tuple(steps.items()),
            transport=transport,
            mode=mode,
            manifest=claimed[1].mark if claimed is not None else "",
        )
        if claimed is not None:
            told = wire.Report.of(session, report)
            matters = report.ok and transport == "cuda_ipc"
            wait_s = LOOK_S if matters else HAND_OVER_S
            if not self._talker.post(claimed[0].peer, told, wait_s) and matters:
                # what lay there when it was read is known only of a process that outlived that
                error = "the sender ended while its GPU memory was read"
                return dataclasses.replace(report, ok=False, error=error)
        return report

"""Two replicas without Kubernetes: ``rollout-pod serve`` processes of this machine."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from examples.async_grpo.replicas import Published, Replicas, RunError, by_folder, pushing
from rollout_client.trainer import PodTarget, SyncServerAdapter
from rollout_pod.ctl import Ctl, CtlError
from rollout_pod.protocol import StateDocument

START_S = 240.0
UPDATE_S = 120.0
STOP_S = 40.0
_ENGINE_ARGS = (
    "--dtype=float32", "--max-model-len=44", "--max-num-seqs=128", "--skip-tokenizer-init",
)  # fmt: skip
_HOST_MEMORY = 64 << 20


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class LocalReplica:
    """One process, its run folder and its log.

    Args:
        name: For people; also the name of its folder.
        folder: Gets the run folder.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.data, self._admin = _free_address(), _free_address()
        self._run_dir = folder / name
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._ctl: Ctl | None = None
        self._open = ExitStack()

    async def start(self, model: Path) -> None:
        """Start it; ``serving`` says when it is there."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rollout_pod", "serve",
                f"--model={model}", f"--run-dir={self._run_dir}", f"--data-address={self.data}",
                f"--admin-address={self._admin}", f"--host-memory={_HOST_MEMORY}",
                "--log-level=WARNING", "--", *_ENGINE_ARGS,
                stdout=log, stderr=log, start_new_session=True,  # Ctrl-C is for us to pass on
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    async def serving(self) -> None:
        """Wait until it serves what it was started with.

        Raises:
            RunError: it ended, or the time is over; carries the end of its log.
        """
        try:
            async with asyncio.timeout(START_S):
                while not await asyncio.to_thread(self._is_serving):
                    if self._process is None or self._process.returncode is not None:
                        raise RunError(f"{self.name} ended at once:\n{self._tail()}")
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise RunError(
                f"{self.name} does not serve after {START_S:g} s:\n{self._tail()}"
            ) from None

    def _is_serving(self) -> bool:
        try:
            return self._state().ready
        except CtlError:
            return False

    @property
    def target(self) -> PodTarget:
        """How a trainer steers it."""
        return PodTarget.of_run_dir(self._run_dir, f"http://{self._admin}")

    async def last_update(self) -> Published:
        """What it says of its last update."""
        update = (await asyncio.to_thread(self._state)).update
        return Published(self.name, paused_s=(update and update.seconds.paused) or 0.0)

    async def stop(self) -> None:
        """End it: by SIGTERM, which drains, and after ``STOP_S`` by force."""
        self._open.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _state(self) -> StateDocument:
        if self._ctl is None:
            ctl = Ctl.of_run_dir(self._run_dir, f"http://{self._admin}")
            self._ctl = self._open.enter_context(ctl)
        return self._ctl.state()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])


@asynccontextmanager
async def local_replicas(
    model: Path, folder: Path, *, pushes: bool = True, count: int = 2
) -> AsyncIterator[Replicas]:
    """Start them, and end them afterwards.

    Args:
        model: The checkpoint they start with.
        folder: For their run folders, logs and the weight versions.
        pushes: Send weights out of this process' memory; else by folders.
        count: How many.

    Raises:
        RunError: one does not start.
    """
    pods = [LocalReplica(f"replica-{n}", folder) for n in range(count)]

    async def look() -> list[Published]:
        return await asyncio.gather(*(pod.last_update() for pod in pods))

    try:
        for pod in pods:
            await pod.start(model)
        for pod in pods:
            await pod.serving()
        with SyncServerAdapter([pod.target for pod in pods], timeout_s=UPDATE_S) as adapter:
            deliver = (
                pushing(adapter)
                if pushes
                else by_folder(adapter, folder / "versions", names_source=True)
            )
            yield Replicas([f"http://{pod.data}" for pod in pods], deliver, look)
    finally:
        await asyncio.gather(*(pod.stop() for pod in pods))

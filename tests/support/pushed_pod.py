"""A pod around the fake engine whose ranks are real: what a trainer pushes really arrives."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_pod.engine.base import RankReport
from rollout_pod.serve import Server
from rollout_pod.server.push_app import bind_push_socket, make_push_app
from tests.support.fakes import GARBAGE, FakeEngine
from tests.support.pods import Pod, running_pod
from tests.support.weights import ModelLoader, Place


@dataclass
class RanksEngine(FakeEngine):
    """Loads through the receivers of ``place``; ``loaders`` hold what arrived."""

    place: Place | None = None
    loaders: list[ModelLoader] = field(default_factory=list)
    before_clear: asyncio.Event | None = None
    gpu_uuid: str | None = None

    async def load_weights(
        self, session: str, *, version: str, flush: bool, timeout_s: float
    ) -> tuple[RankReport, ...]:
        self.calls.append(f"load {version}{' flush' if flush else ''}")
        assert self.place and self.paused
        assert flush or not self.needs_flush, "a failed load was left in the model"
        loads = [
            asyncio.to_thread(
                receiver.load, session, loader, version=version, flush=flush, timeout_s=timeout_s
            )
            for receiver, loader in zip(self.place.receivers, self.loaders, strict=True)
        ]
        reports = await asyncio.gather(*loads)
        if all(report.ok for report in reports):
            self.holds, self.needs_flush = version, False
        elif any(report.touched for report in reports):
            self.holds, self.needs_flush = GARBAGE, True
        return tuple(RankReport(**report.as_dict()) for report in reports)

    async def accepted_manifests(self, session: str) -> tuple[str, ...]:
        assert self.place
        return tuple(receiver.accepted(session) for receiver in self.place.receivers)

    async def clear_caches(self) -> Any:
        if self.before_clear:
            await self.before_clear.wait()
        return await super().clear_caches()

    def gpu_uuids(self) -> tuple[str | None, ...]:
        return (self.gpu_uuid,) * self.world

    def rank_sockets(self) -> tuple[Path, ...]:
        assert self.place
        return tuple(self.place.rank_sockets)


@asynccontextmanager
async def pushed_pod(place: Place, **more: Any) -> AsyncIterator[Pod]:
    """It listens on ``<run_dir>/push.sock``; the receivers of ``place`` have been started."""
    engine = RanksEngine(
        world=len(place.receivers), place=place, loaders=[ModelLoader() for _ in place.receivers]
    )
    place.run_dir.mkdir(exist_ok=True)
    async with running_pod(place.run_dir, engine=engine, **more) as pod:
        app = make_push_app(pod.supervisor, shm_dir=place.shm_dir)
        server = Server(app, bind_push_socket(place.run_dir))
        task = asyncio.create_task(server.run_until_exit())
        try:
            yield pod
        finally:
            pod.supervisor.board.close()
            server.should_exit = True
            await task


class TrainerProcess:
    """``weights_pusher.py`` as a process of its own, that stops at each of its steps."""

    def __init__(self, place: Place, version: str, seed: int, gpu: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "tests.support.weights_pusher", str(place.run_dir), version,
                str(seed), *([str(gpu)] if gpu else []),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    async def next(self) -> str:
        """The step before which it stands now."""
        async with asyncio.timeout(60):
            line = await self._lines.get()
        assert line, "the trainer ended"
        return line

    def go(self) -> None:
        """Let it do that step."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    async def until(self, step: str) -> None:
        """Let it go on until it stands before ``step``."""
        while (line := await self.next()) != step:
            assert not line.startswith("{"), line
            self.go()

    async def end(self) -> dict[str, Any]:
        """Let it go on to its end; what it prints there."""
        while not (line := await self.next()).startswith("{"):
            self.go()
        result: dict[str, Any] = json.loads(line)
        return result

    def kill(self) -> None:
        """kill -9; idempotent."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._tell(line.strip())
        self._tell("")

    def _tell(self, line: str) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._lines.put_nowait, line)

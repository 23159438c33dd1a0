"""Pods that no operator owns: fake engines with real ranks, real admin ports and push sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI

from rollout_client.trainer import PodTarget
from rollout_pod.engine.base import RankReport
from rollout_pod.local import first_document
from rollout_pod.protocol import DesiredDocument, StateDocument
from rollout_pod.serve import Server, bind
from rollout_pod.server.admin_app import make_admin_app
from rollout_pod.server.auth import Tokens
from rollout_pod.server.push_app import bind_push_socket, make_push_app
from tests.support.fakes import FakeEngine
from tests.support.operator_kit import free_port
from tests.support.pods import Pod, running_pod
from tests.support.pushed_pod import RanksEngine
from tests.support.weights import (
    ModelLoader,
    Place,
    Tensors,
    expected_of,
    make_place,
    mixed_tensors,
)

FIRST = first_document()


@dataclass
class LocalEngine(RanksEngine):
    """What the fake agent staged is loaded as the fake engine does."""

    async def load_weights(
        self, session: str, *, version: str, flush: bool, timeout_s: float
    ) -> tuple[RankReport, ...]:
        assert self.agent is not None
        way = FakeEngine if session in self.agent.staged else RanksEngine
        return await way.load_weights(
            self, session, version=version, flush=flush, timeout_s=timeout_s
        )


@dataclass
class Local:
    """``pod`` is what runs, until ``kill``; ``boot`` starts it anew, as a container restarts."""

    place: Place
    ranks: int = 1
    refuses_sleep: str | None = None
    expected: Tensors = field(default_factory=lambda: mixed_tensors(0))
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    token: str = ""
    """That of the admin port; empty: one of its own."""
    engine: LocalEngine = field(default_factory=LocalEngine)
    pod: Pod | None = None
    _life: AsyncExitStack | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def run_dir(self) -> Path:
        return self.place.run_dir

    @property
    def target(self) -> PodTarget:
        return PodTarget.of_run_dir(self.run_dir, self.url)

    @property
    def state(self) -> StateDocument:
        assert self.pod is not None
        return self.pod.state

    @property
    def desired(self) -> DesiredDocument:
        assert self.pod is not None
        assert self.pod.supervisor.board.desired is not None
        return self.pod.supervisor.board.desired

    @property
    def models(self) -> list[dict]:
        """What each rank has loaded."""
        return [loader.model for loader in self.engine.loaders]

    async def boot(self, *, first: DesiredDocument | None = FIRST, forgets: bool = False) -> Pod:
        """As ``rollout-pod serve --keep-state``, with a new token."""
        self._life = life = AsyncExitStack()
        (self.run_dir / "admin").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "admin" / "token").write_text(self.token or f"token-{id(life)}")
        if forgets:
            for name in ("desired.json", "record.json"):
                (self.run_dir / name).unlink(missing_ok=True)
        self.place.start_receivers(*[expected_of(self.expected)] * self.ranks)
        life.callback(self._close_receivers)
        self.engine = LocalEngine(
            world=self.ranks, place=self.place, refuses_sleep=self.refuses_sleep,
            loaders=[ModelLoader() for _ in range(self.ranks)],
        )  # fmt: skip
        pod = await life.enter_async_context(
            running_pod(self.run_dir, engine=self.engine, first=first)
        )
        listener = bind((self.host, self.port))
        # uvloop does it; without, every answer waits 40 ms for the client's acknowledgement
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._serve(
            life,
            Server(make_admin_app(pod.supervisor, Tokens(self.run_dir / "admin")),
                   listener),
        )  # fmt: skip
        app: FastAPI = make_push_app(pod.supervisor, shm_dir=self.place.shm_dir)
        await self._serve(life, Server(app, bind_push_socket(self.run_dir)))
        life.callback(pod.supervisor.board.close)
        self.pod = pod
        return pod

    async def kill(self) -> None:
        """All of it is gone at once; what it wrote down stays."""
        life, self._life = self._life, None
        if life is not None:
            self.engine.kill("killed")
            await life.aclose()
            self.pod = None

    async def _serve(self, life: AsyncExitStack, server: Server) -> None:
        task = asyncio.create_task(server.run_until_exit())

        async def stop() -> None:
            server.should_exit = server.force_exit = True
            await task

        life.push_async_callback(stop)
        while not server.started:
            await asyncio.sleep(0.01)

    def _close_receivers(self) -> None:
        while self.place.receivers:
            self.place.receivers.pop().close()


@asynccontextmanager
async def local_pods(count: int = 1, **traits) -> AsyncIterator[list[Local]]:
    """Pods that serve their base."""
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            local = Local(stack.enter_context(make_place()), **traits)
            stack.push_async_callback(local.kill)
            await (await local.boot()).serving("base")
            made.append(local)
        yield made

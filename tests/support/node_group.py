"""A head and its nodes over real sockets, with fakes for engine and agents."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI

from rollout_pod.engine.base import Node
from rollout_pod.nodes.agents import NodeAgents
from rollout_pod.nodes.follower import Follower, FollowError
from rollout_pod.nodes.head import Head
from rollout_pod.protocol import NodeOrders
from rollout_pod.serve import Server, bind
from rollout_pod.server.auth import RequireToken, Tokens
from rollout_pod.server.head_routes import HEAD_PATH, head_routes
from rollout_pod.server.node_app import make_node_admin_app
from rollout_pod.server.problems import install_problems
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.ports import WeightsAgent
from tests.support.fakes import FakeAgent
from tests.support.process import free_port

HERE = "127.0.0.1"
TOKEN = "t0k3n"
SILENCE_S = 0.6


class LedPod:
    """What a group needs of its head's supervisor."""

    def __init__(self) -> None:
        self.board = Board(unfinished=lambda: 0)
        self.is_started = False
        self.drains = 0

    def begin_drain(self) -> None:
        self.drains += 1
        self.board.change(draining=True)


class Ranks:
    """Stand in for the processes of a node's ranks."""

    def __init__(self) -> None:
        self.orders: NodeOrders | None = None
        self.ended = False
        self._fail = asyncio.Event()

    async def run(self, orders: NodeOrders) -> None:
        self.orders = orders
        try:
            await self._fail.wait()
        finally:
            self.ended = True
        raise FollowError("this node's ranks ended")

    def fail(self) -> None:
        self._fail.set()


@asynccontextmanager
async def served(
    app: FastAPI, port: int = 0
) -> AsyncIterator[tuple[int, Callable[[], Awaitable[None]]]]:
    """On a socket of its own; yields its port, and what kills it with all its connections."""
    listener = bind((HERE, port))
    server = Server(app, listener)
    task = asyncio.create_task(server.run_until_exit())

    async def kill() -> None:
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for answering in list(server.server_state.tasks):
            answering.cancel()
        server.should_exit = server.force_exit = True
        await asyncio.gather(task, return_exceptions=True)

    try:
        yield listener.getsockname()[1], kill
    finally:
        await kill()
        listener.close()


@dataclass
class GroupSite:
    folder: Path
    port: int = field(default_factory=free_port)
    """Of the head."""

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.folder)

    def head(self, *, group: str = "g", nodes: int = 2) -> tuple[Head, LedPod]:
        head, pod = Head(group, Node(0, nodes, HERE, HERE, 4242), silence_s=SILENCE_S), LedPod()
        head.lead(pod)
        return head, pod

    @asynccontextmanager
    async def listening(self, head: Head) -> AsyncIterator[None]:
        app = FastAPI()
        install_problems(app)
        app.add_middleware(RequireToken, tokens=self.tokens, nodes=HEAD_PATH)
        app.include_router(head_routes(head))
        async with served(app, self.port):
            yield

    def follower(
        self, *, group: str = "g", rank: int = 1, boot: str = "b", url: str = "http://nowhere",
        join_timeout_s: float = 10.0, drain_timeout_s: float = 1.0, token: str = TOKEN,
    ) -> Follower:  # fmt: skip
        return Follower(
            group=group, rank=rank, boot_id=boot, url=url, head=f"http://{HERE}:{self.port}",
            tokens=lambda: (token,), join_timeout_s=join_timeout_s, drain_timeout_s=drain_timeout_s,
            silence_s=SILENCE_S, beat_s=0.05,
        )  # fmt: skip


@dataclass
class TwoAgents:
    """The head's view of its own agent and of a node's, which listens on a socket."""

    own: FakeAgent
    nodes: FakeAgent
    both: NodeAgents
    kill_node: Callable[[], Awaitable[None]]


@asynccontextmanager
async def two_agents(
    site: GroupSite, *, node_group: str = "g",
    tokens: Callable[[], Sequence[str]] = lambda: (TOKEN,),
) -> AsyncIterator[TwoAgents]:  # fmt: skip
    own, nodes = FakeAgent(), FakeAgent()
    async with joined(
        site, own, nodes, run_dir=site.folder, node_group=node_group, tokens=tokens
    ) as (both, kill):
        yield TwoAgents(own, nodes, both, kill)


@asynccontextmanager
async def joined(
    site: GroupSite, own: WeightsAgent, nodes: WeightsAgent, *, run_dir: Path,
    node_group: str = "g", tokens: Callable[[], Sequence[str]] = lambda: (TOKEN,),
) -> AsyncIterator[tuple[NodeAgents, Callable[[], Awaitable[None]]]]:  # fmt: skip
    """Both agents as one, and what kills the node's."""
    head, _ = site.head()
    async with AsyncExitStack() as stack:
        follower = site.follower(group=node_group)
        app = make_node_admin_app(follower, nodes, site.tokens, run_dir=run_dir)
        port, kill = await stack.enter_async_context(served(app))
        url = f"http://{HERE}:{port}"
        head.hear(site.follower(url=url).beat())
        both = NodeAgents(own, group="g", members=head.members, tokens=tokens)
        stack.push_async_callback(both.close)
        yield both, kill


@asynccontextmanager
async def group_site() -> AsyncIterator[GroupSite]:
    with tempfile.TemporaryDirectory(prefix="grp-") as folder:
        (Path(folder) / "token").write_text(TOKEN)
        yield GroupSite(Path(folder))

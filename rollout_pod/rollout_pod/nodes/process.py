"""``rollout-pod follow``: a node that is not the head's, in one process beside its ranks."""

import asyncio
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from rollout_pod import local
from rollout_pod.main_task import exit_code_of, run_alone
from rollout_pod.nodes.follower import Follower, FollowError
from rollout_pod.nodes.head import GroupSettings
from rollout_pod.nodes.ranks import RanksSettings, keep_ranks
from rollout_pod.protocol import NodeOrders
from rollout_pod.serve import Server, bind
from rollout_pod.server.auth import Tokens
from rollout_pod.server.node_app import make_node_admin_app, make_node_data_app
from rollout_pod.supervisor.supervisor import PodFailed
from rollout_pod.weights.agent_client import AgentClient

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FollowSettings:
    """The command line of ``follow``."""

    model: str
    engine: str
    engine_args: Sequence[str]
    rank: int
    head: str
    """The head's admin port, as ``host:port``."""
    group: GroupSettings
    data_address: tuple[str, int]
    admin_address: tuple[str, int]
    run_dir: Path
    shm_dir: Path
    host_memory: int
    token_dir: Path
    spawns_agent: bool
    drain_timeout_s: float
    log_level: str = "INFO"

    def ranks(self, orders: NodeOrders) -> RanksSettings:
        """What the ranks are started with: the head says where they meet."""
        group = self.group
        place = GroupSettings(
            group.name, group.nodes, group.host, orders.port, group.join_timeout_s
        ).place(self.rank, head=orders.host)
        return RanksSettings(
            engine=self.engine, model=self.model, args=tuple(self.engine_args),
            run_dir=str(self.run_dir), shm_dir=str(self.shm_dir), node=place,
            log_level=self.log_level,
        )  # fmt: skip


def run_follow(settings: FollowSettings) -> int:
    """Follow until the group ends; returns the exit code."""
    return run_alone(settings.run_dir, lambda: _follow(settings), (PodFailed,))


async def _follow(settings: FollowSettings) -> int:
    admin, data = bind(settings.admin_address), bind(settings.data_address)
    tokens = Tokens(settings.token_dir)
    port = admin.getsockname()[1]
    host = settings.group.host
    follower = Follower(
        group=settings.group.name,
        rank=settings.rank,
        boot_id=secrets.token_hex(16),
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        head=f"http://{settings.head}",
        tokens=tokens.lately,
        join_timeout_s=settings.group.join_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
    )
    agent = AgentClient(settings.run_dir / "agent.sock")
    servers = [
        Server(make_node_admin_app(follower, agent, tokens, run_dir=settings.run_dir), admin),
        Server(make_node_data_app(follower), data),
    ]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, follower.begin_drain)
    helpers = {asyncio.create_task(server.run_until_exit(), name="http") for server in servers}
    agent_task = None
    if settings.spawns_agent:
        keep = local.keep_agent(settings.run_dir, settings.shm_dir, settings.host_memory)
        agent_task = asyncio.create_task(keep, name="weights agent")
        helpers.add(agent_task)
    following = asyncio.create_task(
        follower.run(lambda orders: keep_ranks(settings.ranks(orders))), name="follow"
    )
    log.info("follows", head=settings.head, node=settings.rank, group=settings.group.name)
    try:
        return await exit_code_of(following, helpers, FollowError)
    finally:
        for server in servers:
            server.should_exit = True
        following.cancel()
        if agent_task is not None:
            agent_task.cancel()
        await asyncio.gather(following, *helpers, return_exceptions=True)
        await agent.close()

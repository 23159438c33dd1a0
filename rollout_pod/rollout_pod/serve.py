"""``rollout-pod serve``: engine, supervisor, the two ports and the push socket in one process."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import structlog
import uvicorn
from fastapi import FastAPI

from rollout_pod import local
from rollout_pod.engine import registry
from rollout_pod.engine.base import EngineSettings, Share, SharedEngine, SpanningEngine
from rollout_pod.engine.registry import EngineChoiceError
from rollout_pod.front_ends.fleet import Fleet
from rollout_pod.front_ends.settings import FrontEndSettings, split_count
from rollout_pod.front_ends.shared_gate import SharedGate
from rollout_pod.gate import Gate
from rollout_pod.main_task import exit_code_of, run_alone
from rollout_pod.nodes.agents import NodeAgents
from rollout_pod.nodes.head import GroupSettings, Head
from rollout_pod.server.admin_app import make_admin_app
from rollout_pod.server.auth import Tokens
from rollout_pod.server.data_app import make_data_app
from rollout_pod.server.push_app import PushSocketError, bind_push_socket, make_push_app
from rollout_pod.supervisor.ports import WeightsAgent
from rollout_pod.supervisor.store import Store
from rollout_pod.supervisor.supervisor import PodFailed, Supervisor
from rollout_pod.weights.agent_client import AgentClient

log = structlog.get_logger(__name__)

_GRACE_S = 5
"""How long open connections may take to end once all requests were answered."""


@dataclass(frozen=True)
class ServeSettings:
    """The command line of ``serve``."""

    model: str
    engine: str
    engine_args: Sequence[str]
    data_address: tuple[str, int]
    admin_address: tuple[str, int]
    run_dir: Path
    shm_dir: Path
    host_memory: int
    token_dir: Path | None
    desired_file: Path | None
    source: str | None
    spawns_agent: bool
    keeps_state: bool
    drain_timeout_s: float
    heartbeat_timeout_s: float
    log_level: str = "INFO"
    staging: Literal["Host", "Device"] = "Host"
    group: GroupSettings | None = None
    """None: one node."""


def run_serve(settings: ServeSettings) -> int:
    """Serve until drained; returns the exit code."""
    refusals = (local.RunDirError, PodFailed, EngineChoiceError)
    return run_alone(settings.run_dir, lambda: _serve(settings), refusals)


async def _serve(settings: ServeSettings) -> int:
    try:
        engine_args, front_ends = split_count(settings.engine_args)
    except ValueError as error:
        raise PodFailed(str(error)) from error
    is_shared = front_ends > 1
    if is_shared and settings.group is not None:
        raise PodFailed("engineArgs: --api-server-count above 1 works on one node only")
    admin_listener = bind(settings.admin_address)
    data_listener: socket.socket | None = bind(settings.data_address)
    if is_shared and data_listener is not None:
        # it can be had; two pods that share a port would answer each other's callers
        data_listener.close()
        data_listener = None
    if not settings.keeps_state:
        local.forget(settings.run_dir)
    token_dir = settings.token_dir or local.make_token(settings.run_dir)
    if settings.source:
        (settings.run_dir / "source").write_text(settings.source)
    engine = registry.create(
        settings.engine,
        EngineSettings(
            model=settings.model, args=engine_args, run_dir=settings.run_dir,
            shm_dir=settings.shm_dir, staging=settings.staging,
            node=settings.group.place(0) if settings.group else None,
        ),
    )  # fmt: skip
    if settings.group is not None and not isinstance(engine, SpanningEngine):
        raise PodFailed(f"--nodes: engine {settings.engine} works on one node only")
    if is_shared and not isinstance(engine, SharedEngine):
        raise PodFailed(f"engineArgs: --api-server-count: engine {settings.engine} has no such")
    gate = SharedGate(engine) if is_shared else Gate(engine)
    tokens = Tokens(token_dir)
    agent: WeightsAgent = AgentClient(settings.run_dir / "agent.sock")
    head = None
    if settings.group is not None:
        head = Head(settings.group.name, settings.group.place(0))
        agent = NodeAgents(
            agent, group=settings.group.name, members=head.members, tokens=tokens.lately
        )
    supervisor = Supervisor(
        engine,
        agent,
        Store(settings.run_dir, first_desired=settings.desired_file),
        default_desired=local.first_document() if settings.spawns_agent else None,
        drain_timeout_s=settings.drain_timeout_s,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        gate=gate,
        stages_on_device=settings.staging == "Device",
        gather=partial(head.gather, settings.group.join_timeout_s)
        if head and settings.group
        else None,
    )
    servers = [Server(make_admin_app(supervisor, tokens, head=head), admin_listener)]
    if head is None:
        # a trainer shares memory with the ranks of its own node only: with several there is none
        try:
            push_listener = bind_push_socket(settings.run_dir)
        except PushSocketError as error:
            raise PodFailed(str(error)) from error
        push_app = make_push_app(supervisor, shm_dir=settings.shm_dir)
        servers.append(Server(push_app, push_listener))
    if data_listener is not None:
        servers.append(Server(make_data_app(supervisor), data_listener))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.begin_drain)
    helpers = [asyncio.create_task(server.run_until_exit(), name="http") for server in servers]
    fleet = None
    if isinstance(gate, SharedGate) and isinstance(engine, SharedEngine):
        each = _front_ends(settings, engine_args, engine.share(front_ends))
        fleet = asyncio.create_task(Fleet(supervisor, gate, each).run(), name="front ends")
        helpers.append(fleet)
    watch = None
    if head is not None and isinstance(engine, SpanningEngine):
        head.lead(supervisor)
        lost = partial(lose_node, engine, supervisor)
        watch = asyncio.create_task(head.watch(lost), name="nodes")
    agent_task = (
        asyncio.create_task(
            local.keep_agent(settings.run_dir, settings.shm_dir, settings.host_memory),
            name="weights agent",
        )
        if settings.spawns_agent
        else None
    )
    if agent_task is not None:
        helpers.append(agent_task)
    log.info("listening", data=settings.data_address, admin=settings.admin_address,
             run_dir=str(settings.run_dir))  # fmt: skip
    brain = asyncio.create_task(supervisor.run(), name="supervisor")
    try:
        return await exit_code_of(brain, helpers, PodFailed)
    finally:
        if head is not None and brain.done():
            await head.dismiss()
        for server in servers:
            server.should_exit = True
        if not brain.done():
            brain.cancel()
        for task in (fleet, agent_task, watch):
            if task:
                task.cancel()
        await asyncio.gather(brain, *helpers, *filter(None, [watch]), return_exceptions=True)
        await agent.close()
        await engine.shutdown()


def lose_node(engine: SpanningEngine, supervisor: Supervisor, reason: str) -> None:
    """The engine is of no use without it: whatever goes on with it ends, its start included."""
    engine.condemn(reason)
    supervisor.look()


def _front_ends(
    settings: ServeSettings, engine_args: Sequence[str], shares: Sequence[Share]
) -> list[FrontEndSettings]:
    host, port = settings.data_address
    return [
        FrontEndSettings(
            engine=settings.engine, model=settings.model, args=tuple(engine_args),
            run_dir=str(settings.run_dir), shm_dir=str(settings.shm_dir), host=host, port=port,
            log_level=settings.log_level, share=share,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
        )
        for share in shares
    ]  # fmt: skip


class Server(uvicorn.Server):
    """Several of these share a process, so none may take its signals."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        self._listener = listener
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off",
                timeout_graceful_shutdown=_GRACE_S, timeout_keep_alive=75,
            )
        )  # fmt: skip

    async def run_until_exit(self) -> None:
        """Serve until ``should_exit``."""
        await self.serve(sockets=[self._listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to ``serve``."""
        yield


def bind(address: tuple[str, int], *, shared: bool = False) -> socket.socket:
    """A listening socket; a ``shared`` one among others of the same address, among which the
    kernel shares out connections.

    Raises:
        PodFailed: names the address and why it cannot be had.
    """
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=2048, reuse_port=shared)
    except OSError as error:
        raise PodFailed(f"cannot listen on {host}:{port}: {error.strerror}") from error

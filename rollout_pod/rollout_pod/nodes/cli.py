"""The command line of replicas that span nodes: ``rollout-pod follow`` and options of ``serve``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rollout_pod.engine.orphan import die_with
from rollout_pod.logs import configure_logs
from rollout_pod.nodes.head import GroupSettings
from rollout_pod.options import RUN_DIR, SHM_DIR, HostMemory, RunDir, ShmDir, parse_address
from rollout_pod.protocol import ADMIN_PORT, DATA_PORT, RANKS_PORT

Group = Annotated[
    str | None, typer.Option(help="The same on all nodes, and a new one for each start of them.")
]
Advertise = Annotated[
    str | None, typer.Option(help="This machine's address, as the other nodes reach it.")
]
RanksPort = Annotated[
    int, typer.Option(min=1, max=65535, help="Of the head, where the engine's ranks meet.")
]
JoinTimeout = Annotated[float, typer.Option(min=1, help="Seconds that the nodes may take to meet.")]


def group_of(
    nodes: int, group: str | None, advertise: str | None, ranks_port: int, join_timeout_s: float
) -> GroupSettings | None:
    """The nodes of one engine; None where there is one.

    Raises:
        typer.BadParameter: an option is missing.
    """
    if nodes == 1:
        return None
    if not group or not advertise:
        raise typer.BadParameter("--nodes above 1 needs --group and --advertise")
    return GroupSettings(group, nodes, advertise, ranks_port, join_timeout_s)


def follow(
    model: Annotated[str, typer.Option(help="A model id or folder.")],
    head: Annotated[str, typer.Option(help="The head's admin port, as host:port.")],
    nodes: Annotated[int, typer.Option(min=2, help="Machines that form one engine.")],
    node_rank: Annotated[int, typer.Option(min=1, help="Which of them this is; the head is 0.")],
    token_dir: Annotated[Path, typer.Option(help="Holds 'token', the head's.")],
    group: Group = None,
    advertise: Advertise = None,
    engine: Annotated[str, typer.Option(help="An installed engine, by its name.")] = "vllm",
    data_address: Annotated[str, typer.Option()] = f"127.0.0.1:{DATA_PORT}",
    admin_address: Annotated[str, typer.Option()] = f"127.0.0.1:{ADMIN_PORT}",
    run_dir: RunDir = RUN_DIR,
    shm_dir: ShmDir = SHM_DIR,
    host_memory: HostMemory = 8 << 30,
    agent: Annotated[
        Literal["spawn", "external"],
        typer.Option(help="Whether the weights agent is a child or runs elsewhere (a sidecar)."),
    ] = "spawn",
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds: the head's.")] = 30.0,
    join_timeout: JoinTimeout = 3600.0,
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING"], typer.Option()] = "INFO",
    engine_args: Annotated[
        list[str] | None, typer.Argument(help="After '--': the engine's own arguments.")
    ] = None,
) -> None:
    """Hold ranks of an engine whose head runs on another machine. SIGTERM drains the head."""
    from rollout_pod.nodes.process import FollowSettings, run_follow  # it takes a while

    configure_logs(level=log_level)
    settings = group_of(nodes, group, advertise, RANKS_PORT, join_timeout)
    if settings is None or node_rank >= nodes:
        raise typer.BadParameter(f"--node-rank must be 1 to {nodes - 1}")
    parse_address(head)
    follow_settings = FollowSettings(
        model=model,
        engine=engine,
        engine_args=tuple(engine_args or ()),
        rank=node_rank,
        head=head,
        group=settings,
        data_address=parse_address(data_address),
        admin_address=parse_address(admin_address),
        run_dir=run_dir,
        shm_dir=shm_dir,
        host_memory=host_memory,
        token_dir=token_dir,
        spawns_agent=agent == "spawn",
        drain_timeout_s=drain_timeout,
        log_level=log_level,
    )
    raise typer.Exit(run_follow(follow_settings))


def ranks(
    settings: Annotated[str, typer.Option(help="As JSON.")],
    parent: Annotated[int, typer.Option(help="Whose end is ours.")],
) -> None:
    """Hold a node's ranks. Started by ``follow``."""
    import msgspec

    from rollout_pod.nodes.ranks import RanksSettings, run_ranks

    die_with(parent)
    given = msgspec.json.decode(settings, type=RanksSettings)
    configure_logs(level=given.log_level)
    why = run_ranks(given)
    typer.echo(f"error: {why}", err=True)
    raise typer.Exit(1)

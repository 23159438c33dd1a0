"""The command line: ``rollout-pod serve | weights | ctl``."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import BaseModel

from rollout_pod.ctl import Ctl, CtlError, is_asleep, is_paused, is_settled_on
from rollout_pod.engine.orphan import die_with
from rollout_pod.logs import configure_logs
from rollout_pod.nodes.cli import Advertise, Group, JoinTimeout, RanksPort, follow, group_of, ranks
from rollout_pod.options import (
    ADMIN_URL,
    RUN_DIR,
    SHM_DIR,
    Admin,
    HostMemory,
    RunDir,
    ShmDir,
    Timeout,
    parse_address,
)
from rollout_pod.protocol import (
    ADMIN_PORT,
    BASE_VERSION,
    DATA_PORT,
    RANKS_PORT,
    DesiredDocument,
    PushSource,
    SleepSpec,
    SleepTag,
    WeightsRef,
    WeightsSource,
)
from rollout_pod.weights.locations import redact

app = typer.Typer(
    help="A vLLM server whose generation can be cut and continued, with live weight updates.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
app.command()(follow)
app.command(hidden=True)(ranks)
ctl_app = typer.Typer(help="Drive a pod that no operator owns.", no_args_is_help=True)
app.add_typer(ctl_app, name="ctl")


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="A model id or folder.")],
    engine: Annotated[str, typer.Option(help="An installed engine, by its name.")] = "vllm",
    data_address: Annotated[str, typer.Option()] = f"127.0.0.1:{DATA_PORT}",
    admin_address: Annotated[str, typer.Option()] = f"127.0.0.1:{ADMIN_PORT}",
    run_dir: RunDir = RUN_DIR,
    shm_dir: ShmDir = SHM_DIR,
    host_memory: HostMemory = 8 << 30,
    token_dir: Annotated[
        Path | None, typer.Option(help="Holds 'token'; without it one is made in the run folder.")
    ] = None,
    desired_file: Annotated[Path | None, typer.Option(help="The first desired document.")] = None,
    agent: Annotated[
        Literal["spawn", "external"],
        typer.Option(help="Whether the weights agent is a child or runs elsewhere (a sidecar)."),
    ] = "spawn",
    source: Annotated[
        str | None,
        typer.Option(
            help="Where 'ctl update VERSION' finds versions: a path or URL with {version}."
        ),
    ] = None,
    keep_state: Annotated[
        bool | None,
        typer.Option(help="Go on from the documents in the run folder (a restarted container)."),
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds.")] = 30.0,
    staging: Annotated[
        Literal["Host", "Device"],
        typer.Option(help="Where the next version waits; Device takes memory from the KV cache."),
    ] = "Host",
    heartbeat_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one step of the engine may take.")
    ] = 120.0,
    nodes: Annotated[int, typer.Option(min=1, help="Machines that form one engine.")] = 1,
    group: Group = None,
    advertise: Advertise = None,
    ranks_port: RanksPort = RANKS_PORT,
    join_timeout: JoinTimeout = 3600.0,
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING"], typer.Option()] = "INFO",
    engine_args: Annotated[
        list[str] | None, typer.Argument(help="After '--': the engine's own arguments.")
    ] = None,
) -> None:
    """Serve a model. SIGTERM drains. With --nodes above 1 it waits for the others ('follow')."""
    from rollout_pod.serve import ServeSettings, run_serve  # it takes a while

    configure_logs(level=log_level)
    spawns = agent == "spawn"
    settings = ServeSettings(
        model=model,
        engine=engine,
        engine_args=tuple(engine_args or ()),
        data_address=parse_address(data_address),
        admin_address=parse_address(admin_address),
        run_dir=run_dir,
        shm_dir=shm_dir,
        host_memory=host_memory,
        token_dir=token_dir,
        desired_file=desired_file,
        source=source,
        spawns_agent=spawns,
        keeps_state=(not spawns) if keep_state is None else keep_state,
        drain_timeout_s=drain_timeout,
        heartbeat_timeout_s=heartbeat_timeout,
        log_level=log_level,
        staging=staging,
        group=group_of(nodes, group, advertise, ranks_port, join_timeout),
    )
    raise typer.Exit(run_serve(settings))


@app.command("front-end", hidden=True)
def front_end(
    channel: Annotated[int, typer.Option(help="A connected socket's descriptor.")],
    parent: Annotated[int, typer.Option(help="Whose end is ours.")],
    settings: Annotated[str, typer.Option(help="As JSON.")],
) -> None:
    """Answer HTTP for an engine that ``serve`` steers. Started by it."""
    import msgspec

    from rollout_pod.front_ends.process import run_front_end
    from rollout_pod.front_ends.settings import FrontEndSettings

    die_with(parent)
    given = msgspec.json.decode(settings, type=FrontEndSettings)
    configure_logs(level=given.log_level)
    raise typer.Exit(run_front_end(channel, given))


@app.command()
def weights(
    run_dir: RunDir = RUN_DIR,
    shm_dir: ShmDir = SHM_DIR,
    host_memory: HostMemory = 8 << 30,
    parent: Annotated[int | None, typer.Option(hidden=True, help="Whose end is ours.")] = None,
) -> None:
    """Run the weights agent: fetches versions into shared memory and sends them to the ranks."""
    from rollout_pod.weights.agent import AgentError, run_agent

    configure_logs()
    if parent is not None:
        die_with(parent)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run_agent(run_dir, shm_dir, host_memory, stop)

    try:
        asyncio.run(run())
    except AgentError as error:
        raise CtlError(str(error)) from None


@ctl_app.command()
def state(run_dir: RunDir = RUN_DIR, admin: Admin = f"http://127.0.0.1:{ADMIN_PORT}") -> None:
    """Print the state document."""
    with _pod(run_dir, admin) as pod:
        _print(pod.state())


@ctl_app.command()
def pause(
    run_dir: RunDir = RUN_DIR,
    admin: Admin = ADMIN_URL,
    timeout: Timeout = 60.0,
) -> None:
    """Cut every request; each caller gets its partial. Returns when the engine is idle."""
    with _pod(run_dir, admin) as pod:
        pod.change(lambda d: d.model_copy(update={"paused": True}))
        _print(pod.wait(is_paused, timeout_s=timeout))


@ctl_app.command()
def resume(
    run_dir: RunDir = RUN_DIR,
    admin: Admin = ADMIN_URL,
    timeout: Timeout = 60.0,
) -> None:
    """Serve again."""
    with _pod(run_dir, admin) as pod:
        pod.change(lambda d: d.model_copy(update={"paused": False}))
        _print(pod.wait(lambda s: s.gate == "open", timeout_s=timeout))


@ctl_app.command()
def sleep(
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps the weights in host memory, 2 drops them.")
    ] = 1,
    tag: Annotated[
        list[SleepTag] | None, typer.Option(help="What to release; by default everything.")
    ] = None,
    run_dir: RunDir = RUN_DIR,
    admin: Admin = ADMIN_URL,
    timeout: Timeout = 600.0,
) -> None:
    """Release the engine's memory. Requests are cut; returns when it sleeps."""
    spec = SleepSpec.model_validate({"level": level, "tags": sorted(set(tag or SleepTag))})
    with _pod(run_dir, admin) as pod:
        pod.change(lambda d: d.model_copy(update={"sleep": spec}))
        _print(pod.wait(is_asleep(spec.tags, spec.level), timeout_s=timeout))


@ctl_app.command()
def wake(
    tag: Annotated[
        list[SleepTag] | None, typer.Option(help="What to take back; by default everything.")
    ] = None,
    run_dir: RunDir = RUN_DIR,
    admin: Admin = ADMIN_URL,
    timeout: Timeout = 600.0,
) -> None:
    """Take released memory back; when all is back, generation goes on by itself."""
    woken = set(tag or SleepTag)
    asked: list[SleepSpec | None] = []

    def edit(document: DesiredDocument) -> DesiredDocument:
        fresh = document.sleep.without(woken) if document.sleep else None
        asked.append(fresh)
        return document.model_copy(update={"sleep": fresh})

    with _pod(run_dir, admin) as pod:
        pod.change(edit)
        spec = asked[-1]
        done = is_asleep(spec.tags, spec.level) if spec else is_asleep((), 1)
        _print(pod.wait(done, timeout_s=timeout))


@ctl_app.command("clear-caches")
def clear_caches(
    run_dir: RunDir = RUN_DIR, admin: Admin = ADMIN_URL, timeout: Timeout = 30.0
) -> None:
    """Forget what prefix, multimodal and encoder caches hold. Serving goes on."""
    with _pod(run_dir, admin) as pod:
        _print(pod.clear_caches(timeout_s=timeout))


@ctl_app.command()
def update(
    version: Annotated[str, typer.Argument(help="'base' is the model's own checkpoint.")],
    path: Annotated[
        str | None, typer.Option(help="The version's folder; else what 'serve --source' says.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Or its URL: https://, s3://, gs:// or hf://.")
    ] = None,
    push: Annotated[
        bool, typer.Option("--push", help="Or a trainer on this machine pushes it.")
    ] = False,
    step: Annotated[int | None, typer.Option(min=0, help="The trainer's counter.")] = None,
    run_dir: RunDir = RUN_DIR,
    admin: Admin = ADMIN_URL,
    timeout: Timeout = 600.0,
) -> None:
    """Load a version. Returns when every rank holds it and it is committed."""
    ref = None
    if version != BASE_VERSION:
        if bool(path) + bool(url) + push > 1:
            raise CtlError("give one of --path, --url and --push")
        if push:
            source = WeightsSource(push=PushSource())
        else:
            source = _source(path or url or _source_of(run_dir), version)
        ref = WeightsRef(version=version, step=step, source=source)
    with _pod(run_dir, admin) as pod:
        pod.change(lambda d: d.model_copy(update={"weights": ref}))
        _print(pod.wait(is_settled_on(version), timeout_s=timeout))


def _source(template: str, version: str) -> WeightsSource:
    where = template.replace("{version}", version)
    try:
        if "://" in where:
            return WeightsSource(url=where)
        return WeightsSource(path=os.path.abspath(where))
    except ValueError:
        raise CtlError(
            f"{redact(where)!r} is neither a folder nor an http(s), s3, gs or hf URL of one, "
            "without user, query or fragment"
        ) from None


def _source_of(run_dir: Path) -> str:
    try:
        return (run_dir / "source").read_text()
    except FileNotFoundError:
        raise CtlError("give --path, --url or --push, or start the pod with --source") from None


def _pod(run_dir: Path, admin: str) -> Ctl:
    return Ctl.of_run_dir(run_dir, admin)


def _print(document: BaseModel) -> None:
    typer.echo(document.model_dump_json(indent=2))


def main() -> None:
    """Entry point; a ``CtlError`` is one line and exit code 1."""
    try:
        app()
    except CtlError as error:
        typer.echo(f"rollout-pod: {error}", err=True)
        raise SystemExit(1) from None

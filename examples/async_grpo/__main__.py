"""``python -m examples.async_grpo``: a GRPO run that learns, on two rollout replicas.

The exit status is 1 unless the reward rose from chance to the goal.
"""

import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from examples.async_grpo.compare import compare, differences
from examples.async_grpo.loop import Limits, Loop, evaluate
from examples.async_grpo.model import save_model
from examples.async_grpo.plot import plot
from examples.async_grpo.progress import live
from examples.async_grpo.record import Record, as_json, verdict
from examples.async_grpo.replicas import Replicas, RunError
from examples.async_grpo.rollouts import RolloutStream
from examples.async_grpo.staleness import Admission
from examples.async_grpo.task import chance_reward, held_out_prompts, training_prompts
from examples.async_grpo.trainer import Trainer, TrainerSettings
from rollout_client import RolloutClient

GOAL = 0.9
HELD_OUT = 256
SWITCH_S = 5e-4
WIDTH = 160
"""Of a log; a terminal knows its own."""


@dataclass(frozen=True)
class Settings:
    """Of a run. Two runs with the same ones can be compared."""

    seed: int = 0
    groups_per_step: int = 16
    group_size: int = 16
    max_staleness: int = 2
    """Steps; 0 in a synchronous run."""
    max_concurrency: int = 128
    """Rollouts on the wire at once, both replicas together."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)


@asynccontextmanager
async def replicas_of(
    trainer: Trainer, folder: Path, *, is_local: bool, pushes: bool
) -> AsyncIterator[Replicas]:
    """Two replicas that hold the trainer's first weights."""
    if is_local:
        from examples.async_grpo.local import local_replicas

        model = folder / "base"
        save_model(trainer.model, model)
        async with local_replicas(model, folder, pushes=pushes) as replicas:
            yield replicas
    else:
        from examples.async_grpo.cluster import cluster_replicas

        async with cluster_replicas(trainer.model) as replicas:
            yield replicas


async def train(
    settings: Settings,
    limits: Limits,
    *,
    is_sync: bool,
    is_local: bool,
    pushes: bool,
    folder: Path,
    console: Console,
) -> tuple[Record, RolloutStream]:
    """One run, from a random model to its last evaluation.

    Raises:
        RunError, ExceptionGroup: it could not be finished.
    """
    held_out = held_out_prompts(HELD_OUT, seed=settings.seed)
    record = Record("sync" if is_sync else "async", chance=chance_reward(seed=settings.seed))
    # the engines are idle while a synchronous trainer works: it may have all cores
    threads = os.cpu_count() or 1 if is_sync else 1
    trainer = Trainer(seed=settings.seed, settings=settings.trainer, threads=threads)
    async with AsyncExitStack() as stack:
        with console.status("two replicas start vLLM"):
            replicas = await stack.enter_async_context(
                replicas_of(trainer, folder, is_local=is_local, pushes=pushes)
            )
        client = await stack.enter_async_context(
            RolloutClient(replicas.endpoints, max_concurrency=settings.max_concurrency)
        )
        stream = RolloutStream(
            client,
            training_prompts(seed=settings.seed),
            admission=Admission(
                settings.groups_per_step, max_staleness=0 if is_sync else settings.max_staleness
            ),
            group_size=settings.group_size,
            in_flight=settings.groups_per_step,
        )
        record.evaluations.append(await evaluate(client, held_out, step=0, version="base"))
        with live(console, steps=limits.steps) as on_row:
            loop = Loop(
                trainer, replicas, stream, groups_per_step=settings.groups_per_step,
                is_sync=is_sync, record=record, on_row=on_row,
            )  # fmt: skip
            await loop.run(limits)
        record.evaluations.append(
            await evaluate(client, held_out, step=trainer.step, version=f"step-{trainer.step}")
        )
    return record, stream


def report(console: Console, summary: dict[str, Any], other: Path) -> None:
    """Tables: what was measured, and the comparison where there is a run of the other mode."""
    first, last = summary["evaluations"]
    table = Table(title=f"{summary['mode']}: {summary['steps']} steps", title_justify="left")
    for column in ("what", "value"):
        table.add_column(column)
    table.add_row("reward of random tokens", f"{summary['chance_reward']:.3f}")
    for name, e in (("before", first), ("after", last)):
        table.add_row(
            f"held-out prompts {name} training (greedy, {e['prompts']})",
            f"reward {e['reward']:.3f}, all digits right {e['exact']:.1%}",
        )
    rollouts = summary["rollouts"]
    table.add_row("rollouts begun / finished", f"{rollouts['begun']} / {rollouts['finished']}")
    table.add_row(
        "cut and continued / of mixed versions / dropped as too old",
        f"{rollouts['resumed']} / {rollouts['mixed']} / {rollouts['dropped']}",
    )
    for name in (
        "seconds", "seconds_per_step", "tokens_per_s", "staleness_mean", "staleness_max",
        "paused_s_per_update", "paused_share", "trainer_waited_share", "truncated_share",
        "largest_mismatch",
    ):  # fmt: skip
        value = summary[name]
        table.add_row(name, "-" if value is None else f"{value:,.4g}")
    console.print(table)
    if not other.exists():
        return
    theirs = json.loads(other.read_text())
    if unequal := differences(summary, theirs):
        console.print(f"{other.name} is of other settings ({', '.join(unequal)}): not compared")
        return
    pair = (summary, theirs) if summary["mode"] == "async" else (theirs, summary)
    table = Table(title="asynchronous beside synchronous", title_justify="left")
    for column in ("what", "async", "sync", "async is better by"):
        table.add_column(column)
    for row in compare(*pair):
        table.add_row(*row)
    console.print(table)


def main(
    local: Annotated[
        bool, typer.Option(help="Start two rollout-pod processes; else two RolloutReplicas.")
    ] = False,
    weights: Annotated[
        Literal["push", "path"],
        typer.Option(help="How weights travel with --local: through shared memory, or by folders."),
    ] = "push",
    sync: Annotated[bool, typer.Option(help="Generate, train, update, one after another.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="At most.")] = 500,
    minutes: Annotated[float, typer.Option(min=0.1, help="At most, from the first rollout.")] = 14,
    stop_at: Annotated[
        float, typer.Option(help="End when ten batches in a row have this mean reward.")
    ] = 0.93,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Steps off policy that the oldest token may be.")
    ] = 2,
    out: Annotated[Path, typer.Option(help="For the summaries and plots.")] = Path(
        "async-grpo-runs"
    ),
) -> None:
    """Train a tiny transformer to sort digits, by GRPO, with rollouts from two replicas."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    settings = Settings(seed=seed, max_staleness=max_staleness)
    limits = Limits(steps=steps, seconds=60 * minutes, stop_at=stop_at)
    out.mkdir(parents=True, exist_ok=True)
    # the loop and the trainer's thread both work hard: at the usual 5 ms either waits for the other
    sys.setswitchinterval(SWITCH_S)
    try:
        with tempfile.TemporaryDirectory(prefix="async-grpo-") as folder:
            run = train(
                settings, limits, is_sync=sync, is_local=local, pushes=weights == "push",
                folder=Path(folder), console=console,
            )  # fmt: skip
            record, stream = asyncio.run(run)
    except KeyboardInterrupt:
        console.print("[red]interrupted")
        raise typer.Exit(130) from None
    except (RunError, ExceptionGroup) as error:
        console.print(f"[bold red]The run failed:[/bold red] {words(error)}", soft_wrap=True)
        raise typer.Exit(1) from None
    mode = record.mode
    summary = as_json(
        record, goal=GOAL, settings=asdict(settings), rollouts=asdict(stream.account),
        local=local, weights=weights if local else "path",
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
    )  # fmt: skip
    (out / f"{mode}.json").write_text(json.dumps(summary, indent=1))
    plot(record, out / f"{mode}.png", goal=GOAL)
    report(console, summary, out / ("async.json" if sync else "sync.json"))
    console.print(f"{out / mode}.json, {out / mode}.png", highlight=False)
    if wrong := verdict(record, goal=GOAL):
        console.print(f"[bold red]It did not learn what it has to:[/bold red] {'; '.join(wrong)}")
        raise typer.Exit(1)
    console.print(f"[bold green]It learned:[/bold green] from {record.chance:.2f} (chance) to "
                  f"{record.evaluations[-1].reward:.3f} on held-out prompts")  # fmt: skip


def words(error: BaseException) -> str:
    """The innermost reasons of an error, without its groups."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(words(inner) for inner in error.exceptions)
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    typer.run(main)

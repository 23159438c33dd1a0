"""The live line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.async_grpo.plot import sparkline
from examples.async_grpo.record import Row

EVERY = 10
"""Steps between two lines where there is no terminal."""


def told(row: Row) -> str:
    """A step in one line."""
    paused = row.paused_s / row.seconds if row.seconds else 0.0
    return (
        f"reward {row.reward:.2f}  exact {row.exact:.2f}  off policy {row.staleness_mean:.1f} "
        f"(max {row.staleness_max})  {row.tokens_per_s:,.0f} tok/s  resumed {row.resumed:.0%}  "
        f"paused {paused:.0%}  "
        f"step {row.seconds:.1f} s (waited {row.waited_s:.1f}, trained {row.train_s:.1f}, "
        f"published {row.publish_s:.1f})"
    )


@contextmanager
def live(console: Console, *, steps: int) -> Iterator[Callable[[Row], None]]:
    """A progress line on a terminal; elsewhere a line every ``EVERY`` steps."""
    rewards: list[float] = []
    if not console.is_terminal:

        def say(row: Row) -> None:
            rewards.append(row.reward)
            if row.step % EVERY == 0:
                recent = fmean(rewards[-EVERY:])
                console.print(
                    f"step {row.step:4d}  {row.at:5.0f} s  mean of {EVERY}: {recent:.2f}  "
                    f"{told(row)}", highlight=False, soft_wrap=True,
                )  # fmt: skip

        yield say
        return
    columns = (
        TextColumn("step"), BarColumn(bar_width=16), MofNCompleteColumn(),
        TextColumn("{task.fields[curve]}  {task.fields[told]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, curve="", told="waiting for the first batch")

        def show(row: Row) -> None:
            rewards.append(row.reward)
            bar.update(task, completed=row.step, curve=sparkline(rewards), told=told(row))

        yield show

"""How the demo tells its story: steps, commands, bars, and the report that closes it."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from devcluster.client import connect
from devcluster.settings import load_settings
from examples.demo.cluster import ROOT, Shell

MANIFEST = "examples/replica.yaml"
NAMESPACE = "rollout-demo"
COLUMNS = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn())


@dataclass
class Report:
    """What was measured, and whether it is as promised."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)

    def add(self, what: str, value: str, ok: bool = True) -> None:
        """One line of the closing table."""
        self.rows.append((what, value, ok))

    @property
    def holds(self) -> bool:
        """Nothing is wrong, and something was measured."""
        return bool(self.rows) and all(ok for _, _, ok in self.rows)


class Stage:
    """What all steps share: the console, the tools, the report."""

    def __init__(self, console: Console) -> None:
        settings = load_settings(os.environ)
        self.console = console
        self.external = settings.external
        self.shell = Shell(connect(settings), NAMESPACE, self.command)
        self.report = Report()
        manifest = yaml.safe_load((ROOT / MANIFEST).read_text())
        self.name: str = manifest["metadata"]["name"]
        self.checkpoints = checkpoints_folder()
        self.steps = 0

    def step(self, title: str, look: str) -> None:
        """Begin a step: what happens, and what to look at."""
        self.steps += 1
        self.console.rule(f"[bold]{self.steps}. {title}", align="left")
        self.console.print(f"[dim]Look at:[/dim] {look}", highlight=False)

    def command(self, line: str) -> None:
        """Show a command as a person would type it."""
        self.console.print(f"[bold cyan]$ {line}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """One line of the story."""
        self.console.print(f"  {text}", highlight=False)

    async def show(self, *args: str) -> None:
        """Run kubectl and show what it prints."""
        done = await self.shell.kubectl(*args)
        self.console.print(done.output.rstrip(), highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self, what: str, total: float | None = None) -> Iterator[Progress]:
        """A bar while something long goes on."""
        with Progress(*COLUMNS, console=self.console) as bar:
            bar.add_task(what, total=total)
            yield bar
            bar.update(bar.task_ids[0], total=1, completed=1)


def checkpoints_folder() -> Path:
    """The folder that examples/replica.yaml mounts from the node."""
    manifest = yaml.safe_load((ROOT / MANIFEST).read_text())
    volumes = {v["name"]: v for v in manifest["spec"]["template"]["spec"]["volumes"]}
    return Path(volumes["checkpoints"]["hostPath"]["path"])

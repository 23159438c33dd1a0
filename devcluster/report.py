"""Progress for people: a spinner on a terminal, plain lines in a log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

PLAIN_INTERVAL_S = 15.0


class Step:
    """A running step; ``update`` says how far it is."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._begun = self._last = time.monotonic()
        self._status = console.status(title) if console.is_terminal else None
        if self._status is not None:
            self._status.start()

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._begun

    def update(self, detail: str) -> None:
        """Show what the step is at; without a terminal only now and then."""
        text = f"{self._title}: {detail} ({self.seconds:.0f} s)"
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() - self._last >= PLAIN_INTERVAL_S:
            self._last = time.monotonic()
            self._console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the spinner away."""
        if self._status is not None:
            self._status.stop()


class Reporter:
    """Tells the person at the terminal what happens."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show a step while it runs and how long it took."""
        step = Step(self.console, title)
        try:
            yield step
        except BaseException:
            step.stop()
            self.console.print(f"[red]failed[/red] {title} ({step.seconds:.1f} s)", highlight=False)
            raise
        step.stop()
        self.console.print(f"[green]done[/green] {title} ({step.seconds:.1f} s)", highlight=False)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

"""``python -m benchmarks NAME``: measure one thing and print it beside its reference."""

from collections.abc import Callable
from typing import Annotated, Final

import typer

from benchmarks import cancel, overhead, patch_latency, writes
from benchmarks.report import Result, show

BENCHMARKS: Final[dict[str, Callable[[bool], Result]]] = {
    "cancel": cancel.run,
    "overhead": overhead.run,
    "patch-latency": patch_latency.run,
    "writes": writes.run,
}


def main(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHMARKS)}.")],
    quick: Annotated[bool, typer.Option(help="Fewer repetitions: a minute at most.")] = False,
) -> None:
    """Measure NAME. Exit code 1 where the goal does not hold."""
    if name not in BENCHMARKS:
        raise typer.BadParameter(f"there is no {name!r}; there are: {', '.join(BENCHMARKS)}")
    result = BENCHMARKS[name](quick)
    show(result)
    raise typer.Exit(0 if result.holds else 1)


if __name__ == "__main__":
    typer.run(main)

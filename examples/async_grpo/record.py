"""What a run did: one row a step, and the summary that is written as JSON. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

SMOOTHED = 10
"""Steps over which the reward is averaged before it is compared with a goal."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step of the trainer."""

    step: int
    """The step that was made."""
    at: float
    """Seconds since the first rollout was begun."""
    reward: float
    """Mean over the batch, sampled at temperature 1."""
    exact: float
    """Share of its rollouts that are right in every position."""
    staleness_mean: float
    """Steps that the batch's tokens were off policy."""
    staleness_max: int
    resumed: float
    """Share of its rollouts that were cut and continued."""
    mixed: float
    """Share of its rollouts with tokens of more than one version."""
    tokens: int
    """Generated since the step before, by all replicas."""
    seconds: float
    """Since the step before."""
    waited_s: float
    """That the trainer waited for the batch."""
    train_s: float
    publish_s: float
    """That the trainer waited until every replica had committed the weights: in an asynchronous run
    those of the step before, in a synchronous one those of this step."""
    paused_s: float
    """That generation stood still for it, mean over the replicas."""
    entropy: float
    mean_ratio: float
    truncated: float
    mismatch: float | None

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out prompts, greedy, on the replicas."""

    step: int
    reward: float
    exact: float
    prompts: int


@dataclass
class Record:
    """A run's history.

    Args:
        mode: ``async`` or ``sync``.
        chance: The reward of random tokens.
    """

    mode: str
    chance: float
    rows: list[Row] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def recent_reward(self) -> float:
        """Mean of the last ``SMOOTHED`` steps; of fewer it is none yet: 0."""
        last = self.rows[-SMOOTHED:]
        return fmean(row.reward for row in last) if len(last) == SMOOTHED else 0.0


def seconds_to(rows: Sequence[Row], goal: float) -> float | None:
    """When the smoothed reward first reached a goal; None where it never did."""
    for i in range(SMOOTHED, len(rows) + 1):
        if fmean(row.reward for row in rows[i - SMOOTHED : i]) >= goal:
            return rows[i - 1].at
    return None


def verdict(record: Record, *, goal: float) -> list[str]:
    """Why the run did not show what it has to; empty where it did."""
    first, last = record.evaluations[0], record.evaluations[-1]
    wrong = []
    if last.step <= first.step:
        wrong.append("it was never evaluated after training")
    if last.reward < goal:
        wrong.append(f"the reward on held-out prompts is {last.reward:.3f}, not {goal:g}")
    begun = record.rows[0].reward if record.rows else 1.0
    if begun > 2 * record.chance:
        wrong.append(f"training began at a reward of {begun:.3f}: chance is {record.chance:.3f}")
    return wrong


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of a whole run."""
    if not rows:
        return {"steps": 0}
    mismatches = [row.mismatch for row in rows if row.mismatch is not None]
    elapsed = rows[-1].at
    return {
        "steps": len(rows),
        "seconds": elapsed,
        "seconds_per_step": elapsed / len(rows),
        "tokens": sum(row.tokens for row in rows),
        "tokens_per_s": sum(row.tokens for row in rows) / elapsed,
        "staleness_mean": fmean(row.staleness_mean for row in rows),
        "staleness_max": max(row.staleness_max for row in rows),
        "trainer_waited_share": sum(row.waited_s + row.publish_s for row in rows) / elapsed,
        "paused_s_per_update": fmean(row.paused_s for row in rows),
        "paused_share": sum(row.paused_s for row in rows) / elapsed,
        "mean_ratio": fmean(row.mean_ratio for row in rows),
        "truncated_share": fmean(row.truncated for row in rows),
        "largest_mismatch": max(mismatches, default=None),
        "steps_with_mismatch_checked": len(mismatches),
    }


def as_json(record: Record, *, goal: float, **more: Any) -> dict[str, Any]:
    """The summary, with every row."""
    return {
        "mode": record.mode,
        "chance_reward": record.chance,
        "goal": goal,
        "seconds_to_goal": seconds_to(record.rows, goal),
        "failed": verdict(record, goal=goal),
        "evaluations": [asdict(e) for e in record.evaluations],
        **more,
        **totals(record.rows),
        "rows": [asdict(row) for row in record.rows],
    }

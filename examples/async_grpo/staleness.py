"""How old the weights behind a rollout are, and how many groups may be begun because of it. Pure.

A *step* is the trainer's counter: step 3 are the weights after three updates. Training on a batch
makes step ``k + 1`` of step ``k``; a token of step ``s`` is ``k - s`` steps off policy then.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rollout_pod.protocol import BASE_VERSION, WeightVersionSpan


def steps_of(spans: Iterable[WeightVersionSpan]) -> list[int]:
    """The step of each token of a rollout.

    Raises:
        ValueError: a version that no trainer of ours made.
    """
    return [step for span in spans for step in [_step(span)] * (span.end - span.start)]


def _step(span: WeightVersionSpan) -> int:
    if span.step is not None:
        return span.step
    if span.version == BASE_VERSION:
        return 0  # what the replicas started with
    raise ValueError(f"version {span.version!r} has no step: who made it?")


def off_policy(steps: Iterable[int], *, trained: int) -> int:
    """How many steps the oldest of these tokens is behind the weights that are trained."""
    return max((trained - step for step in steps), default=0)


@dataclass
class Admission:
    """Bounds the groups that are begun, so that few become too old before they are trained on.

    A batch takes ``groups_per_step``. With step ``k`` being trained, groups for the batches up to
    the one of step ``k + max_staleness`` may have been begun; those that were dropped do not count.
    """

    groups_per_step: int
    max_staleness: int
    begun: int = 0
    dropped: int = 0

    def may_begin(self, *, trained: int) -> bool:
        """Whether one more group may be begun while ``trained`` is the trainer's step."""
        room = (trained + self.max_staleness + 1) * self.groups_per_step
        return self.begun - self.dropped < room

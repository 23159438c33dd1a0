"""How often the API server is written to: a pause, a weight update, a steady minute."""

import time
from collections.abc import Callable

from benchmarks.report import Result
from benchmarks.site import measured_replica
from tests.support.replica import difference, writes

SETTLE_S = 3.0
"""How long a write that belongs to a step may come after it."""


def run(quick: bool) -> Result:
    """Measure. The patch of the person who asks is not counted."""
    minutes = 0.5 if quick else 1.0
    with measured_replica() as replica:

        def counted(act: Callable[[], None]) -> dict[str, float]:
            time.sleep(SETTLE_S)
            before = writes(replica.cluster)
            act()
            time.sleep(SETTLE_S)
            return difference(before, writes(replica.cluster))

        def pause() -> None:
            replica.patch(paused=True)
            replica.until_condition("Ready", "True", "Paused")

        def resume() -> None:
            replica.patch(paused=False)
            replica.serving("base")

        def update() -> None:
            replica.patch(weightVersion="step-1")
            replica.serving("step-1")

        made = {"pause": counted(pause), "resume": counted(resume), "update": counted(update)}
        for counts in made.values():
            counts["PATCH rolloutreplicas"] -= 1  # the person's own
        before = writes(replica.cluster)
        time.sleep(60 * minutes)
        made["steady minute"] = difference(before, writes(replica.cluster))
    totals = {step: sum(counts.values()) for step, counts in made.items()}
    goals = {"pause": 2, "resume": 2, "update": 4, "steady minute": 0}
    return Result(
        name="writes", figure=totals["update"], unit="writes per update", reference=None,
        ratio=None, goal="pause <= 2, update <= 4, steady minute 0",
        holds=all(totals[step] <= goal for step, goal in goals.items()),
        rows=[
            {"step": step, "writes": total, "goal": goals[step], "which": str(made[step])}
            for step, total in totals.items()
        ],
    )  # fmt: skip

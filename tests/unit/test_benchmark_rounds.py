"""A benchmark keeps within its time, and says of how many rounds its medians are."""

import pytest

from benchmarks import overhead, rounds
from benchmarks.rounds import TimeBudget


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("seconds", "share", "took", "done"),
    [
        (100, 1.0, (1,), 5),  # the most that was asked for
        (10, 1.0, (3,), 3),
        (10, 0.5, (3,), 1),
        (10, 1.0, (2, 7), 2),  # the next one may take as long as the longest
        (10, 1.0, (99,), 1),
        (0, 1.0, (1,), 0),
    ],
)
def test_rounds_end_in_time(
    clock: Clock, seconds: float, share: float, took: tuple[float, ...], done: int
) -> None:
    budget = TimeBudget(seconds, clock.now)
    counted = budget.rounds(5, share=share)
    for i in counted:
        clock.now += took[i % len(took)]
    assert counted.done == done
    assert budget.left() == seconds - (clock.now - 100)


def test_a_row_tells_medians_and_rounds() -> None:
    row = overhead._row(64, {"bare": [10.0, 30.0, 20.0], "http": [19.0, 1.0, 50.0]})
    assert row == {
        "concurrent": 64, "rounds": 3, "bare tok/s": 20.0, "http tok/s": 19.0,
        "http / bare": pytest.approx(0.95),
    }  # fmt: skip

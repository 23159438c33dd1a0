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


def test_a_row_tells_medians_of_rates_and_of_each_rounds_ratio() -> None:
    row = overhead._row(
        64,
        [
            {"bare": 10.0, "http": 9.0, "vllm serve": 10.0},
            {"bare": 100.0, "http": 95.0, "vllm serve": 50.0},  # a machine that was faster
            {"bare": 20.0, "http": 20.0, "vllm serve": 16.0},
        ],
    )
    assert row == {
        "concurrent": 64, "rounds": 3, "bare tok/s": 20.0, "http tok/s": 20.0,
        "vllm serve tok/s": 16.0, "http / bare": pytest.approx(0.95),
        "vllm serve / bare": pytest.approx(0.8), "http / vllm serve": pytest.approx(1.25),
        "worst quarter / vllm serve": pytest.approx(0.9),
        "best quarter / vllm serve": pytest.approx(1.9), "rounds / vllm serve": 3,
    }  # fmt: skip


def test_each_round_begins_with_another_kind() -> None:
    assert [rounds.rotated("abc", i) for i in range(4)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
    ]  # fmt: skip

"""A benchmark keeps within its time, and says of how many rounds its medians are."""

import pytest

from benchmarks import overhead, report, rounds
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
            {"http": 95.0, "vllm serve": 50.0},  # a machine that was faster
            {"bare": 20.0, "http": 20.0, "vllm serve": 16.0},
        ],
    )
    assert row == {
        "concurrent": 64, "rounds": 3, "bare tok/s": 15.0, "http tok/s": 20.0,
        "vllm serve tok/s": 16.0, "http / bare": pytest.approx(0.95), "rounds / bare": 2,
        "vllm serve / bare": pytest.approx(0.9), "http / vllm serve": pytest.approx(1.25),
        "at least / vllm serve": pytest.approx(0.9),
        "at most / vllm serve": pytest.approx(1.9), "rounds / vllm serve": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("count", "least", "most"),
    [  # the ranks that tables of order statistics give for a median, 95 %
        (1, 1, 1), (2, 1, 2), (5, 1, 5), (6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9),
        (20, 6, 15), (50, 18, 33), (100, 40, 61),
    ],
)  # fmt: skip
def test_how_sure_a_median_is(count: int, least: int, most: int) -> None:
    values = [float(i) for i in range(count, 0, -1)]
    assert report.median_within(values) == (least, most)


def test_each_round_begins_with_another_kind_and_every_other_one_goes_back() -> None:
    assert [rounds.rotated("abc", i) for i in range(4)] == [
        ["a", "b", "c"], ["a", "c", "b"], ["c", "a", "b"], ["c", "b", "a"],
    ]  # fmt: skip

"""When ``RolloutClient`` asks again: at growing intervals, no two alike, and not for ever. In virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from statistics import mean
from typing import TypeVar

import pytest

from rollout_client import (
    DeadlineExceeded,
    Policy,
    RetriesExhausted,
    RolloutClient,
    RolloutError,
)
from tests.support.fake_fleet import Act, FakeFleet, FakeReplica
from tests.support.fakes import fake_tokens
from tests.support.virtual_time import VirtualLoop, clock_of

T = TypeVar("T")

PROMPT = [5, 6, 7]
LOST = Act(how="lost", tokens=0)
CLOSED = Act(how="status", code="gate_closed")
FIRST_S, LONGEST_S = 0.1, 5.0
BUDGET = 12
ROLLOUTS = 300


@pytest.fixture(autouse=True)
def dice() -> Iterator[None]:
    """The same ones in every run."""
    before = random.getstate()
    random.seed(6)
    yield
    random.setstate(before)


class Clocked(FakeFleet):
    """Writes down when each rollout asked, in seconds of the loop."""

    def __init__(self, *script: Act, replicas: int = 1) -> None:
        super().__init__(*(FakeReplica(script=list(script)) for _ in range(replicas)))
        self.hook = self._note
        self.times: dict[str, list[float]] = {}

    async def _note(self, index: int) -> None:
        body = self.replicas[index].asked[-1]
        times = self.times.setdefault(body["request_id"], [])
        times.append(asyncio.get_running_loop().time())

    def waits(self, name: str) -> list[float]:
        return [b - a for a, b in pairwise(self.times[name])]


def in_virtual_time(main: Callable[[], Awaitable[T]]) -> tuple[T, float]:
    """Its result, and how long it took."""
    loop = VirtualLoop()
    with clock_of(loop):
        begun = loop.time()
        try:
            return loop.run_until_complete(main()), loop.time() - begun
        finally:
            loop.close()


async def ask(pods: FakeFleet, *names: str, **more) -> list[object]:
    """Each name is a rollout; they all run at once."""
    settings = {"policy": Policy(failures=BUDGET), **more.pop("settings", {})}
    async with RolloutClient(pods.urls, transport=pods, max_concurrency=512, **settings) as api:
        return await asyncio.gather(
            *(api.generate(PROMPT, {"max_tokens": 20}, name, **more) for name in names),
            return_exceptions=True,
        )


def longest(attempt: int) -> float:
    """That may pass after so many attempts in vain."""
    return min(LONGEST_S, FIRST_S * 2 ** (attempt - 1))


def test_waits_grow_are_no_two_alike_and_end_with_the_budget():
    pods = Clocked(*[LOST] * (ROLLOUTS * BUDGET))
    names = [f"r{i}" for i in range(ROLLOUTS)]
    errors, _ = in_virtual_time(lambda: ask(pods, *names, deadline_s=1000))
    assert {type(error) for error in errors} == {RetriesExhausted}
    assert {len(pods.times[name]) for name in names} == {BUDGET}, "the budget, exactly"
    waits = [pods.waits(name) for name in names]
    for attempt, column in enumerate(zip(*waits, strict=True), start=1):
        bound = longest(attempt)
        # a turn of the loop takes a moment, too
        assert max(column) <= bound + 0.01
        # spread over all of it: replicas that come back are not met by everybody at once
        assert min(column) < 0.1 * bound
        assert max(column) > 0.9 * bound
        assert mean(column) == pytest.approx(bound / 2, rel=0.15)
        assert len({round(wait, 6) for wait in column}) > 0.9 * ROLLOUTS
    assert longest(BUDGET - 1) == LONGEST_S, "the last ones are as long as any will be"


def test_tokens_begin_the_count_and_the_waits_anew():
    script = [LOST] * (BUDGET - 1) + [Act(tokens=5, how="lost")] + [LOST] * (BUDGET - 2)
    pods = Clocked(*script)
    (rollout,), _ = in_virtual_time(lambda: ask(pods, "r", deadline_s=1000))
    assert list(rollout.token_ids) == fake_tokens("base", PROMPT, 20)
    assert rollout.attempts == len(script) + 1
    waits = pods.waits("r")
    asked_at_once, after = waits[BUDGET - 1], waits[BUDGET:]
    assert asked_at_once < 0.01, "what brought tokens is gone on with at once"
    assert all(wait <= longest(n) + 0.01 for n, wait in enumerate(after, start=1))
    assert max(waits[: BUDGET - 1]) > longest(5), "it had waited longer before"


def test_the_budget_is_one_rollouts_and_the_same_over_all_replicas():
    pods = Clocked(*[LOST] * BUDGET, replicas=3)
    (error,), _ = in_virtual_time(lambda: ask(pods, "r", deadline_s=1000))
    assert isinstance(error, RetriesExhausted)
    assert len(pods.times["r"]) == BUDGET
    assert min(pods.hosts.count(host) for host in range(3)) >= 2, "all of them were asked"


def test_a_pause_costs_no_budget_and_is_asked_about_seldom():
    an_hour = 3600.0
    pods = Clocked(*[CLOSED] * 5000)
    (error,), took = in_virtual_time(lambda: ask(pods, "r", deadline_s=an_hour))
    assert isinstance(error, DeadlineExceeded)
    assert took == pytest.approx(an_hour, abs=1)
    # 2.5 seconds between two of them, in the long run
    assert len(pods.times["r"]) == pytest.approx(an_hour / (LONGEST_S / 2), rel=0.1)


@pytest.mark.parametrize("deadline_s", [0.35, 7.0])
def test_no_wait_outlasts_the_deadline(deadline_s: float):
    pods = Clocked(*[LOST] * 500)
    settings = {"policy": Policy(failures=500)}
    errors, took = in_virtual_time(
        lambda: ask(pods, "a", "b", deadline_s=deadline_s, settings=settings)
    )
    assert all(isinstance(error, DeadlineExceeded) for error in errors)
    assert all(isinstance(error, RolloutError) and not error.partial.token_ids for error in errors)
    assert took == pytest.approx(deadline_s, abs=0.01)
    assert max(max(times) for times in pods.times.values()) < 1000.0 + deadline_s

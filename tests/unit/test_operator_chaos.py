"""Two operators under chaos, in virtual time: thousands of seeds, each with its own story; a third of
them with a replica that spans nodes.

``CHAOS_SEEDS=20000`` runs more, ``CHAOS_FIRST=7000`` others; a failure prints how to see it again.
"""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from rollout_operator.plan import group
from tests.support import chaos, chaos_acts
from tests.support.chaos_judge import Judge

SEEDS = int(os.environ.get("CHAOS_SEEDS", "2000"))
FIRST = int(os.environ.get("CHAOS_FIRST", "0"))
BATCH = 25


def _found(first: int) -> list[str]:
    """Run a batch; what its seeds found."""
    found = []
    for seed in range(first, min(first + BATCH, FIRST + SEEDS)):
        try:
            chaos.run(seed)
        except chaos.ChaosFailed as error:
            found.append(str(error))
    return found


def _all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        chaos.run(seed)


@pytest.fixture
def processes() -> Iterator[ProcessPoolExecutor]:
    # not forked: what other tests left in this process is none of theirs
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=context) as pool:
        yield pool


@pytest.mark.timeout(max(480, SEEDS))  # beside other tiers, with what these leave of two cores
def test_whatever_happens_the_invariants_hold_and_all_becomes_as_asked(
    processes: ProcessPoolExecutor,
):
    found = [
        text
        for batch in processes.map(_found, range(FIRST, FIRST + SEEDS, BATCH))
        for text in batch
    ]
    shown = "\n\n".join(found[:3])
    assert not found, f"{len(found)} of {SEEDS} seeds failed:\n{shown}"


def test_a_seed_tells_the_same_story_each_time():
    assert chaos.run(7) == chaos.run(7)


def test_what_the_judge_finds_in_the_middle_of_a_pass_ends_the_seed(
    monkeypatch: pytest.MonkeyPatch,
):
    def never(judge: Judge, body: object) -> None:
        raise AssertionError("no pod may be made")

    monkeypatch.setattr(Judge, "_judge_creation", never)
    with pytest.raises(chaos.ChaosFailed, match="no pod may be made"):
        chaos.run(7)


def test_a_head_beside_pods_of_another_group_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group, "_pods", lambda seen: (seen.pod,) if seen.pod else ())
    monkeypatch.setattr(chaos, "WIDE_SHARE", 1.0)
    with pytest.raises(chaos.ChaosFailed, match="a head is made while"):
        _all(range(30))


def test_every_operation_happens_and_is_told():
    lines = [line for seed in range(40) for line in chaos.run(seed) if "-- " in line]
    told = {line.split("-- ")[1].split(":")[0] for line in lines}
    assert {act.__name__ for act in chaos_acts.operations()} <= told
    assert any(line.endswith(f"kill_container: {chaos_acts.WIDE}-1") for line in lines)

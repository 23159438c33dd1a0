"""Two engines behind one front end: what is asked of the engine is asked of both."""

import asyncio
from collections.abc import Iterator

import pytest

from rollout_pod.engine.processes import engine_children
from tests.support.engine_checks import caches_are_cleared_when_nothing_runs, sleeps_and_wakes
from tests.support.engine_kit import checkpoint, run_all, serves, tensors_of, update

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

KIND = "dense"
ARGS = ("--data-parallel-size=2",)
A = checkpoint(KIND, 0)
B = checkpoint(KIND, 1)


@pytest.fixture(scope="module", autouse=True)
def two_cores() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield


async def test_an_update_reaches_both(engine):
    assert [path.name for path in engine.rank_sockets()] == ["rank-0.sock", "rank-1.sock"]
    assert await serves(engine, A)
    sent = await update(engine, tensors_of(B))
    assert sent.ok
    assert [report.rank for report in sent.reports] == [0, 1]
    assert await serves(engine, B)
    await engine.ping(timeout_s=10)


async def test_a_pause_aborts_on_both(engine):
    running = asyncio.ensure_future(run_all(engine, 8, 1500))
    await asyncio.sleep(1)
    await engine.pause()
    assert {output.finish_reason for output in await running} == {"abort"}
    await engine.resume()
    assert await serves(engine, B)


async def test_caches_are_cleared_when_nothing_runs(engine):
    await caches_are_cleared_when_nothing_runs(engine)


async def test_they_sleep_and_wake(engine):
    await sleeps_and_wakes(engine, B)


async def test_a_shutdown_leaves_nothing(engine):
    await engine.shutdown()
    assert engine_children(frozenset()) == []

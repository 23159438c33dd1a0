"""Two ranks: each takes every bucket and answers for itself."""

import os
import platform
import signal
from collections.abc import Iterator

import psutil
import pytest
import torch

from rollout_pod.engine import leftovers
from rollout_pod.engine.processes import engine_children
from tests.support.engine_checks import caches_are_cleared_when_nothing_runs, sleeps_and_wakes
from tests.support.engine_kit import (
    checkpoint,
    replay_is_the_reference,
    run,
    running,
    serves,
    tensors_of,
    update,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

KIND = "tied"
ARGS = ("--tensor-parallel-size=2",)
A = checkpoint(KIND, 0)
B = checkpoint(KIND, 1)
IN_SHARED_MEMORY = platform.machine() != "x86_64" or torch.cpu._is_avx512_supported()
"""Whether ranks add up there: vLLM's build for x86 without AVX-512 leaves that to gloo."""


@pytest.fixture(scope="module", autouse=True)
def shared_before() -> frozenset[str]:
    return leftovers.names_now()


@pytest.fixture(scope="module", autouse=True)
def two_cores() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield


async def test_an_update_reaches_both_ranks(engine):
    assert [path.name for path in engine.rank_sockets()] == ["rank-0.sock", "rank-1.sock"]
    assert await serves(engine, A)
    sent = await update(engine, tensors_of(B))
    assert sent.ok
    assert [report.rank for report in sent.reports] == [0, 1]
    assert {report.tensors for report in sent.reports} == {len(tensors_of(B))}
    assert await serves(engine, B)


async def test_a_vanished_sender_is_repaired_on_both_ranks(engine):
    broken = await update(engine, tensors_of(A), version="torn", flush=True, stop_after=20)
    assert [report.ok for report in broken.reports] == [False, False]
    assert (await update(engine, tensors_of(A), version="whole", flush=True)).ok
    assert await serves(engine, A)


async def test_replaying_a_load_is_that_load_to_the_bit(engine):
    # on CPU vLLM packs the weights of linear layers: those keep its loaders
    assert await replay_is_the_reference(engine, B, A) == {"mixed"}


async def test_one_output_a_request(engine):
    output = await run(engine, [5, 6, 7], 12)
    assert len(output.token_ids) == len(output.log_probs) == 12


async def test_caches_are_cleared_when_nothing_runs(engine):
    await caches_are_cleared_when_nothing_runs(engine)


async def test_it_sleeps_and_wakes(engine):
    assert (await update(engine, tensors_of(A), version="a")).ok
    await sleeps_and_wakes(engine, A)


async def test_a_shutdown_leaves_nothing_in_shared_memory(engine, shared_before):
    assert bool(_collectives(shared_before)) == IN_SHARED_MEMORY
    await engine.shutdown()
    assert engine_children(frozenset()) == []
    assert leftovers.unused(leftovers.names_now() - shared_before) == frozenset()


async def test_killed_workers_leave_nothing_in_shared_memory(shared_before):
    async with running(A, *ARGS):
        killed = engine_children(frozenset())
        for process in killed:
            os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(killed, timeout=10)
        assert bool(_collectives(shared_before)) == IN_SHARED_MEMORY
    assert leftovers.unused(leftovers.names_now() - shared_before) == frozenset()


def _collectives(before: frozenset[str]) -> set[str]:
    return {name for name in leftovers.names_now() - before if name.startswith("vllm_dist_")}

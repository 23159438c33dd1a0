"""Two ranks: each takes every bucket and answers for itself."""

from collections.abc import Iterator

import pytest

from tests.support.engine_kit import checkpoint, run, serves, tensors_of, update

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

KIND = "tied"
ARGS = ("--tensor-parallel-size=2",)
A = checkpoint(KIND, 0)
B = checkpoint(KIND, 1)


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


async def test_one_output_a_request(engine):
    output = await run(engine, [5, 6, 7], 12)
    assert len(output.token_ids) == len(output.log_probs) == 12

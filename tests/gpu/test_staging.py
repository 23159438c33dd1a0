"""A version that waits on the device of a real engine: it costs KV cache, and no pause but a copy."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from examples.tiny_models import make
from rollout_pod.engine.base import EngineError, EngineSettings, EngineStartError, StagingRefused
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.session_errors import TransferFailed
from rollout_pod.weights.trainer import WeightSender
from tests.support.engine_kit import digests, engine_of, run
from tests.support.push_kit import on_gpu, push, says, stage, switch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(250),
    # of an engine that does not start vLLM leaves its sockets' context
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]

ARGS = ("--dtype=bfloat16", "--max-model-len=2048", "--enforce-eager")
SHARE = 0.2


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert torch.cuda.is_available(), "this tier needs a GPU"
    folder = tmp_path_factory.mktemp("versions")
    for seed, version in enumerate(("base", "step-1", "step-2")):
        make(folder / version, kind="dense", seed=seed, hidden=512, dtype="bfloat16")
    return folder


@asynccontextmanager
async def engine_with(
    model: Path, *args: str, staging: str = "Device"
) -> AsyncIterator[VllmEngine]:
    with tempfile.TemporaryDirectory(prefix="eng-") as run_dir:
        settings = EngineSettings(
            model=str(model), args=(*ARGS, *args), run_dir=Path(run_dir),
            shm_dir=Path("/dev/shm"), staging=staging,
        )  # fmt: skip
        running = engine_of(settings)
        try:
            await running.start()
            yield running
        finally:
            await running.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(versions: Path) -> AsyncIterator[VllmEngine]:
    async with engine_with(versions / "base", f"--gpu-memory-utilization={SHARE}") as running:
        yield running


@pytest.mark.parametrize("how", ["direct", "bucketed", "shared_memory"])
async def test_what_waited_is_what_was_sent(engine, versions, how: str) -> None:
    settings = {"mode": how} if how != "shared_memory" else {"transport": how}
    sender = WeightSender(engine.rank_sockets(), device=Cuda(0), bucket_bytes=1 << 20, **settings)
    one, two = on_gpu(versions / "step-1"), on_gpu(versions / "step-2")
    await push(engine, sender, "step-1", one)  # from the second update on it is known how
    loaded, tokens = await digests(engine), await says(engine)
    await push(engine, sender, "step-2", two)
    before = await digests(engine)
    assert before != loaded

    talking = asyncio.ensure_future(run(engine, [5, 6, 7], 200))
    sent = await stage(engine, sender, "step-1", one)
    assert [report.path for report in sent.reports] == ["staged"]
    assert len((await talking).token_ids) == 200, "nothing was cut"
    assert await digests(engine) == before
    (report,) = await switch(engine, "step-1")
    assert (report.ok, report.path, report.bytes) == (True, "switched", sent.bytes)
    assert await digests(engine) == loaded
    assert await says(engine) == tokens
    await asyncio.to_thread(sender.close)


async def test_a_sender_that_stops_half_way_leaves_the_engine_alone(engine, versions) -> None:
    sender = WeightSender(
        engine.rank_sockets(), device=Cuda(0), bucket_bytes=1 << 18, mode="bucketed"
    )
    two = on_gpu(versions / "step-2")
    await push(engine, sender, "step-2", two)
    await push(engine, sender, "step-2", two)
    before, tokens = await digests(engine), await says(engine)
    with pytest.raises(TransferFailed):
        await stage(engine, sender, "step-1", iter(list(on_gpu(versions / "step-1").items())[:-1]))
    (report,) = await switch(engine, "step-1")
    assert (report.ok, report.touched) == (False, False)
    assert "waits on the device" in report.error
    assert (await digests(engine), await says(engine)) == (before, tokens)
    await asyncio.to_thread(sender.close)


async def test_a_slot_that_leaves_no_kv_cache_is_refused(versions) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(EngineStartError, match=r"weights.staging Device reserves .* are missing"):
        async with engine_with(
            versions / "base", f"--kv-cache-memory-bytes={total}",
            f"--gpu-memory-utilization={SHARE}",
        ):  # fmt: skip
            pass


async def test_an_engine_without_a_slot_says_so(versions) -> None:
    small = f"--gpu-memory-utilization={SHARE / 2}"
    async with engine_with(versions / "base", small, staging="Host") as running:
        with pytest.raises(EngineError, match="no memory of the device was reserved"):
            await running.stage_weights("s", version="v", timeout_s=5)
        (report,) = await switch(running, "v")
        assert (report.ok, report.touched) == (False, False)


async def test_before_the_first_update_it_is_refused_at_once(versions) -> None:
    """And not found out by a sender, which would count as a failure."""
    small = f"--gpu-memory-utilization={SHARE / 2}"
    async with engine_with(versions / "base", small) as running:
        with pytest.raises(StagingRefused, match="the first update goes the ordinary way"):
            await running.stage_weights("s", version="v", timeout_s=5)

"""A trainer pushes by CUDA IPC into a real engine; copies give what vLLM's loaders give."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from examples.tiny_models import make
from rollout_pod.engine.base import EngineSettings
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.trainer import WeightSender
from tests.support.engine_kit import digests, engine_of
from tests.support.push_kit import on_gpu, push, says

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(250),
]

ARGS = (
    "--dtype=bfloat16",
    "--max-model-len=2048",
    "--enforce-eager",
    "--gpu-memory-utilization=0.3",
)


@pytest.fixture(scope="module", params=["dense", "tied", "moe"])
def versions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert torch.cuda.is_available(), "this tier needs a GPU"
    folder = tmp_path_factory.mktemp(request.param)
    for seed, version in enumerate(("base", "step-1")):
        make(folder / version, kind=request.param, seed=seed, hidden=512, dtype="bfloat16")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(versions: Path) -> AsyncIterator[VllmEngine]:
    with tempfile.TemporaryDirectory(prefix="eng-") as run_dir:
        settings = EngineSettings(
            model=str(versions / "base"), args=ARGS, run_dir=Path(run_dir),
            shm_dir=Path("/dev/shm"),
        )  # fmt: skip
        running = engine_of(settings)
        try:
            await running.start()
            yield running
        finally:
            await running.shutdown()


@pytest.mark.parametrize("how", ["direct", "bucketed", "shared_memory"])
async def test_pushed_weights_are_those_of_the_loaders(engine, versions, how: str) -> None:
    settings = {"mode": how} if how != "shared_memory" else {"transport": how}
    sender = WeightSender(engine.rank_sockets(), device=Cuda(0), bucket_bytes=1 << 20, **settings)
    base, step = on_gpu(versions / "base"), on_gpu(versions / "step-1")
    for _ in range(2):
        await push(engine, sender, "base", base)
        sent, path = await push(engine, sender, "step-1", step)
        assert sent.transport == ("cuda_ipc" if how != "shared_memory" else how)
    assert path == "replayed", "every layer of a plain model is nothing but copies"
    replayed, tokens = await digests(engine), await says(engine)

    await engine._on_ranks("rollout_replay", (False,), 10)
    await push(engine, sender, "base", base)
    assert await digests(engine) != replayed
    assert await says(engine) != tokens
    _, path = await push(engine, sender, "step-1", step)
    assert path.startswith("reference")
    assert await digests(engine) == replayed
    assert await says(engine) == tokens
    await engine._on_ranks("rollout_replay", (True,), 10)
    await asyncio.to_thread(sender.close)

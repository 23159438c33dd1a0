"""An engine that weights were pushed into is, to the bit, one that was started with them."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from examples.tiny_models import make
from rollout_pod.engine.base import EngineOutput, EngineSettings
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.trainer import WeightSender
from tests.support.engine_kit import digests, engine_of, prompts, run
from tests.support.push_kit import on_gpu, push
from tests.support.tiny_quantised import quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

ARGS = (
    "--dtype=bfloat16",
    "--max-model-len=2048",
    "--enforce-eager",
    "--gpu-memory-utilization=0.3",
)
QUANTISED = ("--quantization=fp8",)
"""The checkpoint is in bfloat16: each load quantises it."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert torch.cuda.is_available(), "this tier needs a GPU"
    folder = tmp_path_factory.mktemp("versions")
    for seed, version in enumerate(("base", "step-1")):
        make(folder / version, kind="dense", seed=seed, hidden=512, dtype="bfloat16")
        quantise(folder / version, folder / f"{version}-fp8", "fp8")
    return folder


@asynccontextmanager
async def engine_with(model: Path, args: tuple[str, ...]) -> AsyncIterator[VllmEngine]:
    with tempfile.TemporaryDirectory(prefix="eng-") as run_dir:
        running = engine_of(
            EngineSettings(
                model=str(model), args=(*ARGS, *args), run_dir=Path(run_dir),
                shm_dir=Path("/dev/shm"),
            )
        )  # fmt: skip
        try:
            await running.start()
            yield running
        finally:
            await running.shutdown()


async def outputs(engine: VllmEngine) -> list[EngineOutput]:
    """One after the other: kernels of other batch sizes round in other ways."""
    return [await run(engine, prompt, 32) for prompt in prompts(3)]


@pytest.mark.parametrize(
    ("kind", "args"),
    [("", ()), ("", QUANTISED), ("-fp8", ())],
    ids=["bfloat16", "fp8", "fp8 checkpoint"],
)
async def test_pushed_is_fresh(versions: Path, kind: str, args: tuple[str, ...]) -> None:
    one, two = versions / f"base{kind}", versions / f"step-1{kind}"
    async with engine_with(two, args) as fresh:
        wanted, bits = await outputs(fresh), await digests(fresh)
    base, step = on_gpu(one), on_gpu(two)
    async with engine_with(one, args) as engine:
        before = await outputs(engine)
        assert [o.token_ids for o in before] != [o.token_ids for o in wanted]
        sender = WeightSender(engine.rank_sockets(), device=Cuda(0), mode="direct")
        for _ in range(2):
            await push(engine, sender, "base", base)
            assert await outputs(engine) == before
            _, path = await push(engine, sender, "step-1", step)
            assert await digests(engine) == bits
            assert await outputs(engine) == wanted, "tokens and log-probs, to the bit"
        if args or kind:
            assert path.startswith(("mixed", "reference")), "what is quantised is not copied"
            assert "processes weights" in path
        else:
            assert path == "replayed"
        await asyncio.to_thread(sender.close)

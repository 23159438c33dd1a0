"""A checkpoint whose linear layers are quantised to int8: updated is, to the bit, freshly started."""

from pathlib import Path

import pytest

from examples.tiny_models import make
from rollout_pod.engine.base import EngineOutput
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.weights.session_errors import ManifestError
from tests.support.engine_kit import (
    digests,
    run_all,
    running,
    tensors_of,
    update,
)
from tests.support.tiny_quantised import quantise

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("int8")
    made = []
    for seed in range(2):
        make(folder / f"plain-{seed}", seed=seed, dtype="bfloat16")
        made.append(quantise(folder / f"plain-{seed}", folder / f"int8-{seed}", "int8"))
    return made


async def says(engine: VllmEngine) -> list[EngineOutput]:
    return await run_all(engine, count=4, max_tokens=32)


async def test_updated_is_fresh_each_time_and_after_a_failure(versions: list[Path]) -> None:
    base, step = (tensors_of(path) for path in versions)
    async with running(versions[1], "--dtype=bfloat16") as fresh:
        wanted, bits = await says(fresh), await digests(fresh)
    async with running(versions[0], "--dtype=bfloat16") as engine:
        before, there = await says(engine), await digests(engine)
        assert [o.token_ids for o in before] != [o.token_ids for o in wanted]
        for number in range(3):  # recorded, then what is not quantised is copied
            assert (await update(engine, step, version=f"step-{number}")).ok
            assert await digests(engine) == bits
            assert await says(engine) == wanted, f"update {number}"
            assert (await update(engine, base, version=f"base-{number}")).ok
            assert (await digests(engine), await says(engine)) == (there, before)
        broken = await update(engine, step, version="broken", stop_after=3)
        assert not broken.ok
        assert (await update(engine, step, version="again", flush=True)).ok
        assert (await digests(engine), await says(engine)) == (bits, wanted)

        plain = {name: t.bfloat16() for name, t in step.items() if "scale" not in name}
        with pytest.raises(ManifestError, match=r"weight.*: (missing|dtype)"):
            await update(engine, plain, version="not quantised")
        assert await says(engine) == wanted

"""An engine that guesses with a draft model: it takes updates, and says that the draft stays."""

import json

import pytest

from rollout_pod.engine.vllm import VllmEngine
from tests.support.engine_kit import (
    checkpoint,
    prompts,
    reference,
    run,
    running,
    tensors_of,
    update,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

A, B = checkpoint("dense", 0), checkpoint("dense", 1)


async def serves(engine: VllmEngine, path) -> bool:
    model = reference(path)
    return all([model.agrees(p, await run(engine, p)) for p in prompts(4)])


async def test_an_update_leaves_the_draft_and_every_token_is_the_new_versions() -> None:
    speculative = json.dumps(
        {"method": "draft_model", "model": str(A), "num_speculative_tokens": 3}
    )
    async with running(A, f"--speculative-config={speculative}") as engine:
        assert await serves(engine, A)
        for path, version in ((B, "b"), (A, "a"), (B, "b2")):  # the later ones are replayed
            sent = await update(engine, tensors_of(path), version=version)
            assert sent.ok, sent
            assert "the draft model (draft_model) keeps" in sent.reports[0].note
            assert await serves(engine, path)

"""The output head is the embedding: the first of the two defects of vLLM's reload on CPU."""

import pytest

from tests.support.engine_checks import (
    cut_three_times_equals_uncut,
    log_probs_are_of_what_was_sampled,
)
from tests.support.engine_kit import (
    checkpoint,
    replay_is_the_reference,
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
A = checkpoint(KIND, 0)
B = checkpoint(KIND, 1)


async def test_without_the_repair_an_update_is_silently_wrong(engine):
    assert await serves(engine, A)
    engine._cpu_repairs = False
    try:
        sent = await update(engine, tensors_of(B), version="bare")
        assert sent.ok
        assert not await serves(engine, B), "vLLM mends it itself now: drop the repair"
    finally:
        engine._cpu_repairs = True
    assert (await update(engine, tensors_of(B), version="repaired")).ok
    assert await serves(engine, B)


async def test_replaying_a_load_is_that_load_to_the_bit(engine):
    # on CPU vLLM packs the weights of linear layers: those keep its loaders
    assert await replay_is_the_reference(engine, A, B) == {"mixed"}


async def test_both_names_of_the_tied_tensor_may_be_sent(engine):
    tensors = tensors_of(A)
    assert "lm_head.weight" not in tensors
    both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    assert (await update(engine, both, version="both", flush=True)).ok
    assert await serves(engine, A)


async def test_one_name_may_stand_for_the_other(engine):
    """Its bytes travel once, and the loaders get them under both."""
    aliases = (("lm_head.weight", "model.embed_tokens.weight"),)
    for number, checkpoint_of in enumerate((A, B, A)):
        sent = await update(
            engine, tensors_of(checkpoint_of), version=f"alias-{number}", aliases=aliases
        )
        assert sent.ok
        assert await serves(engine, checkpoint_of)
    assert {report.path for report in sent.reports} == {"mixed"}, "by the copies seen at first"


@pytest.mark.parametrize("stop_after", [1, 50])
async def test_a_vanished_sender_is_repaired_by_a_complete_resend(engine, stop_after):
    tensors = tensors_of(B)
    broken = await update(engine, tensors, version="torn", flush=True, stop_after=stop_after)
    assert not broken.ok
    assert (await update(engine, tensors, version="whole", flush=True)).ok
    assert await serves(engine, B)
    assert (await update(engine, tensors_of(A), version="back")).ok
    assert await serves(engine, A)


async def test_cut_three_times_and_continued_equals_uncut(engine):
    assert (await update(engine, tensors_of(A), version="whole", flush=True)).ok
    await cut_three_times_equals_uncut(engine)


async def test_log_probs_are_those_of_the_distribution_that_was_sampled(engine):
    assert (await update(engine, tensors_of(A), version="whole", flush=True)).ok
    await log_probs_are_of_what_was_sampled(engine, A)

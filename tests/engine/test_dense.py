"""A dense model: partial rollouts, log-probs, updates, failures of updates."""

import asyncio
import uuid

import pytest
import torch

from rollout_pod.engine.base import EngineError, EngineRequest, InvalidTokens
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.protocol import SleepTag
from rollout_pod.weights.session_errors import ManifestError
from tests.support.engine_checks import (
    cut_three_times_equals_uncut,
    log_probs_are_of_what_was_sampled,
)
from tests.support.engine_kit import (
    GREEDY,
    ask,
    checkpoint,
    prompts,
    reference,
    replay_is_the_reference,
    run,
    run_all,
    serves,
    tensors_of,
    update,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

KIND = "dense"
A = checkpoint(KIND, 0)
B = checkpoint(KIND, 1)


async def load(engine: VllmEngine, path=A, **how):
    """Whatever the test before left: afterwards the engine serves ``path``."""
    sent = await update(engine, tensors_of(path), flush=True, **how)
    assert sent.ok, sent


async def test_a_fresh_engine_is_the_reference(engine):
    assert await serves(engine, A)
    # the two checkpoints can be told apart, or no test here shows anything
    assert not await serves(engine, B)


async def test_ranks_have_sockets(engine):
    (path,) = engine.rank_sockets()
    assert path.name == "rank-0.sock"
    assert path.is_socket()
    assert engine.model_path() == A
    assert engine.dead_error() is None


# one bucket for all; several tensors each; tensors split
@pytest.mark.parametrize("bucket_bytes", [1 << 24, 300_000, 5_000])
async def test_an_updated_engine_is_the_reference(engine, bucket_bytes):
    await load(engine)
    sent = await update(
        engine, tensors_of(B), version=f"b-{bucket_bytes}", bucket_bytes=bucket_bytes
    )
    assert sent.ok
    assert (sent.buckets == 1) == (bucket_bytes == 1 << 24)
    (report,) = sent.reports
    assert (report.rank, report.version, report.tensors) == (0, f"b-{bucket_bytes}", 36)
    assert await serves(engine, B)


async def test_replaying_a_load_is_that_load_to_the_bit(engine):
    # on CPU vLLM packs the weights of linear layers: those keep its loaders
    assert await replay_is_the_reference(engine, A, B) == {"mixed"}


async def test_cut_three_times_and_continued_equals_uncut(engine):
    await load(engine)
    await cut_three_times_equals_uncut(engine)


async def test_a_request_of_a_paused_engine_waits_and_can_be_aborted(engine):
    await engine.pause()
    await engine.pause()
    params = engine.sampling_params(GREEDY, max_tokens=8)
    name = uuid.uuid4().hex
    waiting = asyncio.ensure_future(
        engine.generate(EngineRequest(engine_id=name, prompt_token_ids=[5, 6], params=params))
    )
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    await engine.abort("unknown")
    await engine.abort(name)
    output = await waiting
    assert (output.token_ids, output.log_probs, output.finish_reason) == ((), (), "abort")
    again = asyncio.ensure_future(run(engine, [5, 6]))
    await asyncio.wait({again}, timeout=0.1)
    await engine.pause()
    assert (await again).finish_reason == "abort"
    await engine.resume()
    await engine.resume()
    assert (await run(engine, [5, 6], 8)).finish_reason == "length"


async def test_after_a_pause_that_keeps_no_token_is_on_its_way(engine, monkeypatch):
    """However far behind this process is: the gate names a token's version when it comes."""
    core = engine._llm.engine_core
    get, tokens, behind = core.get_output_async, [], True

    async def late():
        if behind:
            await asyncio.sleep(0.1)
        return await get()

    monkeypatch.setattr(core, "get_output_async", late)
    asked = [
        asyncio.create_task(ask(engine, p, GREEDY, max_tokens=200, on_delta=tokens.append))
        for p in prompts(4)
    ]
    async with asyncio.timeout(60):
        while core.outputs_queue.qsize() < 3:
            await asyncio.sleep(0.01)
        await engine.pause(keep=True)
    before = len(tokens)
    await asyncio.sleep(0.5)
    assert len(tokens) == before > 0
    behind = False
    await engine.resume()
    for output in await asyncio.gather(*asked):
        assert (len(output.token_ids), output.finish_reason) == (200, "length")


async def test_what_could_not_be_handed_over_is_not_kept(engine):
    params = engine.sampling_params(GREEDY, max_tokens=8)
    params.extra_args = {"huge": 10**30}  # our own check refuses such a one
    request = EngineRequest(engine_id=uuid.uuid4().hex, prompt_token_ids=[5, 6], params=params)
    with pytest.raises(EngineError):
        await engine.generate(request)
    kept = engine._llm.output_processor
    assert not kept.request_states
    assert not kept.external_req_ids


async def test_log_probs_are_those_of_the_distribution_that_was_sampled(engine):
    await load(engine)
    await log_probs_are_of_what_was_sampled(engine, A)


async def test_the_prefix_cache_does_not_outlive_its_weights(engine):
    await load(engine)
    (prompt,) = prompts(1, length=400, seed=5)
    await run(engine, prompt, 4)
    warm = await run(engine, prompt, 24)
    assert warm.num_cached_tokens >= 256
    assert reference(A).agrees(prompt, warm)
    assert (await update(engine, tensors_of(B), version="cold")).ok
    cold = await run(engine, prompt, 24)
    assert cold.num_cached_tokens == 0
    assert reference(B).agrees(prompt, cold)


@pytest.mark.parametrize("stop_after", [0, 1, 30, 70])
async def test_a_vanished_sender_is_repaired_by_a_complete_resend(engine, stop_after):
    await load(engine)
    tensors = tensors_of(B)
    broken = await update(engine, tensors, version="torn", stop_after=stop_after)
    (report,) = broken.reports
    assert not report.ok
    assert report.error
    # still paused, and never resumed before a complete load
    assert (await update(engine, tensors, version="whole", flush=True)).ok
    assert await serves(engine, B)


async def test_a_wrong_bucket_is_repaired_by_a_complete_resend(engine):
    await load(engine)
    tensors = tensors_of(B)
    broken = await update(engine, tensors, version="torn", wrong_at=25)
    assert not broken.ok
    assert not broken.reports[0].ok
    assert (await update(engine, tensors, version="whole", flush=True)).ok
    assert await serves(engine, B)


async def test_a_silent_sender_costs_no_more_than_the_timeout(engine):
    await load(engine)
    loop = asyncio.get_running_loop()
    started = loop.time()
    broken = await update(engine, tensors_of(B), version="mute", mute=True, timeout_s=1.0)
    assert loop.time() - started < 4
    assert not broken.reports[0].ok
    assert "timed out" in broken.reports[0].error
    await load(engine)


async def test_an_unknown_session_touches_nothing(engine):
    await load(engine)
    await engine.pause()
    (report,) = await engine.load_weights("nobody", version="v", flush=False, timeout_s=5)
    await engine.resume()
    assert (report.ok, report.touched) == (False, False)
    assert "nobody" in report.error
    assert await serves(engine, A)


async def test_without_a_slot_nothing_waits_on_the_device(engine):
    with pytest.raises(EngineError, match="no memory of the device was reserved"):
        await engine.stage_weights("session", version="step-1", timeout_s=5)
    await engine.pause()
    (report,) = await engine.switch_weights("step-1", timeout_s=5)
    await engine.resume()
    assert (report.ok, report.touched) == (False, False)
    assert "no memory of the device was reserved" in report.error


async def test_a_manifest_that_is_another_model_is_refused_before_any_byte(engine):
    await load(engine)
    tensors = tensors_of(B)
    missing = dict(tensors)
    del missing["model.layers.1.mlp.up_proj.weight"]
    shaped = tensors | {"model.norm.weight": torch.ones(64)}
    typed = tensors | {"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}
    unknown = tensors | {"model.layers.9.mlp.up_proj.weight": torch.ones(4)}
    for wrong, name in (
        (missing, "model.layers.1.mlp.up_proj.weight"),
        (shaped, "model.norm.weight"),
        (typed, "model.norm.weight"),
        (unknown, "model.layers.9.mlp.up_proj.weight"),
    ):
        with pytest.raises(ManifestError, match=name):
            await update(engine, wrong, version="wrong")
    # it was not even paused
    assert await serves(engine, A)


async def test_the_engine_knows_the_version(engine):
    await load(engine)
    await engine.publish_version("step-7")
    assert await engine._llm.get_weight_version() == "step-7"


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_woke_is_paused_until_it_is_resumed(engine, level):
    """vLLM itself goes on as soon as everything is resident."""
    await load(engine)
    assert engine.sleep_refusal() is None
    await engine.pause()
    await engine.pause()
    report = await engine.sleep(level)
    assert report.bytes == 0 and "CPU" in report.message
    await engine.ping(timeout_s=5)
    for tag in SleepTag:
        assert await engine.wake(frozenset({tag})) == 0
        assert await engine._llm.is_paused()
    waiting = asyncio.ensure_future(run(engine, [5, 6, 7], 5))
    await asyncio.wait({waiting}, timeout=0.3)
    assert not waiting.done()
    await engine.resume()
    assert len((await waiting).token_ids) == 5
    await load(engine, B)
    assert await serves(engine, B)


async def test_clearing_caches_tells_that_it_could_not(engine):
    await load(engine)
    assert (await engine.clear_caches()).is_complete
    running = asyncio.ensure_future(run(engine, [5, 6, 7], 600))
    await asyncio.sleep(0.1)
    assert not (await engine.clear_caches()).is_complete
    await engine.pause()
    await running
    await engine.resume()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([5] * 3000, "longer than the maximum model length"),
        ([5, 1024], "1024"),
        ([-1], "-1"),
    ],
)
async def test_a_prompt_that_cannot_be_served_is_refused_with_a_reason(engine, prompt, words):
    with pytest.raises(EngineError, match=words):
        await run(engine, prompt, 4)
    assert (await run(engine, [5], 4)).finish_reason == "length"


async def test_a_salt_separates_caches_and_a_session_changes_no_token(engine):
    await load(engine)
    (prompt,) = prompts(1, length=400, seed=11)

    async def ask(**more):
        params = engine.sampling_params(GREEDY, max_tokens=4)
        name = uuid.uuid4().hex
        return await engine.generate(EngineRequest(name, prompt, params, **more))

    plain = [await ask(), await ask(session_id="turns")]
    salted = [await ask(cache_salt="mine"), await ask(cache_salt="mine")]
    assert plain[1].num_cached_tokens >= 256
    assert [each.num_cached_tokens >= 256 for each in salted] == [False, True]
    assert len({each.token_ids for each in (*plain, *salted)}) == 1


async def test_a_priority_that_the_scheduler_does_not_know_is_no_harm(engine):
    params = engine.sampling_params(GREEDY, max_tokens=4)
    request = EngineRequest(
        engine_id="p",
        prompt_token_ids=[5],
        params=params,
        priority=3,
        session_id="s",
        cache_salt="salt",
        trace_headers={"traceparent": "00-0-0-00"},
    )
    with_priority = await asyncio.gather(engine.generate(request), return_exceptions=True)
    assert all(not isinstance(o, Exception) or isinstance(o, EngineError) for o in with_priority)
    assert (await run(engine, [5], 4)).finish_reason == "length"


async def test_extreme_but_legal_parameters_do_not_end_the_engine(engine):
    for extreme in (
        {"seed": 2**63 - 1, "temperature": 1.0},
        {"seed": -(2**63), "temperature": 1.0},
        {"top_k": 2**40, "temperature": 1.0},
        {"temperature": 1e-9},
        {"min_tokens": 4, "stop_token_ids": [0, 1023]},
        {"logit_bias": {"3": 1e9, "4": -1e9}, "repetition_penalty": 1e-4, "temperature": 0.01},
        {"logit_bias": {"3": 1e9, "4": -1e9}, "repetition_penalty": 1e4, "temperature": 0.01},
        {"allowed_token_ids": [7]},
        {"bad_words": ["w900"]},
        {"stop": ["w900"]},
        {"min_p": 1.0, "top_p": 1e-30, "temperature": 2.0},
    ):
        output = await run(engine, [5, 6], 4, **extreme)
        assert len(output.token_ids) == len(output.log_probs) > 0, extreme
        assert output.finish_reason in ("length", "stop"), extreme
    assert await serves(engine, A) or await run_all(engine)


async def test_stopping(engine):
    await load(engine)
    (prompt,) = prompts(1)
    free = await run(engine, prompt, 16)
    third = free.token_ids[2]
    stopped = await run(engine, prompt, 16, stop_token_ids=[third])
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == third
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(third) + 1]


async def test_diverged_weights_give_an_error_and_no_log_prob_that_is_no_number(
    engine, monkeypatch
):
    broken = {
        name: torch.full_like(tensor, float("nan")) if name == "model.norm.weight" else tensor
        for name, tensor in tensors_of(A).items()
    }
    assert (await update(engine, broken, version="diverged", flush=True)).ok
    output = await run(engine, [5, 6, 7], 16)
    assert (output.token_ids, output.log_probs) == ((), ())
    assert (output.finish_reason, output.stop_reason) == ("error", "non-finite log-prob")

    aborted, deltas = [], []
    asked = engine._asked()
    abort = asked.abort

    async def note_abort(engine_id):
        aborted.append(engine_id)
        await abort(engine_id)

    monkeypatch.setattr(asked, "abort", note_abort)
    params = engine.sampling_params(GREEDY, max_tokens=1500)
    request = EngineRequest(engine_id=uuid.uuid4().hex, prompt_token_ids=[5, 6], params=params)
    output = await engine.generate(request, deltas.append)
    assert (output.token_ids, output.finish_reason) == ((), "error")
    assert aborted == [request.engine_id]
    assert deltas == []
    monkeypatch.undo()
    await load(engine)
    assert await serves(engine, A)


async def test_a_token_masked_for_all_is_no_answer(engine):
    # an end before min_tokens is forbidden, and nothing else is allowed
    output = await run(
        engine, [5, 6, 7], 4, allowed_token_ids=[9], stop_token_ids=[9], min_tokens=2, logprobs=2
    )
    assert (output.token_ids, output.finish_reason) == ((), "error")
    masked = await run(engine, [5, 6, 7], 4, allowed_token_ids=[9], logprobs=3)
    assert masked.finish_reason == "length"
    assert [[top.token_id for top in tops] for tops in masked.top_log_probs] == [[9]] * 4


async def test_tokens_that_the_model_does_not_have(engine):
    engine.check_tokens([])
    engine.check_tokens(range(1024))
    for outside, at in (([5, -1], 1), ([1 << 40], 0), ([3, 3, 1 << 20, -7], 2)):
        with pytest.raises(InvalidTokens, match=str(outside[at])) as caught:
            engine.check_tokens(outside)
        assert caught.value.position == at

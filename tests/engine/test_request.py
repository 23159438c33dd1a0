"""What a request may ask for beside plain sampling: grammars, log-probs of the prompt, adapters,
and what a cut changes.
"""

import asyncio
import json
import math
import shutil
from contextlib import suppress
from typing import Any

import pytest

from rollout_pod.engine.base import EngineOutput, InvalidField, InvalidSamplingParams
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.generation import make_budget
from rollout_pod.protocol import GenerateRequest
from tests.support import engine_kit
from tests.support.engine_kit import (
    GREEDY,
    LORA_RANK,
    adapter,
    checkpoint,
    copy_of,
    merged,
    prompts,
    reference,
    run,
    tensors_of,
    update,
)

KIND = "dense"
BASE = checkpoint("dense", 0)
ADAPTERS = {name: copy_of(adapter(BASE, seed)) for name, seed in (("one", 1), ("two", 2))}
ARGS = (
    "--enable-lora",
    f"--max-lora-rank={max(8, LORA_RANK)}",
    "--lora-modules",
    *(f"{name}={path}" for name, path in ADAPTERS.items()),
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = prompts(1)[0]


async def ask(engine: VllmEngine, sampling: dict[str, Any], **how: Any) -> EngineOutput:
    prompt = how.pop("prompt", PROMPT)
    return await engine_kit.ask(engine, prompt, sampling, **how)


def text_of(engine: VllmEngine, tokens: tuple[int, ...]) -> str:
    return str(engine._llm.renderer.tokenizer.decode(list(tokens), skip_special_tokens=True))


# --- structured outputs ---


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ({"choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"regex": "<[ab]{3}>"}, lambda text: text[0] == "<" and set(text[1:4]) <= {*"ab"}),
        ({"grammar": 'root ::= "x" "y"'}, lambda text: text == "xy"),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"a": {"enum": [1, 2]}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
                "disable_any_whitespace": True,
            },
            lambda text: json.loads(text) in ({"a": 1}, {"a": 2}),
        ),
    ],
)
async def test_a_grammar_is_kept(engine: VllmEngine, grammar: Any, fits: Any) -> None:
    output = await ask(engine, {"temperature": 1.0, "structured_outputs": grammar})
    assert fits(text_of(engine, output.token_ids)), text_of(engine, output.token_ids)
    assert output.finish_reason == "stop"
    assert all(math.isfinite(value) for value in output.log_probs)


_DEEP: dict[str, Any] = {"type": "string"}
for _ in range(700):
    _DEEP = {"type": "array", "items": _DEEP}


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "("},
        {"regex": "[z-a]"},
        {"regex": "a{2,1}"},
        {"regex": "(?=a)b"},
        {"regex": r"(a)\1"},
        {"regex": "\0"},
        {"regex": "(" * 20_000},
        {"regex": 1},
        {"json": "{"},
        {"json": {"type": "nonsense"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": _DEEP},
        {"json": {"type": "integer", "multipleOf": 3}},
        {"json": {"type": "object", "properties": {str(i): {} for i in range(9000)}}},
        {"json_object": False},
        {"choice": []},
        {"choice": "a"},
        {"choice": [1]},
        {"grammar": ""},
        {"grammar": "root ::= missing"},
        {"grammar": 'root ::= "a'},
        {"structural_tag": "{}"},
        {"structural_tag": "nonsense"},
    ],
    ids=lambda grammar: str(grammar)[:40],
)
async def test_a_grammar_that_is_none_is_refused(engine: VllmEngine, grammar: Any) -> None:
    with pytest.raises(InvalidSamplingParams) as caught:
        engine.sampling_params({"structured_outputs": grammar}, max_tokens=4)
    assert caught.value.field == "structured_outputs"


@pytest.mark.parametrize(
    "grammar",
    [
        {"json": {"$ref": "#"}},
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        {"regex": "((a{0,1000}){0,1000}){0,1000}"},
        {"regex": "(.*a){200}"},
        {"regex": "(a|aa|aaa)+" * 500},
        {"grammar": "root ::= root"},
        {"grammar": 'root ::= root "a" | "a"'},
        {"choice": [f"{i}" * 20 for i in range(1000)]},
        {"regex": ""},
        {"json_object": True},
    ],
    ids=lambda grammar: str(grammar)[:40],
)
async def test_a_grammar_that_is_hard_ends_no_engine(engine: VllmEngine, grammar: Any) -> None:
    with suppress(InvalidSamplingParams):
        async with asyncio.timeout(60):
            output = await ask(engine, {"structured_outputs": grammar}, max_tokens=4)
        assert output.finish_reason in ("stop", "length", "error")
    assert engine.dead_error() is None
    after = await run(engine, PROMPT, 4)
    assert reference(BASE).agrees(PROMPT, after)


# --- log-probs of the prompt ---


async def test_prompt_log_probs(engine: VllmEngine) -> None:
    output = await ask(engine, GREEDY | {"prompt_logprobs": 2}, max_tokens=4)
    rows = reference(BASE).logits(PROMPT[:1], tuple(PROMPT[1:])).log_softmax(-1)
    told = output.prompt_log_probs
    assert told is not None
    assert len(told) == len(PROMPT)
    assert told[0] is None
    for token, position, row in zip(PROMPT[1:], told[1:], rows, strict=True):
        assert position is not None
        assert position[0].token_id == token
        assert position[0].rank == int((row > row[token]).sum()) + 1
        best = row.topk(2).indices.tolist()
        assert {entry.token_id for entry in position} == {token, *best}
        for entry in position:
            assert entry.log_prob == pytest.approx(float(row[entry.token_id]), abs=1e-3)


async def test_prompt_log_probs_are_of_the_prompt_alone(engine: VllmEngine) -> None:
    whole = await ask(engine, GREEDY | {"prompt_logprobs": 0}, max_tokens=8)
    deltas = []
    rest = await ask(
        engine, GREEDY | {"prompt_logprobs": 0}, generated=whole.token_ids[:5], max_tokens=3,
        on_delta=deltas.append,
    )  # fmt: skip
    assert rest.token_ids == whole.token_ids[5:]
    assert rest.prompt_log_probs is not None
    assert whole.prompt_log_probs is not None
    assert len(rest.prompt_log_probs) == len(PROMPT)
    for again, first in zip(rest.prompt_log_probs[1:], whole.prompt_log_probs[1:], strict=True):
        assert again is not None
        assert first is not None
        assert again[0].log_prob == pytest.approx(first[0].log_prob, abs=1e-4)
    assert (await ask(engine, GREEDY, max_tokens=2)).prompt_log_probs is None


# --- what the engine does not have ---


async def test_what_the_engine_was_not_started_for(engine: VllmEngine) -> None:
    for asked, field, remedy in (
        ({"routed_experts": True}, "return_routed_experts", "--enable-return-routed-experts"),
        ({"media": {"image": ["data:,"]}}, "multi_modal_data", "takes no images"),
        ({"lora": "three"}, "lora", "one, two"),
    ):
        with pytest.raises(InvalidField, match=remedy) as caught:
            await engine.prepare(PROMPT, **asked)
        assert caught.value.field == field
    with pytest.raises(InvalidSamplingParams, match="--reasoning-parser"):
        engine.sampling_params({"thinking_token_budget": 5}, max_tokens=4)


# --- across a cut ---


async def test_a_stop_string_is_found_across_a_cut(engine: VllmEngine) -> None:
    # whole words only: after a part of a character vLLM's detokenizer tells earlier text again
    words = range(300, 1024)
    plain = GREEDY | {"allowed_token_ids": list(words)}
    prompt = list(words[:20])
    tokens = (await ask(engine, plain, prompt=prompt, max_tokens=24)).token_ids
    assert set(tokens) <= set(words)
    stop = plain | {"stop": [text_of(engine, tokens[9:10])[-2:] + "w"]}
    uncut = await ask(engine, stop, prompt=prompt, max_tokens=24)
    assert uncut.finish_reason == "stop"
    count = len(uncut.token_ids)
    assert uncut.token_ids == tokens[:count]
    for cut in range(max(1, count - 3), count):
        deltas: list[Any] = []
        rest = await ask(
            engine, stop, prompt=prompt, generated=tokens[:cut], max_tokens=24 - cut,
            on_delta=deltas.append,
        )  # fmt: skip
        assert tokens[:cut] + rest.token_ids == uncut.token_ids
        assert (rest.finish_reason, rest.stop_reason) == (uncut.finish_reason, uncut.stop_reason)
        assert tuple(t for delta in deltas for t in delta.token_ids) == rest.token_ids
        assert len(rest.log_probs) == len(rest.token_ids)
    late = stop | {"min_tokens": 2}  # of the rest
    rest = await ask(
        engine, late, prompt=prompt, generated=tokens[: count - 1], max_tokens=25 - count
    )
    assert len(rest.token_ids) >= 2


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
async def test_penalties_begin_anew(engine: VllmEngine, name: str) -> None:
    """As the page says: what was generated before counts as prompt."""
    penalty = GREEDY | {name: 2.0}
    whole = await ask(engine, penalty, max_tokens=32)
    cut = whole.token_ids[:16]
    rest = await ask(engine, penalty, generated=cut, max_tokens=16)
    fresh = await ask(engine, penalty, prompt=[*PROMPT, *cut], max_tokens=16)
    assert rest.token_ids == fresh.token_ids
    assert rest.token_ids != whole.token_ids[16:]


async def test_a_seed_and_the_same_cuts_give_the_same_tokens(engine: VllmEngine) -> None:
    async def rollout(cuts: tuple[int, ...]) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        for cut in (*cuts, 32):
            request = GenerateRequest.model_validate(
                {
                    "request_id": "r", "prompt_token_ids": PROMPT, "generated_token_ids": tokens,
                    "sampling_params": {"seed": 7, "ignore_eos": True, "max_tokens": cut},
                }
            )  # fmt: skip
            budget = make_budget(request, max_model_len=2048)
            part = await ask(engine, budget.params, generated=tokens, max_tokens=budget.tokens)
            tokens += part.token_ids
        return tokens

    whole = await rollout(())
    assert await rollout(()) == whole
    cut = await rollout((10, 20))
    assert await rollout((10, 20)) == cut
    assert (cut[:10], cut != whole) == (whole[:10], True)
    assert cut[10:20] != whole[:10], "the same random numbers again"


async def test_a_repetition_penalty_goes_on(engine: VllmEngine) -> None:
    penalty = GREEDY | {"repetition_penalty": 1.7}
    whole = await ask(engine, penalty, max_tokens=32)
    rest = await ask(engine, penalty, generated=whole.token_ids[:16], max_tokens=16)
    assert rest.token_ids == whole.token_ids[16:]
    assert whole.token_ids != (await ask(engine, GREEDY, max_tokens=32)).token_ids


# --- adapters ---


@pytest.mark.parametrize(("name", "seed"), [("one", 1), ("two", 2)])
async def test_an_adapter_is_as_good_as_merged_weights(
    engine: VllmEngine, name: str, seed: int
) -> None:
    plain, adapted = await asyncio.gather(ask(engine, GREEDY), ask(engine, GREEDY, lora=name))
    assert reference(BASE).agrees(PROMPT, plain)
    assert reference(merged(BASE, seed)).agrees(PROMPT, adapted)
    assert plain.token_ids != adapted.token_ids
    rest = await ask(engine, GREEDY, lora=name, generated=adapted.token_ids[:20], max_tokens=12)
    assert rest.token_ids == adapted.token_ids[20:]


async def test_the_openai_server_numbers_adapters_alike(engine: VllmEngine) -> None:
    """Else the engine would take one for another."""
    theirs = engine._front_end.app().state.openai_serving_models.lora_requests  # type: ignore[attr-defined]
    assert {n: (r.lora_int_id, r.lora_path) for n, r in theirs.items()} == {
        n: (r.lora_int_id, r.lora_path) for n, r in engine._adapters.items()
    }
    assert set(theirs) == {"one", "two"}


async def test_updates_change_the_base_and_keep_the_adapters(engine: VllmEngine) -> None:
    for seed, path in ((1, "recorded"), (2, "mixed")):
        new = checkpoint("dense", seed)
        sent = await update(engine, tensors_of(new), version=f"step-{seed}")
        assert sent.ok, sent
        assert [report.path for report in sent.reports] == [path]
        assert reference(new).agrees(PROMPT, await ask(engine, GREEDY))
        adapted = await ask(engine, GREEDY, lora="one")
        assert reference(merged(new, 1)).agrees(PROMPT, adapted)


async def test_adapters_are_those_of_the_start_whatever_becomes_of_their_folders(
    engine: VllmEngine,
) -> None:
    async def adapted() -> list[tuple[int, ...]]:
        asked = [ask(engine, GREEDY, lora=name) for name in ADAPTERS]
        return [output.token_ids for output in await asyncio.gather(*asked)]

    assert (await update(engine, tensors_of(BASE), version="before")).ok
    before = await adapted()
    shutil.copytree(adapter(BASE, 3), ADAPTERS["two"], dirs_exist_ok=True)
    shutil.rmtree(ADAPTERS["one"])
    assert (await update(engine, tensors_of(BASE), version="after")).ok
    assert await adapted() == before
    assert engine.dead_error() is None
    assert reference(BASE).agrees(PROMPT, await ask(engine, GREEDY))

"""Names and values that never reach the engine; the rest is shown with the real class."""

from types import SimpleNamespace

import pytest

from rollout_pod.engine import grammars, params
from rollout_pod.engine.base import InvalidSamplingParams
from rollout_pod.engine.front_end import CALL
from rollout_pod.engine.openai.client import GatedClient


def refuse(raw, *, has_tokenizer=True):
    with pytest.raises(InvalidSamplingParams) as caught:
        params.build(raw, max_tokens=8, vocab_size=100, max_logprobs=4, has_tokenizer=has_tokenizer)
    return caught.value


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "_backend": "outlines"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"repetition_detection": {"max_pattern_size": 10**6}}, "repetition_detection"),
        ({"logits_processors": []}, "logits_processors"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": "all"}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        *(({name: 1}, name) for name in params.REFUSED),
        ({"detokenize": True}, "detokenize"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": float("inf")}, "top_p"),
        ({"seed": 2**64}, "seed"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"stop_token_ids": 12}, "stop_token_ids"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids"),
        ({"allowed_token_ids": [1, 100]}, "allowed_token_ids"),
        ({"logit_bias": {"100": 1.0}}, "logit_bias"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": {"1": float("inf")}}, "logit_bias"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
        ({"logit_bias": {"1": 1e308}}, "logit_bias"),
        ({"logit_bias": {"1": -(10**400)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 1e38}, "repetition_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_refused_by_name(raw, field):
    error = refuse(raw)
    assert error.field == field
    assert field in str(error)


def test_a_grammar_that_is_no_json():
    endless: list[object] = []
    endless.append(endless)
    assert refuse({"structured_outputs": {"json": {"enum": endless}}}).field == "structured_outputs"


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_the_second_model_runner_has_rows_of_a_fixed_size(name):
    ids = range(1500)
    value = dict.fromkeys(map(str, ids), 1.0) if name == "logit_bias" else list(ids)
    with pytest.raises(InvalidSamplingParams) as caught:
        params.build(
            {name: value},
            max_tokens=8,
            vocab_size=2000,
            max_logprobs=4,
            has_tokenizer=True,
            has_row_limits=True,
        )
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_text_needs_a_tokenizer(name):
    error = refuse({name: ["x"]}, has_tokenizer=False)
    assert error.field == name
    assert "stop_token_ids" in str(error)


@pytest.mark.parametrize(
    ("made", "field"),
    [
        ({"extra_args": {"a": 1}}, "vllm_xargs"),
        ({"extra_args": {"kv_transfer_params": {}}}, "kv_transfer_params"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"prompt_logprob_start": 0}, "prompt_logprob_start"),
        ({"prompt_logprob_token_ids": [[5]]}, "prompt_logprob_token_ids"),
        ({"trace_decode_token_ids": [5]}, "trace_decode_token_ids"),
        ({"watermarking": False}, "watermarking"),
        (
            {"repetition_detection": SimpleNamespace(max_pattern_size=10**6)},
            "repetition_detection",
        ),
    ],
)
def test_what_vllms_own_server_lets_pass(made, field):
    plain = dict.fromkeys(params.ALLOWED)
    params.check(SimpleNamespace(**plain), vocab_size=100, has_tokenizer=True)
    with pytest.raises(InvalidSamplingParams, match=field) as caught:
        params.check(SimpleNamespace(**plain | made), vocab_size=100, has_tokenizer=True)
    assert caught.value.field == field


HUGE = 10**30


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_detection": {"max_pattern_size": 4, "min_count": HUGE}},
        {"structured_outputs": {"json": {"type": "string", "default": HUGE}}},
        {"stop": ["\ud800"]},
        {"bad_words": ["\ud800"]},
        {"structured_outputs": {"regex": "\ud800"}},
    ],
)
def test_what_cannot_be_handed_to_the_engine_is_refused_by_name(values):
    """vLLM would notice after it has registered the request, and keep it."""
    with pytest.raises(InvalidSamplingParams, match="cannot be handed to the engine") as caught:
        params.build(values, max_tokens=4, vocab_size=100, max_logprobs=20, has_tokenizer=True)
    assert [caught.value.field] == list(values)


async def test_a_bad_grammar_of_vllms_own_server_is_the_callers_mistake():
    def verify(*_):
        raise ValueError("no such grammar")

    errors = []
    asked = SimpleNamespace(n=1, structured_outputs=SimpleNamespace(regex="("), verify=verify)
    config = SimpleNamespace(
        model_config=None, speculative_config=None, structured_outputs_config=None
    )
    llm = SimpleNamespace(vllm_config=config, renderer=SimpleNamespace(tokenizer=None))
    CALL.set(SimpleNamespace(new_choices=lambda _: 0, failed=errors.append))
    with pytest.raises(ValueError, match="no such grammar"):
        await anext(GatedClient(llm).generate({"prompt_token_ids": [1]}, asked, "r"))
    assert [type(error) for error in errors] == [InvalidSamplingParams]


@pytest.mark.parametrize(("chars", "seconds"), [(70_000, 9.0), (1, -1.0)])
async def test_a_grammar_of_vllms_own_server(monkeypatch, chars, seconds):
    verified, errors = [], []
    monkeypatch.setattr(grammars, "MAX_S", seconds)
    asked = SimpleNamespace(
        n=1,
        structured_outputs=SimpleNamespace(regex="a" * chars),
        verify=lambda *_: verified.append(chars),
    )
    config = SimpleNamespace(
        model_config=None, speculative_config=None, structured_outputs_config=None
    )
    llm = SimpleNamespace(vllm_config=config, renderer=SimpleNamespace(tokenizer=None))
    CALL.set(SimpleNamespace(new_choices=lambda _: 0, failed=errors.append))
    with pytest.raises(InvalidSamplingParams, match="of at most") as caught:
        await anext(GatedClient(llm).generate({"prompt_token_ids": [1]}, asked, "r"))
    assert caught.value.field == "structured_outputs"
    assert errors == [caught.value]
    assert verified == [1] * (chars == 1), "the size is checked before it is compiled"

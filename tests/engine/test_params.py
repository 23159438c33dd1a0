"""Sampling parameters, by vLLM's own class."""

import copy

import pytest

from rollout_pod.engine import params
from rollout_pod.engine.base import InvalidSamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def build(raw, **how):
    return params.build(
        raw,
        **({"max_tokens": 8, "vocab_size": 100, "max_logprobs": 4, "has_tokenizer": True} | how),
    )


def test_what_is_set_whatever_was_asked():
    from vllm.sampling_params import RequestOutputKind

    raw = {
        "temperature": 1,
        "max_tokens": 500,
        "n": 1,
        "best_of": None,
        "logprobs": True,
        "prompt_logprobs": None,
        "detokenize": False,
        "skip_special_tokens": False,
        "top_p": None,
        "logit_bias": {"3": 1},
        "stop_token_ids": [5, 6],
    }
    before = copy.deepcopy(raw)
    made = build(raw)
    assert raw == before
    assert made is not build(raw)
    assert (made.max_tokens, made.logprobs, made.detokenize) == (8, 1, False)
    assert made.output_kind is RequestOutputKind.FINAL_ONLY
    assert (made.temperature, made.top_p, made.n) == (1.0, 1.0, 1)
    assert made.logit_bias == {3: 1.0}
    assert made.stop_token_ids == [5, 6]
    made.stop_token_ids.append(7)
    assert raw == before


def test_text_is_made_only_for_stop_strings():
    assert build({"stop": "end"}).detokenize
    assert not build({"stop": []}).detokenize


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": [1]}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": "1"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": {"1": 2}}, "allowed_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
    ],
)
def test_refused_by_the_class_itself(raw, field):
    with pytest.raises(InvalidSamplingParams) as caught:
        build(raw)
    assert caught.value.field == field


def test_a_budget_that_is_none():
    with pytest.raises(InvalidSamplingParams) as caught:
        build({}, max_tokens=0)
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize(
    "raw",
    [
        {"logprobs": 1, "logprob_token_ids": [5, 6]},
        {"vllm_xargs": {"a": 1}},
        {"watermarking": False},
        {"repetition_detection": {"max_pattern_size": 10**6, "min_count": 2}},
    ],
)
def test_an_openai_request_is_refused_the_same(raw):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    field = list(raw)[-1]
    if field not in CompletionRequest.model_fields:
        assert field == "watermarking", "0.26 knows none"
        return
    asked = CompletionRequest(model="m", prompt=[1], max_tokens=4)
    params.check(asked.to_sampling_params(4, {}), vocab_size=100, has_tokenizer=True)
    asked = CompletionRequest(model="m", prompt=[1], max_tokens=4, **raw)
    with pytest.raises(InvalidSamplingParams) as caught:
        params.check(asked.to_sampling_params(4, {}), vocab_size=100, has_tokenizer=True)
    assert caught.value.field == field

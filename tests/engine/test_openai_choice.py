"""One sequence cut at every place: text, stop strings and log-probs as vLLM makes them uncut.

With vLLM's tokenizer and detokenizer, and no engine.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from rollout_pod.engine.openai.choice import Choice
from rollout_pod.protocol import WeightVersionSpan
from tests.support.engine_kit import checkpoint

pytestmark = pytest.mark.engine

TEXT = "w300 hé 😀 wörld € end"
PROMPT = [300, 301]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from vllm.tokenizers import get_tokenizer  # here, where the warnings of its import are ignored

    return get_tokenizer(str(checkpoint("dense", 0)))


def params_of(**more: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(max_tokens=100, logprobs=1, output_kind=RequestOutputKind.DELTA, **more)


def raw(tokens: list[int], reason: str | None = None, **more: Any) -> Any:
    """As the engine answers without a tokenizer: the sampled token, and another one."""
    from vllm.logprobs import Logprob

    positions = [{t: Logprob(-0.5, 1, None), 200: Logprob(-2.0, 2, None)} for t in tokens]
    completion = SimpleNamespace(
        token_ids=list(tokens), logprobs=positions, finish_reason=reason, stop_reason=None
    )
    given = {"num_cached_tokens": 0, "prompt_logprobs": None, **more}
    return SimpleNamespace(outputs=[completion], **given)


def span(version: str, count: int) -> WeightVersionSpan:
    return WeightVersionSpan(version=version, step=None, start=0, end=count)


def run(
    choice: Choice, tokens: list[int], at: int, *, sizes: int = 1, last: str = "length"
) -> tuple[str, list[int], list[Any]]:
    """Sample ``tokens`` in steps of ``sizes``, cut after ``at`` of them."""
    pieces = []
    for version, part, reason in (("a", tokens[:at], "abort"), ("b", tokens[at:], last)):
        prompt, params = choice.attempt()
        before = tokens[:at] if version == "b" else []
        assert prompt["prompt_token_ids"] == [*PROMPT, *before]
        assert params.max_tokens == 100 - len(before)
        assert (params.detokenize, params.stop) == (False, [])
        steps = [part[i : i + sizes] for i in range(0, len(part), sizes)]
        taken = 0
        for i, step in enumerate(steps):
            ends = reason if version == "b" and i == len(steps) - 1 else None
            taken += len(step)
            pieces.append(choice.take(raw(step, ends)))
            if choice.is_complete:
                break
        else:
            pieces.append(choice.take(raw([], reason)))
        choice.cut([span(version, taken)], goes_on=version == "a")
        if choice.is_complete:
            break
    pieces.append(choice.finish())
    given = [piece for piece in pieces if piece is not None]
    return (
        "".join(piece.text for piece in given),
        [t for piece in given for t in piece.token_ids],
        [position for piece in given for position in piece.log_probs or ()],
    )


def expected_texts(tokenizer: Any, tokens: list[int]) -> list[tuple[str, ...]]:
    import numpy as np
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    processor = LogprobsProcessor(
        tokenizer=tokenizer, logprobs=[], prompt_logprobs=None, cumulative_logprob=0.0,
        num_logprobs=1, num_prompt_logprobs=None,
    )  # fmt: skip
    for token in tokens:
        lists = LogprobsLists(np.array([[token, 200]]), np.array([[-0.5, -2.0]]), np.array([1]))
        processor._update_sample_logprobs(lists)
    return [tuple(str(p.decoded_token) for p in each.values()) for each in processor.logprobs]


@pytest.mark.parametrize("sizes", [1, 3])
def test_text_and_log_probs_wherever_it_is_cut(tokenizer: Any, sizes: int) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(tokens) > 20
    expected = expected_texts(tokenizer, tokens)
    for at in range(len(tokens)):
        choice = Choice(
            params=params_of(), prompt={"prompt_token_ids": PROMPT}, tokenizer=tokenizer
        )
        text, ids, log_probs = run(choice, tokens, at, sizes=sizes)
        assert (text, ids) == (TEXT, tokens), at
        assert [tuple(p.decoded_token for p in each.values()) for each in log_probs] == expected
        assert choice.finish_reason == "length"
        assert [(s.version, s.start, s.end) for s in choice.spans] == [
            (v, a, b) for v, a, b in (("a", 0, at), ("b", at, len(tokens))) if b > a
        ]


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_wherever_it_is_cut(tokenizer: Any, included: bool) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    stop = "😀 wö"
    text_before, _, _ = TEXT.partition(stop)
    for at in range(len(tokens)):
        for sizes in (1, 4):
            params = params_of(stop=[stop], include_stop_str_in_output=included)
            choice = Choice(params=params, prompt={"prompt_token_ids": PROMPT}, tokenizer=tokenizer)
            text, ids, log_probs = run(choice, tokens, at, sizes=sizes)
            assert text == text_before + (stop if included else "")
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
            assert ids == tokens[: len(ids)] and len(ids) < len(tokens)
            assert len(log_probs) == len(ids) == choice.spans[-1].end


def test_what_ends_it_is_not_its_text(tokenizer: Any) -> None:
    tokens = [*tokenizer.encode("hé", add_special_tokens=False), 2]
    choice = Choice(params=params_of(), prompt={"prompt_token_ids": PROMPT}, tokenizer=tokenizer)
    text, ids, _ = run(choice, tokens, 2, last="stop")
    assert (text, ids, choice.finish_reason) == ("hé", tokens, "stop")


def test_budgets_over_all_attempts(tokenizer: Any) -> None:
    params = params_of(min_tokens=10, seed=7)
    choice = Choice(params=params, prompt={"prompt_token_ids": PROMPT}, tokenizer=tokenizer)
    choice.take(raw([300] * 6))
    choice.cut([span("a", 6)], goes_on=True)
    _, again = choice.attempt()
    assert (again.max_tokens, again.min_tokens) == (94, 4)
    assert again.seed != 7
    choice.take(raw([300] * 94))
    choice.cut([span("a", 94)], goes_on=True)
    assert choice.finish_reason == "length"  # cut when nothing was left to do


def test_no_token_is_withheld(tokenizer: Any) -> None:
    params = params_of()
    params.stream_interval = 1000
    choice = Choice(params=params, prompt={"prompt_token_ids": PROMPT}, tokenizer=tokenizer)
    assert getattr(choice.attempt()[1], "stream_interval", None) is None


def test_a_grammar_starts_anew_and_is_answered_whole(tokenizer: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    params = params_of(structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
    choice = Choice(params=params, prompt={"prompt_token_ids": PROMPT}, tokenizer=tokenizer)
    lost = tokenizer.encode("lost", add_special_tokens=False)
    kept = tokenizer.encode("kept", add_special_tokens=False)
    assert choice.take(raw(lost)) is None
    choice.cut([span("a", len(lost))], goes_on=True)
    prompt, again = choice.attempt()
    assert (prompt["prompt_token_ids"], again.max_tokens) == (PROMPT, 100)
    assert choice.take(raw(kept, "stop")) is None
    choice.cut([span("b", len(kept))], goes_on=False)
    piece = choice.finish()
    assert piece.token_ids == kept
    assert [(s.version, s.end) for s in choice.spans] == [("b", len(kept))]


def test_log_probs_of_the_prompt_come_once(tokenizer: Any) -> None:
    from vllm.logprobs import Logprob

    params = params_of(prompt_logprobs=0)
    choice = Choice(params=params, prompt={"prompt_token_ids": PROMPT}, tokenizer=tokenizer)
    choice.take(raw([], "abort"))
    choice.cut([], goes_on=True)
    assert choice.attempt()[1].prompt_logprobs == 0
    positions = [None, {301: Logprob(-1.0, 1, None)}]
    choice.take(raw([300], prompt_logprobs=positions))
    choice.cut([span("a", 1)], goes_on=True)
    assert choice.attempt()[1].prompt_logprobs is None
    assert choice.prompt_log_probs[1][301].decoded_token == "w301"

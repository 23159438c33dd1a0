"""Sampling parameters of a request, checked before they reach the engine.

The engine trusts what its own front end hands it: a wrong type or a token id outside the
vocabulary ends the engine's process. So everything is checked here, by vLLM's class and by ours.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from rollout_pod.engine import grammars, limits
from rollout_pod.engine.base import InvalidSamplingParams

ALLOWED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "logprobs",
        "prompt_logprobs",
        "structured_outputs",
        "repetition_detection",
        "thinking_token_budget",
        "routed_experts_prompt_start",
    }
)
"""Passed on to vLLM."""

_SET_HERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "max_tokens": ((), ""),
    "n": ((None, 1), "one sequence a request; send the request n times"),
    "best_of": ((None, 1), "one sequence a request"),
    "detokenize": ((None, False), "answers carry token ids, no text"),
    "skip_special_tokens": ((None, False, True), ""),
    "spaces_between_special_tokens": ((None, False, True), ""),
}
"""Names that other servers' clients send: the values that change nothing, and why no others."""

REFUSED: Mapping[str, str] = {
    "extra_args": "plugins inside the engine read it, which check nothing",
    "flat_logprobs": "a form of vLLM's own outputs; set by the pod",
    "logprob_token_ids": "in a batch it changes what other requests get; use logprobs",
    "output_kind": "set by the pod; use stream",
    "output_text_buffer_length": "vLLM sets it",
    "prompt_logprob_start": "use prompt_logprobs",
    "prompt_logprob_token_ids": "use prompt_logprobs",
    "skip_clone": "set by the pod",
    "skip_reading_prefix_cache": "vLLM sets it; use cache_salt for a cache of one's own",
    "stream_interval": "tokens are streamed as they come",
    "trace_decode_token_ids": "it replaces sampling, for debugging",
    "watermarking": "it changes the distribution that is sampled; the engine's arguments set it "
    "(use_beam_search, which is not supported either, comes here as this)",
}
"""What else vLLM's class has, and why not."""

SET_HERE = frozenset(_SET_HERE)

_REFUSED_AFTERWARDS: Mapping[str, str] = {
    "extra_args": "vllm_xargs",
    "logprob_token_ids": "logprob_token_ids",
    "prompt_logprob_start": "prompt_logprob_start",
    "prompt_logprob_token_ids": "prompt_logprob_token_ids",
    "trace_decode_token_ids": "trace_decode_token_ids",
    "watermarking": "watermarking",
}
"""Of ``REFUSED``, what vLLM's own server lets pass, by its clients' names; the rest is set by the
pod or by vLLM."""
_IN_EXTRA_ARGS = ("kv_transfer_params", "ec_transfer_params")
"""Fields of their own for the clients of vLLM's server."""

_MAX_BAD_WORD_TOKENS = 1024


def build(
    raw: Mapping[str, Any],
    *,
    max_tokens: int,
    vocab_size: int,
    max_logprobs: int,
    has_tokenizer: bool,
    has_row_limits: bool = False,
    verify: Callable[[Any], None] = lambda params: None,
) -> object:
    """Make vLLM's ``SamplingParams`` for one request.

    ``logprobs: k`` asks for the k most likely tokens at each position, beside the sampled one,
    whose log-prob is always returned; True is 1. ``has_row_limits``: vLLM's second model runner
    runs. ``verify`` checks the result against the model.

    Raises:
        InvalidSamplingParams: names the field.
    """
    values = _select(raw)
    limits.check_values(values, vocab_size=vocab_size, has_tokenizer=has_tokenizer)
    limits.check_sizes(values, has_row_limits=has_row_limits)
    grammars.check(values.get("structured_outputs"))
    values["logprobs"] = _top_of("logprobs", values.get("logprobs"), max_logprobs)
    if values.get("prompt_logprobs") is False:
        del values["prompt_logprobs"]
    if "prompt_logprobs" in values:
        asked = values["prompt_logprobs"]
        values["prompt_logprobs"] = _top_of("prompt_logprobs", asked, max_logprobs)

    import msgspec
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    values["max_tokens"] = max_tokens
    values["detokenize"] = bool(values.get("stop"))
    values["flat_logprobs"] = True  # lists instead of two objects a token
    try:
        # convert, since the class' own constructor checks no types
        params = msgspec.convert(values, SamplingParams, str_keys=True)
        with grammars.timed(params):
            verify(params)
    except InvalidSamplingParams:
        raise
    except Exception as error:  # whatever its checks raise is about these values
        raise InvalidSamplingParams(_field_of(error, values), str(error)) from error
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.skip_clone = True  # made of the caller's values, and for this request alone
    return params


def check_bad_words(params: Any, tokenizer: Any) -> None:
    """Check what vLLM's class does not of ``bad_words``: their tokens, all in all.

    Raises:
        InvalidSamplingParams: names the field.
    """
    if not params.bad_words or tokenizer is None:
        return
    probe = params.clone()
    probe.update_from_tokenizer(tokenizer)
    count = sum(len(word) for word in probe.bad_words_token_ids or ())
    if count > _MAX_BAD_WORD_TOKENS:
        raise InvalidSamplingParams(
            "bad_words", f"bad_words have {count} tokens, of at most {_MAX_BAD_WORD_TOKENS}"
        )


def check_thinking(params: Any, config: Any) -> None:
    """Check what vLLM would when the request is queued.

    Raises:
        InvalidSamplingParams: names the field.
    """
    reasoning = config.reasoning_config
    if params.thinking_token_budget is not None and not (reasoning and reasoning.enabled):
        raise InvalidSamplingParams(
            "thinking_token_budget",
            "thinking_token_budget needs an engine that was started with --reasoning-parser",
        )


def check(
    params: Any, *, vocab_size: int, has_tokenizer: bool, has_row_limits: bool = False
) -> None:
    """Check what vLLM's own server made of a request, as far as its class does not.

    Raises:
        InvalidSamplingParams: names the field, as the server's client knows it.
    """
    for attribute, name in _REFUSED_AFTERWARDS.items():
        value = getattr(params, attribute, None)
        if value is not None:
            if attribute == "extra_args":
                name = next((own for own in _IN_EXTRA_ARGS if own in value), name)
            raise InvalidSamplingParams(name, f"{name}: not supported: {REFUSED[attribute]}")
    values = {name: getattr(params, name) for name in ALLOWED}
    given = {name: value for name, value in values.items() if value is not None}
    limits.check_values(given, vocab_size=vocab_size, has_tokenizer=has_tokenizer)
    limits.check_sizes(given, has_row_limits=has_row_limits)


def for_output(params: Any, *, streams: bool, stops_here: bool = False) -> tuple[Any, int]:
    """The parameters for a request that streams or does not, and how many top log-probs it has.

    ``stops_here``: the pod looks for the stop strings, and vLLM does not.
    """
    if streams or stops_here:
        from vllm.sampling_params import RequestOutputKind

        params = params.clone()  # the caller's own may serve another attempt
        params.output_kind = RequestOutputKind.DELTA
    if stops_here:
        params.stop, params.detokenize, params.output_text_buffer_length = [], False, 0
    return params, params.logprobs or 0


def _top_of(name: str, wanted: Any, max_logprobs: int) -> int:
    if isinstance(wanted, bool) or wanted is None:
        return int(bool(wanted))
    if not isinstance(wanted, int) or wanted < 0 or 0 <= max_logprobs < wanted:
        raise InvalidSamplingParams(
            name,
            f"{name} must be an integer from 0 to {max_logprobs} (--max-logprobs), got {wanted!r}",
        )
    return wanted


def _select(raw: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in raw.items():
        if name in _SET_HERE:
            harmless, why = _SET_HERE[name]
            if harmless and not any(value is h or value == h for h in harmless):
                raise InvalidSamplingParams(name, f"{name}={value!r}: {why}")
        elif name in REFUSED:
            raise InvalidSamplingParams(name, f"{name}: not supported: {REFUSED[name]}")
        elif name not in ALLOWED:
            raise InvalidSamplingParams(name, f"{name}: unknown or not supported; {_known()}")
        elif value is not None:
            values[name] = value
    return values


def _known() -> str:
    return f"allowed are {', '.join(sorted(ALLOWED | {'max_tokens'}))}"


def _field_of(error: Exception, values: Mapping[str, Any]) -> str | None:
    """The field that an error of vLLM or msgspec is about."""
    named = getattr(error, "parameter", None) or getattr(error.__cause__, "parameter", None)
    if isinstance(named, str):
        return named
    text = str(error)
    path = text.rpartition("`$.")[2] if "`$." in text else ""
    candidate = path.rstrip("`").split("[")[0].split(".")[0]
    if candidate in values:
        return candidate
    found = re.search(rf"\b({'|'.join(map(re.escape, values))})\b", text)
    if found is None and "structured_outputs" in values:
        return "structured_outputs"  # compilers name the part of a grammar
    return found[1] if found else None

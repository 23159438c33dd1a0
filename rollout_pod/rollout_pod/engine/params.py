"""Sampling parameters of a request, checked before they reach the engine.

The engine trusts what its own front end hands it: a wrong type or a token id outside the
vocabulary ends the engine's process. So everything is checked here, by vLLM's class and by ours.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
    }
)
"""Passed on to vLLM."""

_SET_HERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "max_tokens": ((), ""),
    "n": ((None, 1), "one sequence a request; send the request n times"),
    "best_of": ((None, 1), "one sequence a request"),
    "prompt_logprobs": ((None, False), "log-probs of the prompt are not supported"),
    "detokenize": ((None, False), "answers carry token ids, no text"),
    "skip_special_tokens": ((None, False, True), ""),
    "spaces_between_special_tokens": ((None, False, True), ""),
}
"""Names that other servers' clients send: the values that change nothing, and why no others."""

_NEED_TOKENIZER = ("stop", "bad_words")
_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids", "logit_bias")
_INT64 = range(-(1 << 63), 1 << 63)
_MAX_BIAS = 1e9
_REPETITION_PENALTIES = (1e-4, 1e4)
"""With these a logit stays finite in float32 whatever the temperature (vLLM's least is 0.01)."""


def build(
    raw: Mapping[str, Any],
    *,
    max_tokens: int,
    vocab_size: int,
    max_logprobs: int,
    has_tokenizer: bool,
    verify: Callable[[Any], None] = lambda params: None,
) -> object:
    """Make vLLM's ``SamplingParams`` for one request.

    ``logprobs: k`` asks for the k most likely tokens at each position, beside the sampled one,
    whose log-prob is always returned; True is 1. ``verify`` checks the result against the model.

    Raises:
        InvalidSamplingParams: names the field.
    """
    values = _select(raw)
    _check_values(values, vocab_size=vocab_size, has_tokenizer=has_tokenizer)
    values["logprobs"] = _top_of(values.get("logprobs"), max_logprobs)

    import msgspec
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    values["max_tokens"] = max_tokens
    values["detokenize"] = bool(values.get("stop"))
    values["flat_logprobs"] = True  # lists instead of two objects a token
    try:
        # convert, since the class' own constructor checks no types
        params = msgspec.convert(values, SamplingParams, str_keys=True)
        verify(params)
    except Exception as error:  # whatever its checks raise is about these values
        raise InvalidSamplingParams(_field_of(error, values), str(error)) from error
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def check(params: Any, *, vocab_size: int, has_tokenizer: bool) -> None:
    """Check what vLLM's own server made of a request, as far as its class does not.

    Raises:
        InvalidSamplingParams: names the field.
    """
    values = {name: getattr(params, name) for name in ALLOWED}
    given = {name: value for name, value in values.items() if value is not None}
    _check_values(given, vocab_size=vocab_size, has_tokenizer=has_tokenizer)


def for_output(params: Any, *, streams: bool) -> tuple[Any, int]:
    """The parameters for a request that streams or does not, and how many top log-probs it has."""
    if streams:
        from vllm.sampling_params import RequestOutputKind

        params = params.clone()  # the caller's own may serve another attempt
        params.output_kind = RequestOutputKind.DELTA
    return params, params.logprobs or 0


def _top_of(wanted: Any, max_logprobs: int) -> int:
    if isinstance(wanted, bool) or wanted is None:
        return int(bool(wanted))
    if not isinstance(wanted, int) or wanted < 0 or 0 <= max_logprobs < wanted:
        raise InvalidSamplingParams(
            "logprobs",
            f"logprobs must be an integer from 0 to {max_logprobs} (--max-logprobs), "
            f"got {wanted!r}",
        )
    return wanted


def _select(raw: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in raw.items():
        if name in _SET_HERE:
            harmless, why = _SET_HERE[name]
            if harmless and not any(value is h or value == h for h in harmless):
                raise InvalidSamplingParams(name, f"{name}={value!r}: {why}")
        elif name not in ALLOWED:
            raise InvalidSamplingParams(name, f"{name}: unknown or not supported; {_known()}")
        elif value is not None:
            values[name] = value
    return values


def _known() -> str:
    return f"allowed are {', '.join(sorted(ALLOWED | {'max_tokens'}))}"


def _check_values(values: dict[str, Any], *, vocab_size: int, has_tokenizer: bool) -> None:
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidSamplingParams(name, f"{name} must be finite, got {value}")
        if isinstance(value, int) and value not in _INT64:
            raise InvalidSamplingParams(name, f"{name} must fit 64 bits, got {value}")
    for name in _NEED_TOKENIZER:
        if values.get(name) and not has_tokenizer:
            raise InvalidSamplingParams(
                name,
                f"{name} needs a tokenizer, and the engine runs with --skip-tokenizer-init;"
                " use stop_token_ids",
            )
    for name in _TOKEN_IDS:
        if name in values:
            _check_token_ids(name, values[name], vocab_size)
    if "allowed_token_ids" in values and not values["allowed_token_ids"]:
        raise InvalidSamplingParams(
            "allowed_token_ids", "allowed_token_ids must not be empty; leave it out to allow all"
        )
    for bias in _numbers_of(values.get("logit_bias")):
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:  # also NaN
            raise InvalidSamplingParams(
                "logit_bias",
                f"logit_bias must be in [-{_MAX_BIAS:g}, {_MAX_BIAS:g}], got {str(bias)[:40]}",
            )
    penalty = values.get("repetition_penalty")
    least, most = _REPETITION_PENALTIES
    if isinstance(penalty, int | float) and not least <= penalty <= most:
        raise InvalidSamplingParams(
            "repetition_penalty",
            f"repetition_penalty must be in [{least:g}, {most:g}], got {penalty:g}",
        )


def _check_token_ids(name: str, ids: Any, vocab_size: int) -> None:
    if not isinstance(ids, Iterable) or isinstance(ids, str):
        raise InvalidSamplingParams(name, f"{name} must hold token ids, got {ids!r}")
    for token in ids:
        try:
            outside = isinstance(token, bool | float) or not 0 <= int(token) < vocab_size
        except (TypeError, ValueError):
            outside = True
        if outside:
            raise InvalidSamplingParams(
                name, f"{name}: {token!r} is no token id of this model (0 to {vocab_size - 1})"
            )


def _numbers_of(bias: Any) -> list[float]:
    values = bias.values() if isinstance(bias, dict) else ()
    return [value for value in values if isinstance(value, int | float)]


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
    return found[1] if found else None

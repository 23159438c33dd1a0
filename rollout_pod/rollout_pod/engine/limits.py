"""Values of sampling parameters that vLLM's class takes, and that its engine dies of."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollout_pod.engine.base import InvalidSamplingParams

_V2_LIMITS = {"logit_bias": 1024, "allowed_token_ids": 1024, "stop_token_ids": 100}
"""vLLM's second model runner has rows of a fixed size, and dies of more."""
_MAX_REPETITION_PATTERN = 1024

_NEED_TOKENIZER = ("stop", "bad_words", "structured_outputs")
_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids", "logit_bias")
_INT64 = range(-(1 << 63), 1 << 63)
_MAX_BIAS = 1e9
_REPETITION_PENALTIES = (1e-4, 1e4)
"""With these a logit stays finite in float32 whatever the temperature (vLLM's least is 0.01)."""


def check_values(values: Mapping[str, Any], *, vocab_size: int, has_tokenizer: bool) -> None:
    """Check numbers, token ids, and what needs a tokenizer.

    Raises:
        InvalidSamplingParams: names the field.
    """
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidSamplingParams(name, f"{name} must be finite, got {value}")
        if isinstance(value, int) and value not in _INT64:
            raise InvalidSamplingParams(name, f"{name} must fit 64 bits, got {value}")
        if not isinstance(value, int | float):
            _check_encodable(name, value)
    for name in _NEED_TOKENIZER:
        if values.get(name) and not has_tokenizer:
            raise InvalidSamplingParams(
                name,
                f"{name} needs a tokenizer, and the engine runs with --skip-tokenizer-init"
                + ("; use stop_token_ids" if name != "structured_outputs" else ""),
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


def _check_encodable(name: str, value: Any) -> None:
    """Else vLLM finds out when it hands the request to its engine, and keeps it for ever."""
    try:
        msgspec.msgpack.encode(value, enc_hook=lambda _: None)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidSamplingParams(
            name, f"{name} holds what cannot be handed to the engine: {error}"
        ) from error


def check_sizes(values: Mapping[str, Any], *, has_row_limits: bool) -> None:
    """Check how much there is of a value.

    Raises:
        InvalidSamplingParams: names the field.
    """
    for name, most in _V2_LIMITS.items() if has_row_limits else ():
        if name in values and len(values[name]) > most:
            raise InvalidSamplingParams(
                name, f"{name} holds {len(values[name])} tokens, of at most {most}"
            )
    pattern = values.get("repetition_detection")
    if isinstance(pattern, dict):
        size = pattern.get("max_pattern_size")
    else:  # vLLM's own class
        size = getattr(pattern, "max_pattern_size", None)
    if isinstance(size, int) and size > _MAX_REPETITION_PATTERN:  # looked for at every token
        raise InvalidSamplingParams(
            "repetition_detection",
            f"repetition_detection.max_pattern_size is at most {_MAX_REPETITION_PATTERN}",
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

"""Prompts in the shapes that tokenizers and trainers have them: pure.

Takes what verl's ``normalize_token_ids`` takes, of which nothing is imported: arrays and tensors
are known by ``tolist``, tokenizer output by ``input_ids``.
"""

import math
import operator
from collections.abc import Mapping
from typing import Any


def normalize_token_ids(prompt: Any) -> list[int]:
    """Return a prompt as a new flat list of token ids.

    Args:
        prompt: A sequence of integers, an array or tensor of one dimension, a mapping or object
            with ``input_ids`` (``BatchEncoding``), or one of these with one row around it.

    Raises:
        ValueError: it is none of these, is empty, or holds several prompts.
    """
    ids = prompt
    if isinstance(ids, Mapping):
        if "input_ids" not in ids:
            raise ValueError(f"prompt_ids: a mapping without input_ids (it has {list(ids)[:8]})")
        ids = ids["input_ids"]
    elif hasattr(ids, "input_ids"):
        ids = ids.input_ids
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, str | bytes):
        raise ValueError("prompt_ids: text; give token ids, such as tokenizer(text).input_ids")
    try:
        ids = list(ids)
    except TypeError:
        raise ValueError(f"prompt_ids: {type(prompt).__name__} is no list of token ids") from None
    if ids and _is_row(ids[0]):
        if len(ids) != 1:
            raise ValueError(
                f"prompt_ids: {len(ids)} prompts; ask for one at a time, or use generate_batch"
            )
        row = ids[0]
        ids = list(row.tolist() if hasattr(row, "tolist") else row)
    if not ids:
        raise ValueError("prompt_ids: empty; a rollout needs one token at least")
    return [_token(position, value) for position, value in enumerate(ids)]


def _is_row(value: Any) -> bool:
    """An array of one element is a token, as verl has it."""
    if isinstance(value, list | tuple):
        return True
    return math.prod(getattr(value, "shape", ())) != 1


def _token(position: int, value: Any) -> int:
    try:
        if _is_row(value):
            raise TypeError
        found = value.item() if hasattr(value, "item") else value
        if isinstance(found, bool):
            raise TypeError
        return operator.index(found)
    except TypeError:
        raise ValueError(f"prompt_ids.{position}: {value!r} is no token id") from None

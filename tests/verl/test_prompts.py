"""``normalize_token_ids`` of the client beside verl's own: the same prompt of whatever either takes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding
from verl.utils import normalize_token_ids as verls

from rollout_client import normalize_token_ids as ours

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12)
BYTES = st.lists(st.integers(0, 127), min_size=1, max_size=12)

Form = Callable[[list[int]], Any]

FLAT: dict[str, Form] = {
    "list": list,
    "tuple": tuple,
    "numpy int64": np.array,
    "numpy int32": lambda ids: np.array(ids, dtype=np.int32),
    "numpy uint32": lambda ids: np.array(ids, dtype=np.uint32),
    "numpy, every second of twice as many": lambda ids: np.repeat(ids, 2)[::2],
    "numpy scalars": lambda ids: [np.int64(i) for i in ids],
    "torch int64": torch.tensor,
    "torch int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "torch, not contiguous": lambda ids: torch.tensor([ids, ids]).T[:, 0],
    "torch scalars": lambda ids: list(torch.tensor(ids)),
    "scalars of one element": lambda ids: tuple(np.array(ids).reshape(-1)),
}
ROWS: dict[str, Form] = {
    "a list in a list": lambda ids: [list(ids)],
    "a tuple in a list": lambda ids: [tuple(ids)],
    "a list in a tuple": lambda ids: (list(ids),),
    "numpy of one row": lambda ids: np.array([ids]),
    "torch of one row": lambda ids: torch.tensor([ids]),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda prompt: prompt,
    "BatchEncoding": lambda prompt: BatchEncoding({"input_ids": prompt, "attention_mask": [[1]]}),
    "dict": lambda prompt: {"attention_mask": None, "input_ids": prompt},
    "object": lambda prompt: SimpleNamespace(input_ids=prompt),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("form", FLAT | ROWS)
@settings(max_examples=25, deadline=None)
@given(ids=IDS)
def test_every_form_of_a_prompt_is_the_same_to_both(form: str, around: str, ids: list[int]) -> None:
    prompt = AROUND[around]((FLAT | ROWS)[form](ids))
    found = ours(prompt)
    assert found == verls(prompt) == ids
    assert {type(token) for token in found} == {int}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
@given(ids=BYTES)
def test_every_type_of_integer(dtype: str, ids: list[int]) -> None:
    array = np.array(ids, dtype=dtype)
    for prompt in (array, array[None], torch.from_numpy(array), torch.from_numpy(array)[None]):
        assert ours(prompt) == verls(prompt) == ids


def test_what_a_tokenizer_says() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(
        WordLevel({"[UNK]": 0, "sort": 1, "these": 2, "digits": 3}, unk_token="[UNK]")
    )
    model.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    text = "sort these digits please"
    chat = [{"role": "user", "content": text}]
    told = [
        tokenizer(text),
        tokenizer([text]),
        tokenizer(text, return_tensors="np"),
        tokenizer(text, return_tensors="pt"),
        tokenizer.encode(text),
        tokenizer.apply_chat_template(chat, tokenize=True),
        tokenizer.apply_chat_template(chat, tokenize=True, return_tensors="pt"),
        tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True),
    ]
    for prompt in told:
        assert ours(prompt) == verls(prompt) == [1, 2, 3, 0], prompt


LEAVES = (
    st.integers(-5, 300) | st.booleans() | st.floats(allow_nan=False, allow_infinity=False, width=16)
    | st.sampled_from(["7", "x", b"8", None, np.int64(4), np.float32(2.5), torch.tensor(3)])
)  # fmt: skip
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(st.integers(0, 99), max_size=4).map(np.array)
        | st.lists(st.integers(0, 99), max_size=4).map(torch.tensor)
        | st.builds(lambda value: {"input_ids": value}, inner)
        | st.builds(lambda value: SimpleNamespace(input_ids=value), inner)
    ),
    max_leaves=8,
)


def tried(normalize: Callable[[Any], list[int]], prompt: Any) -> list[int] | None:
    """None where it is refused, and as its contract says."""
    refusal = (
        ValueError if normalize is ours else (TypeError, ValueError, OverflowError, RuntimeError)
    )
    try:
        return normalize(prompt)
    except refusal:
        return None


@settings(max_examples=2000, deadline=None)
@given(prompt=ANYTHING)
def test_neither_takes_anything_for_another_prompt(prompt: Any) -> None:
    """Ours refuses more (nothing at all, and what is no integer), and never reads another prompt."""
    mine, theirs = tried(ours, prompt), tried(verls, prompt)
    if mine is not None and theirs is not None:
        assert mine == theirs
    if mine is None and theirs:
        assert not all_integers(prompt), f"verl takes {prompt!r} for {theirs}"


def all_integers(prompt: Any) -> bool:
    """Whether each leaf is an integer, by its own type."""
    if isinstance(prompt, dict):
        prompt = prompt["input_ids"]
    elif hasattr(prompt, "input_ids"):
        prompt = prompt.input_ids
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, list | tuple):
        return all(all_integers(leaf) for leaf in prompt)
    return isinstance(prompt, int) and not isinstance(prompt, bool)

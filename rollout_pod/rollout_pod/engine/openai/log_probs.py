"""The words beside log-probs, where the engine was asked for token ids only."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

_CONTEXT = 4
"""Tokens; no character of UTF-8 has more bytes."""
_BROKEN = "\ufffd"


class TokenTexts:
    """Fills ``decoded_token`` as vLLM does: with the tokens before as context, where a token is
    only a part of a character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of_prompt(self, positions: Any) -> Any:
        """Fill and return the log-probs of a prompt; None where there are none."""
        if positions is None:
            return None
        before: list[int] = []
        for position in positions:
            if position:
                self._fill_one(position, before)
                before.append(next(iter(position)))
        return list(positions)

    def fill(self, positions: Sequence[Any], before: Sequence[int]) -> None:
        """Fill those of generated tokens, which come after the tokens ``before``."""
        context = list(before[-_CONTEXT:])
        for position in positions:
            self._fill_one(position, context)
            context.append(next(iter(position)))  # vLLM puts the sampled token first

    def _fill_one(self, position: Any, context: list[int]) -> None:
        if self._tokenizer is None:
            return
        from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

        ids = list(position)
        texts = convert_ids_list_to_tokens(self._tokenizer, ids)
        for token, text in zip(ids, texts, strict=True):
            if text.endswith(_BROKEN):
                text = self._of_part(token, context[-_CONTEXT:])
            position[token].decoded_token = text

    def _of_part(self, token: int, context: list[int]) -> str:
        """The text that a part of a character completes; empty where it completes none."""
        decode = self._tokenizer.decode
        for count in range(1, len(context) + 1):
            before = context[-count:]
            whole = decode([*before, token])
            if whole.endswith(_BROKEN):
                continue
            while before and decode(before[-1:]).endswith(_BROKEN):
                before.pop()  # another part of the same character: answered as empty before
            prefix = decode(before) if before else ""
            known = takewhile(lambda pair: pair[0] == pair[1], zip(prefix, whole, strict=False))
            return str(whole[len(list(known)) :])
        return ""

"""Stop strings that begin before a cut and end after it.

vLLM looks for them in what it generates itself. Where earlier output came back as prompt, the pod
looks for them, with vLLM's own detokenizer, in both.
"""

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

_TOKENS = 4096
"""Of earlier output that are looked at: enough for any stop string."""


class SeamStop:
    """Looks for the stop strings of one request.

    Args:
        params: vLLM's, with ``stop``, for the rest of the rollout.
        before: The prompt and all that was generated.
        num_generated: How many of them, at the end, were.
        tokenizer: vLLM's.
    """

    def __init__(
        self, params: Any, *, before: Sequence[int], num_generated: int, tokenizer: Any
    ) -> None:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        seen = min(num_generated, _TOKENS)
        request = SimpleNamespace(
            request_id="",
            prompt_token_ids=list(before[: len(before) - seen]),
            prompt_embeds=None,
            sampling_params=params,
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        # what earlier attempts generated did not stop them
        self._detokenizer.min_tokens = sys.maxsize
        self._detokenizer.update(list(before[len(before) - seen :]), False)
        self._detokenizer.min_tokens = params.min_tokens and params.min_tokens + seen

    def take(self, token_ids: Sequence[int], *, is_stop: bool) -> tuple[int, str | None]:
        """Take new tokens, the last of which is one that stops (EOS) if ``is_stop``. Returns how
        many of them are the answer's, and the string that stopped it.
        """
        before = self._detokenizer.num_output_tokens()
        stop = self._detokenizer.update(list(token_ids), is_stop)
        if stop is None:
            return len(token_ids), None
        return max(1, self._detokenizer.num_output_tokens() - before), stop

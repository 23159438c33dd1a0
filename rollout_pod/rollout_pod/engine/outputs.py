"""What vLLM says of a request, in the words of the Engine Protocol."""

import math
from collections.abc import Callable
from typing import Any

from rollout_pod.engine.base import EngineDelta, EngineInternalError, EngineOutput, TopLogProb

NON_FINITE = "non-finite log-prob"
"""The stop reason of an output that was cut, beside the finish reason ``error``."""

Read = Callable[[Any], tuple[EngineDelta, bool]]


class Transcript:
    """The tokens of one request, up to the first one whose log-prob is NaN or infinite.

    Such a token was sampled from no distribution, and JSON cannot carry its log-prob. It and all
    that come after it are left out, and the output ends in ``error``.

    Args:
        top: How many of the most likely tokens were asked for, beside the sampled one.
        read: Instead: gives the tokens of an output, and whether it is cut after them.
    """

    def __init__(self, *, top: int = 0, read: Read | None = None) -> None:
        self._read = read or (lambda output: _delta_of(output.outputs[0], top=top))
        self._deltas: list[EngineDelta] = []
        self._final: Any = None
        self.is_cut = False

    def add(self, output: Any) -> EngineDelta:
        """Take vLLM's output, a final one or one of a stream, and return what is new in it.

        Raises:
            EngineInternalError: not every token has its log-prob.
        """
        self._final = output
        if self.is_cut or not output.outputs:
            return EngineDelta((), ())
        delta, self.is_cut = self._read(output)
        self._deltas.append(delta)
        return delta

    def output(self) -> EngineOutput:
        """Put all together.

        Raises:
            EngineInternalError: the last output was not a final one.
        """
        final = self._final
        if final is None or not final.finished or not final.outputs:
            raise EngineInternalError("the engine ended the request without a final output")
        choice = final.outputs[0]
        tops = [delta.top_log_probs for delta in self._deltas if delta.top_log_probs is not None]
        return EngineOutput(
            token_ids=tuple(token for delta in self._deltas for token in delta.token_ids),
            log_probs=tuple(value for delta in self._deltas for value in delta.log_probs),
            finish_reason="error" if self.is_cut else choice.finish_reason or "error",
            stop_reason=NON_FINITE if self.is_cut else choice.stop_reason,
            num_cached_tokens=final.num_cached_tokens or 0,
            top_log_probs=tuple(position for top in tops for position in top) if tops else None,
        )


def is_refusal(error: Exception) -> bool:
    """Whether vLLM's checks refused a request; it wraps what it does not expect of them."""
    from vllm import exceptions

    refusals = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
    return isinstance(error, refusals) or isinstance(error.__cause__, refusals)


def _delta_of(choice: Any, *, top: int) -> tuple[EngineDelta, bool]:
    """Copy the tokens: vLLM's lists may be shared with its own state. And whether it was cut."""
    token_ids = tuple(choice.token_ids)
    positions: Any = choice.logprobs if choice.logprobs is not None else ()
    if len(positions) != len(token_ids):
        raise EngineInternalError(
            f"the engine returned {len(token_ids)} tokens and {len(positions)} log-probs"
        )
    # ``flat_logprobs``: the sampled token's comes first at each position
    starts = positions.start_indices if token_ids else ()
    log_probs = tuple(positions.logprobs[start] for start in starts)
    whole = len(log_probs)
    end = next((i for i, value in enumerate(log_probs) if not math.isfinite(value)), whole)
    delta = EngineDelta(
        token_ids=token_ids[:end],
        log_probs=log_probs[:end],
        top_log_probs=tuple(_top(positions[i], top) for i in range(end)) if top else None,
    )
    return delta, end < whole


def _top(position: Any, top: int) -> tuple[TopLogProb, ...]:
    """The ``top`` most likely, without those that could not be sampled (-inf); vLLM gives the
    sampled token besides, where it is none of them.
    """
    ranked = sorted((entry.rank, token, entry.logprob) for token, entry in position.items())
    return tuple(
        TopLogProb(token_id=token, log_prob=float(value), rank=rank)
        for rank, token, value in ranked
        if rank <= top and math.isfinite(value)
    )

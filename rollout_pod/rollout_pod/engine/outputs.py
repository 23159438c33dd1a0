"""What vLLM says of a request, in the words of the Engine Protocol."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rollout_pod.engine.base import (
    EngineDelta,
    EngineInternalError,
    EngineOutput,
    ExpertIds,
    PromptLogProbs,
    TopLogProb,
)
from rollout_pod.engine.seam import SeamStop

NON_FINITE = "non-finite log-prob"
"""The stop reason of an output that was cut, beside the finish reason ``error``."""

_BY_ITSELF = frozenset({"stop", "length", "repetition"})

Read = Callable[[Any], tuple[EngineDelta, bool]]


class Transcript:
    """The tokens of one request, up to the first one whose log-prob is NaN or infinite.

    Such a token was sampled from no distribution, and JSON cannot carry its log-prob. It and all
    that come after it are left out, and the output ends in ``error``.

    Args:
        top: How many of the most likely tokens were asked for, beside the sampled one.
        read: Instead: gives the tokens of an output, and whether it is cut after them.
        prompt: The prompt has so many tokens, and its log-probs were asked for, ``prompt_top`` of
            the most likely ones beside each.
        experts: Whether they were asked for.
        stops: Looks for stop strings where vLLM does not.
    """

    def __init__(
        self,
        *,
        top: int = 0,
        read: Read | None = None,
        prompt: int | None = None,
        prompt_top: int = 0,
        experts: bool = False,
        stops: SeamStop | None = None,
    ) -> None:
        self._read = read or (lambda output: _delta_of(output.outputs[0], top=top))
        self._prompt = prompt
        self._prompt_top = prompt_top
        self._experts = experts
        self._stops = stops
        self._stopped_by: str | None = None
        self._prompt_log_probs: PromptLogProbs | None = None
        self._deltas: list[EngineDelta] = []
        self._final: Any = None
        self.is_cut = False

    def add(self, output: Any) -> EngineDelta:
        """Take vLLM's output, a final one or one of a stream, and return what is new in it.

        Raises:
            EngineInternalError: not every token has its log-prob.
        """
        self._final = output
        if self._prompt is not None and output.prompt_logprobs and not self._prompt_log_probs:
            self._prompt_log_probs = _of_prompt(output, self._prompt, top=self._prompt_top)
        if self.ends_early or not output.outputs:
            return EngineDelta((), ())
        delta, self.is_cut = self._read(output)
        if self._stops is not None and delta.token_ids:
            is_stop = not self.is_cut and output.outputs[0].finish_reason == "stop"
            kept, self._stopped_by = self._stops.take(delta.token_ids, is_stop=is_stop)
            if self._stopped_by is not None:
                delta, self.is_cut = _first_of(delta, kept), False
        self._deltas.append(delta)
        if self._stopped_by is not None:
            return replace(delta, finish_reason="stop", stop_reason=self._stopped_by)
        choice = output.outputs[0]
        if output.finished and not self.is_cut and choice.finish_reason in _BY_ITSELF:
            return replace(
                delta, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
            )
        return delta

    @property
    def ends_early(self) -> bool:
        """Nothing more of the engine's is taken: it need not go on."""
        return self.is_cut or self._stopped_by is not None

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
        reason, stop_reason = choice.finish_reason or "error", choice.stop_reason
        if self.is_cut:
            reason, stop_reason = "error", NON_FINITE
        elif self._stopped_by is not None:
            reason, stop_reason = "stop", self._stopped_by
        return EngineOutput(
            token_ids=tuple(token for delta in self._deltas for token in delta.token_ids),
            log_probs=tuple(value for delta in self._deltas for value in delta.log_probs),
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=final.num_cached_tokens or 0,
            top_log_probs=tuple(position for top in tops for position in top) if tops else None,
            prompt_log_probs=self._prompt_log_probs,
            routed_experts=_experts_of(choice.routed_experts) if self._experts else None,
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


def _first_of(delta: EngineDelta, count: int) -> EngineDelta:
    tops = delta.top_log_probs
    return EngineDelta(
        token_ids=delta.token_ids[:count],
        log_probs=delta.log_probs[:count],
        top_log_probs=None if tops is None else tops[:count],
    )


def _of_prompt(output: Any, count: int, *, top: int) -> PromptLogProbs | None:
    """Of the first ``count`` tokens: what comes after them was generated by earlier attempts."""
    positions = list(output.prompt_logprobs)[:count]
    if len(positions) < count:
        return None  # it was cut before the prompt was done
    return tuple(
        _of_prompt_token(position, token, top)
        for position, token in zip(positions, output.prompt_token_ids, strict=False)
    )


def _of_prompt_token(position: Any, token: int, top: int) -> tuple[TopLogProb, ...] | None:
    own = position.get(token) if position else None
    if own is None or not math.isfinite(own.logprob):
        return None
    others = {other: entry for other, entry in position.items() if other != token}
    return (TopLogProb(token, float(own.logprob), own.rank), *_top(others, top))


def _experts_of(array: Any) -> ExpertIds | None:
    if array is None:
        return None
    tokens, layers, picked = array.shape
    little = array.astype(array.dtype.newbyteorder("<"))
    return ExpertIds((tokens, layers, picked), little.dtype.name, little.tobytes())

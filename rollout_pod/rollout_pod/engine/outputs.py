"""What vLLM says of a request, in the words of the Engine Protocol."""

from typing import Any

from rollout_pod.engine.base import EngineDelta, EngineError, EngineOutput, TopLogProb


def delta_of(output: Any, *, top: int) -> EngineDelta:
    """Copy the tokens of vLLM's output: its lists may be shared with the engine's own state.

    Args:
        output: A final output, or one of a stream of deltas.
        top: How many of the most likely tokens were asked for, beside the sampled one.

    Raises:
        EngineError: not every token has its log-prob.
    """
    choice = output.outputs[0]
    token_ids = tuple(choice.token_ids)
    positions = choice.logprobs if choice.logprobs is not None else ()
    if len(positions) != len(token_ids):
        raise EngineError(
            f"the engine returned {len(token_ids)} tokens and {len(positions)} log-probs"
        )
    return EngineDelta(
        token_ids=token_ids,
        log_probs=tuple(
            float(position[token].logprob)
            for token, position in zip(token_ids, positions, strict=True)
        ),
        top_log_probs=tuple(_top(position, top) for position in positions) if top else None,
    )


def output_of(final: Any, deltas: list[EngineDelta]) -> EngineOutput:
    """Put the deltas of a request together, and what its final output says of their end."""
    choice = final.outputs[0]
    tops = [delta.top_log_probs for delta in deltas if delta.top_log_probs is not None]
    return EngineOutput(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        log_probs=tuple(value for delta in deltas for value in delta.log_probs),
        finish_reason=choice.finish_reason or "error",
        stop_reason=choice.stop_reason,
        num_cached_tokens=final.num_cached_tokens or 0,
        top_log_probs=tuple(position for top in tops for position in top) if tops else None,
    )


def _top(position: Any, top: int) -> tuple[TopLogProb, ...]:
    """The ``top`` most likely; vLLM gives the sampled token besides, where it is none of them."""
    ranked = sorted((entry.rank, token, entry.logprob) for token, entry in position.items())
    return tuple(
        TopLogProb(token_id=token, log_prob=float(value), rank=rank)
        for rank, token, value in ranked
        if rank <= top
    )

"""What vLLM says of a finished request, in the words of the Engine Protocol."""

from typing import Any

from rollout_pod.engine.base import EngineError, EngineOutput


def output_of(final: Any) -> EngineOutput:
    """Copy vLLM's final output: its lists may be shared with the engine's own state.

    Raises:
        EngineError: not every token has its log-prob.
    """
    choice = final.outputs[0]
    token_ids = tuple(choice.token_ids)
    positions = choice.logprobs if choice.logprobs is not None else ()
    if len(positions) != len(token_ids):
        raise EngineError(
            f"the engine returned {len(token_ids)} tokens and {len(positions)} log-probs"
        )
    return EngineOutput(
        token_ids=token_ids,
        log_probs=tuple(
            float(position[token].logprob)
            for token, position in zip(token_ids, positions, strict=True)
        ),
        finish_reason=choice.finish_reason or "error",
        stop_reason=choice.stop_reason,
        num_cached_tokens=final.num_cached_tokens or 0,
    )

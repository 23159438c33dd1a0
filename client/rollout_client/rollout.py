"""A rollout as its caller holds it, and how one more answer extends it: pure."""

from dataclasses import dataclass, replace

from rollout_pod.protocol import FinishReason, GenerateResponse, WeightVersionSpan


class InvalidAnswer(ValueError):
    """A pod's answer contradicts its own protocol; taking it would corrupt the rollout."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """All tokens generated so far, over every attempt. Also the partial of a cut rollout."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """One for each token, under the distribution that it was sampled from."""
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    """Cover ``[0, len(token_ids))`` without a gap; neighbours differ."""
    attempts: int = 0
    """Requests sent for it, those that got no answer included."""
    finish_reason: FinishReason | None = None
    """None while it is not finished."""
    stop_reason: int | str | None = None


def extend(rollout: Rollout, answer: GenerateResponse, *, budget: int | None) -> Rollout:
    """Append one answer's tokens, log-probs and spans.

    Args:
        rollout: What the caller holds.
        answer: The answer to a request that carried ``rollout.token_ids``.
        budget: ``max_tokens`` of the whole rollout, where the caller named one.

    Raises:
        InvalidAnswer: lengths differ, spans leave a gap or the budget is exceeded.
    """
    count, held = len(answer.token_ids), len(rollout.token_ids)
    if len(answer.log_probs) != count:
        raise InvalidAnswer(f"{count} token_ids came with {len(answer.log_probs)} log_probs")
    if budget is not None and held + count > budget:
        raise InvalidAnswer(f"{held + count} tokens exceed max_tokens {budget}")
    end = 0
    for span in answer.weight_versions:
        if span.start != end or span.end < span.start:
            raise InvalidAnswer(f"weight_versions leave a gap or overlap at token {end}")
        end = span.end
    if end != count:
        raise InvalidAnswer(f"weight_versions cover {end} of {count} tokens")
    finished = not answer.is_cancel
    return replace(
        rollout,
        token_ids=rollout.token_ids + tuple(answer.token_ids),
        log_probs=rollout.log_probs + tuple(answer.log_probs),
        weight_versions=_joined(rollout.weight_versions, answer.weight_versions, shift=held),
        finish_reason=answer.finish_reason if finished else None,
        stop_reason=answer.stop_reason if finished else None,
    )


def _joined(
    held: tuple[WeightVersionSpan, ...], new: list[WeightVersionSpan], *, shift: int
) -> tuple[WeightVersionSpan, ...]:
    spans = list(held)
    for span in new:
        if span.start == span.end:
            continue
        moved = span.model_copy(update={"start": span.start + shift, "end": span.end + shift})
        last = spans[-1] if spans else None
        if last is not None and (last.version, last.step) == (moved.version, moved.step):
            spans[-1] = last.model_copy(update={"end": moved.end})
        else:
            spans.append(moved)
    return tuple(spans)

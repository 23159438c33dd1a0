"""A rollout as its caller holds it, and how what arrives extends it: pure."""

from dataclasses import dataclass

from rollout_pod.protocol import (
    FinishReason,
    GenerateDelta,
    GenerateEnd,
    RoutedExperts,
    TokenLogProb,
    WeightVersionSpan,
)


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
    top_log_probs: tuple[list[TokenLogProb], ...] | None = None
    """One for each token, where ``logprobs: k`` asks for them."""
    prompt_log_probs: list[list[TokenLogProb] | None] | None = None
    """One entry for each token of the prompt, where ``prompt_logprobs: k`` asks for them."""
    routed_experts: RoutedExperts | None = None
    """Of the whole rollout, where ``return_routed_experts`` asks for them."""
    attempts: int = 0
    """Requests sent for it, those that got no answer included."""
    finish_reason: FinishReason | None = None
    """None while it is not finished."""
    stop_reason: int | str | None = None


class Draft:
    """A rollout that grows. What it takes is checked first: it is whole after every error.

    Args:
        request_id: The caller's.
        budget: ``max_tokens`` of the whole rollout, where the caller named one.
    """

    def __init__(self, request_id: str, *, budget: int | None) -> None:
        self.request_id = request_id
        self.budget = budget
        self.token_ids: list[int] = []
        self.attempts = 0
        self.finish_reason: FinishReason | None = None
        self._log_probs: list[float] = []
        self._spans: list[WeightVersionSpan] = []
        self._tops: list[list[TokenLogProb]] = []
        self._stop_reason: int | str | None = None
        self._prompt_log_probs: list[list[TokenLogProb] | None] | None = None
        self._routed_experts: RoutedExperts | None = None

    def append(self, delta: GenerateDelta) -> None:
        """Take the tokens of one event.

        Raises:
            InvalidAnswer: lengths differ, the budget is exceeded, or it had ended before.
        """
        count, held = len(delta.token_ids), len(self.token_ids)
        if self.finish_reason is not None:
            raise InvalidAnswer(f"{count} tokens came after the last one")
        if len(delta.log_probs) != count:
            raise InvalidAnswer(f"{count} token_ids came with {len(delta.log_probs)} log_probs")
        if delta.top_log_probs is not None and len(delta.top_log_probs) != count:
            raise InvalidAnswer(
                f"{count} token_ids came with {len(delta.top_log_probs)} top_log_probs"
            )
        if self.budget is not None and held + count > self.budget:
            raise InvalidAnswer(f"{held + count} tokens exceed max_tokens {self.budget}")
        self.token_ids += delta.token_ids
        self._log_probs += delta.log_probs
        self._tops += delta.top_log_probs or ()
        if count:
            self._cover(delta.version, delta.step, held, held + count)
        if delta.finish_reason is not None:
            self.finish(delta.finish_reason, delta.stop_reason)

    def end(self, end: GenerateEnd, *, received: int) -> None:
        """Check an attempt's last event against the ``received`` tokens that came before it, and
        finish the rollout unless it was cut.

        Raises:
            InvalidAnswer: tokens are missing.
        """
        if end.num_tokens != received:
            raise InvalidAnswer(f"{received} tokens came of {end.num_tokens}")
        self._prompt_log_probs = end.prompt_log_probs or self._prompt_log_probs
        self._routed_experts = end.routed_experts or self._routed_experts
        if not end.is_cancel and end.finish_reason is not FinishReason.ERROR:
            self.finish(end.finish_reason, end.stop_reason)

    def begin_anew(self) -> None:
        """Forget all tokens: what cannot go on from a partial is asked for as a whole again."""
        self.token_ids, self._log_probs, self._spans, self._tops = [], [], [], []

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Nothing is left to ask for."""
        self.finish_reason, self._stop_reason = reason, stop_reason

    @property
    def is_full(self) -> bool:
        """The budget is used up."""
        return self.budget is not None and 0 < self.budget <= len(self.token_ids)

    def rollout(self) -> Rollout:
        """What is held at this moment."""
        return Rollout(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self._log_probs),
            weight_versions=tuple(self._spans),
            top_log_probs=tuple(self._tops) if self._tops else None,
            prompt_log_probs=self._prompt_log_probs,
            routed_experts=self._routed_experts,
            attempts=self.attempts,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _cover(self, version: str, step: int | None, start: int, end: int) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.version, last.step) == (version, step):
            self._spans[-1] = last.model_copy(update={"end": end})
        else:
            self._spans.append(WeightVersionSpan(version=version, step=step, start=start, end=end))

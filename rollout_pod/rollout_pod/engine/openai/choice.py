"""One sequence over all of its attempts: as if the engine had never been interrupted.

The engine gives token ids only. Text is made here, by vLLM's own detokenizer, one for the whole
sequence: characters and stop strings that a cut goes through come out as they would without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rollout_pod.engine.openai.log_probs import TokenTexts
from rollout_pod.protocol import WeightVersionSpan

_SEEDS = 1 << 63


@dataclass(frozen=True)
class Piece:
    """A part of a sequence, to be answered."""

    text: str
    token_ids: list[int]
    log_probs: list[Any] | None
    cumulative_log_prob: float | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Choice:
    """What is known of one sequence.

    Args:
        params: vLLM's, as its server made them, for this sequence alone.
        prompt: As vLLM's renderer made it, with ``prompt_token_ids``.
        tokenizer: vLLM's.
    """

    def __init__(self, *, params: Any, prompt: Mapping[str, Any], tokenizer: Any) -> None:
        from vllm.sampling_params import RequestOutputKind

        self.params = params
        self._is_whole = params.output_kind != RequestOutputKind.DELTA or self.restarts
        self.prompt = prompt
        self._tokenizer = tokenizer if params.detokenize else None
        self._texts = TokenTexts(self._tokenizer)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.spans: list[WeightVersionSpan] = []
        self._attempt_start = 0
        self._answered = 0
        self._token_ids: list[int] = []
        self._log_probs: list[Any] | None = None
        self._cumulative = 0.0
        self._detokenizer: Any = None
        self.last: Any = None
        """The newest of vLLM's outputs."""
        self.prompt_log_probs: Any = None
        self.num_cached_tokens: int | None = None
        self._start()

    @property
    def restarts(self) -> bool:
        """A grammar cannot go on in the middle: such a sequence is made anew after a cut, and
        answered when it is complete.
        """
        return self.params.structured_outputs is not None

    @property
    def is_complete(self) -> bool:
        """It needs nothing more of the engine."""
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Generated so far."""
        return len(self._token_ids)

    def attempt(self) -> tuple[dict[str, Any], Any]:
        """Prompt and parameters that go on where the sequence is."""
        from vllm.sampling_params import RequestOutputKind

        done = self.num_tokens
        params = self.params.clone()
        params.output_kind = RequestOutputKind.DELTA
        if hasattr(params, "stream_interval"):
            # the gate labels tokens when they come: none may be withheld (0.26 has none)
            params.stream_interval = None
        params.n = 1
        params.detokenize, params.stop, params.flat_logprobs = False, [], False
        params.max_tokens = self.params.max_tokens - done
        params.min_tokens = max(0, self.params.min_tokens - done)
        if done:
            params.prompt_logprobs = None  # the answer has them already
            if params.seed is not None:
                # else the same dice are thrown again
                params.seed = (params.seed + done) % _SEEDS
        ids = [*self.prompt["prompt_token_ids"], *self._token_ids]
        return {**self.prompt, "prompt_token_ids": ids}, params

    def take(self, output: Any) -> Piece | None:
        """Take vLLM's next output of the running attempt; returns what may be answered of it.

        The last piece of a sequence comes from ``finish``.
        """
        self.last = output
        raw = output.outputs[0]
        if self.is_complete:
            return None  # what came after a stop string
        ends = raw.finish_reason not in (None, "abort")
        self._extend(list(raw.token_ids), raw.logprobs, is_stop=raw.finish_reason == "stop")
        if raw.token_ids and self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
            # complete once a token came
            self.prompt_log_probs = self._texts.of_prompt(output.prompt_logprobs)
        if ends and not self.is_complete:
            self.finish_reason, self.stop_reason = raw.finish_reason, raw.stop_reason
        if self.is_complete or self._is_whole or raw.finish_reason is not None:
            return None
        return self._piece()

    def cut(self, spans: Sequence[WeightVersionSpan], *, goes_on: bool) -> None:
        """An attempt ended, and these versions sampled what it gave."""
        start = self._attempt_start
        for span in spans:
            self._add_span(span, start)
        if goes_on and self.restarts and not self.is_complete:
            self._start()
        elif self.num_tokens >= self.params.max_tokens and not self.is_complete:
            self.finish_reason = "length"
        elif not goes_on and not self.is_complete:
            self.finish_reason = "abort"
        self._attempt_start = self.num_tokens

    def finish(self) -> Piece:
        """All that was not answered yet, with how the sequence ended."""
        return self._piece()

    def _start(self) -> None:
        """From the prompt on."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        self.finish_reason = None
        self.stop_reason = None
        self.spans = []
        self._attempt_start = self._answered = 0
        self._token_ids = []
        # 0.32 knows log-probs of named tokens besides
        count = getattr(self.params, "num_logprobs", self.params.logprobs)
        self._log_probs = None if count is None else []
        self._cumulative = 0.0
        # the parts of vLLM's request that its detokenizers look at
        request = SimpleNamespace(
            request_id="",
            prompt_token_ids=list(self.prompt["prompt_token_ids"]),
            prompt_embeds=None,
            sampling_params=self.params,
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, request)

    def _extend(self, token_ids: list[int], log_probs: Any, *, is_stop: bool) -> None:
        if not token_ids:
            return
        before = self._detokenizer.num_output_tokens()
        stop = self._detokenizer.update(token_ids, is_stop)
        if stop is not None:
            # what came in the same step after the stop string is none of the answer's
            del token_ids[max(1, self._detokenizer.num_output_tokens() - before) :]
            self.finish_reason, self.stop_reason = "stop", stop
        if self._log_probs is not None:
            positions = list(log_probs)[: len(token_ids)]
            self._texts.fill(positions, self._token_ids)
            self._log_probs += positions
            self._cumulative += sum(
                position[token].logprob
                for token, position in zip(token_ids, positions, strict=True)
            )
        self._token_ids += token_ids

    def _add_span(self, span: WeightVersionSpan, start: int) -> None:
        begin, end = start + span.start, min(start + span.end, self.num_tokens)
        if begin >= end:
            return
        if self.spans and (self.spans[-1].version, self.spans[-1].step) == (
            span.version,
            span.step,
        ):
            begin = self.spans.pop().start
        self.spans.append(span.model_copy(update={"start": begin, "end": end}))

    def _piece(self) -> Piece:
        start, self._answered = self._answered, self.num_tokens
        return Piece(
            text=self._detokenizer.get_next_output_text(self.is_complete, True),
            token_ids=self._token_ids[start:],
            log_probs=None if self._log_probs is None else self._log_probs[start:],
            cumulative_log_prob=None if self._log_probs is None else self._cumulative,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

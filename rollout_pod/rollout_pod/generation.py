"""Partial generation: one HTTP request's tokens, with what a caller needs to go on from them.

What verl's ``generate_for_partial`` does, with the budget counted over all attempts, parameters
never changed in place, and ``is_cancel`` decided by the engine's finish reason.
"""

import asyncio
import base64
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeGuard

from rollout_pod.admission import Admission, DuplicateRequest, Finished, OnTokens, Refused
from rollout_pod.engine.base import (
    Engine,
    EngineOutput,
    EngineRequest,
    ExpertIds,
    InvalidField,
    InvalidSamplingParams,
    InvalidTokens,
    Prepared,
    PromptLogProbs,
    TopLogProb,
)
from rollout_pod.gate import Gate
from rollout_pod.preparing import Preparing
from rollout_pod.protocol import (
    CancelReason,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    OnPause,
    RoutedExperts,
    TokenLogProb,
    WeightVersionSpan,
)


class PromptTooLong(Exception):
    """The prompt leaves no room for a token."""


@dataclass(frozen=True)
class Budget:
    """How many tokens this attempt may generate."""

    tokens: int
    params: Mapping[str, Any]
    """The caller's parameters without ``max_tokens``, corrected for what was generated before."""


_SEEDS = 1 << 63


def make_budget(
    request: GenerateRequest, *, max_model_len: int, num_prompt_tokens: int | None = None
) -> Budget:
    """Count the budget: ``max_tokens`` is that of the whole rollout, and the model has room for
    ``max_model_len`` tokens, prompt included (``num_prompt_tokens`` where that is not its length).

    Raises:
        PromptTooLong: the prompt alone fills the model.
        InvalidSamplingParams: ``max_tokens`` is not a positive integer, or a parameter that
            cannot go on from earlier output.
    """
    params = dict(request.sampling_params)
    prompt = len(request.prompt_token_ids) if num_prompt_tokens is None else num_prompt_tokens
    generated = len(request.generated_token_ids)
    if prompt >= max_model_len:
        raise PromptTooLong(
            f"the prompt has {prompt} tokens; the model has room for {max_model_len}, "
            "one of them for the answer"
        )
    room = max_model_len - prompt - generated
    total = params.pop("max_tokens", None)
    if total is not None and (isinstance(total, bool) or not isinstance(total, int) or total < 1):
        raise InvalidSamplingParams(
            "max_tokens", f"must be an integer of at least 1, not {total!r}"
        )
    tokens = room if total is None else min(total - generated, room)
    min_tokens = params.get("min_tokens")
    if isinstance(min_tokens, int) and (generated or total is None or total > room):
        # the engine takes earlier output for prompt and would count from zero again; and where the
        # model has no room for more, less is no mistake of the caller's
        params["min_tokens"] = max(0, min(min_tokens - generated, tokens))
    seed = params.get("seed")
    if generated and _is_seed(seed):
        # else the same dice are thrown again
        params["seed"] = (seed + generated) % _SEEDS
    if generated and params.get("structured_outputs") is not None:
        raise InvalidSamplingParams(
            "structured_outputs",
            "the grammar would start again in the middle; send it without generated_token_ids, "
            "and begin a rollout that was cut anew",
        )
    return Budget(max(0, tokens), params)


def _is_seed(value: Any) -> TypeGuard[int]:
    """Of those that vLLM takes; with -1 it throws other dice each time."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value != -1 and -_SEEDS <= value < _SEEDS


def tops_of(
    tops: Sequence[Sequence[TopLogProb]] | None,
) -> list[list[TokenLogProb]] | None:
    """The engine's top log-probs, as a document."""
    if tops is None:
        return None
    return [[TokenLogProb(**asdict(top)) for top in position] for position in tops]


def _prompt_log_probs_of(
    positions: PromptLogProbs | None,
) -> list[list[TokenLogProb] | None] | None:
    if positions is None:
        return None
    return [
        None if entries is None else [TokenLogProb(**asdict(entry)) for entry in entries]
        for entries in positions
    ]


def _experts_of(experts: ExpertIds | None) -> RoutedExperts | None:
    if experts is None:
        return None
    data = base64.b64encode(experts.data).decode()
    return RoutedExperts(shape=experts.shape, dtype=experts.dtype, data=data)


class Elsewhere(Protocol):
    """The requests of other processes that answer for the same engine."""

    async def claim(self, request_id: str) -> bool:
        """Take the id for this process; False if a request of it is alive in any."""

    def release(self, request_id: str) -> None:
        """The request was answered."""

    async def cancel(self, request_id: str) -> GenerateResponse | None:
        """Cut a request of another process and return its partial; None if it is not alive."""


class Generation:
    """``POST /v1/rollout/generate`` without HTTP."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        *,
        max_model_len: Callable[[], int],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._engine = engine
        self._elsewhere = elsewhere
        self._gate = gate
        self._max_model_len = max_model_len
        self._requests: dict[str, GenerateRequest] = {}
        self._preparing: dict[str, Preparing] = {}

    async def generate(
        self,
        request: GenerateRequest,
        *,
        gone: Callable[[], Coroutine[None, None, None]] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        on_admit: Callable[[Admission], None] | None = None,
        on_delta: OnTokens | None = None,
    ) -> GenerateResponse:
        """Run one attempt. Raises what ``Gate.generate`` and ``make_budget`` raise, and the
        engine's errors.
        """
        self._gate.check_ready()
        if self._elsewhere is None:
            return await self._generate(request, gone, trace_headers, on_admit, on_delta)
        if not await self._elsewhere.claim(request.request_id):
            raise DuplicateRequest(request.request_id)
        try:
            return await self._generate(request, gone, trace_headers, on_admit, on_delta)
        finally:
            self._elsewhere.release(request.request_id)

    async def _generate(
        self,
        request: GenerateRequest,
        gone: Callable[[], Coroutine[None, None, None]] | None,
        trace_headers: Mapping[str, str] | None,
        on_admit: Callable[[Admission], None] | None,
        on_delta: OnTokens | None,
    ) -> GenerateResponse:
        self._gate.check_new(request.request_id)
        if request.request_id in self._preparing:
            raise DuplicateRequest(request.request_id)
        budget = make_budget(request, max_model_len=self._max_model_len())
        for name in ("prompt_token_ids", "generated_token_ids"):
            try:
                self._engine.check_tokens(getattr(request, name))
            except InvalidTokens as error:
                raise InvalidField(f"{name}.{error.position}", str(error)) from error
        if budget.tokens == 0:
            await self._params(replace(budget, tokens=1))  # wrong ones are told here too
            return self._answer(request, EngineOutput((), (), FinishReason.LENGTH))
        if self._is_refused(request):  # without fetching anything for it
            return self._answer_of(request, Refused(self._gate.generation))
        started = time.monotonic()
        if not self._takes_long(request):
            budget, prepared, params = await self._ready(request, budget)
        else:
            preparing = self._preparing[request.request_id] = Preparing(request)
            try:
                ready = await preparing.finished(self._ready(request, budget), gone)
            finally:
                del self._preparing[request.request_id]
            if ready is None:
                return self._answer_of(request, self._cancelled())
            budget, prepared, params = ready
        if budget.tokens == 0:
            return self._answer(request, EngineOutput((), (), FinishReason.LENGTH))

        def make(engine_id: str) -> EngineRequest:
            return EngineRequest(
                engine_id=engine_id,
                prompt_token_ids=[*request.prompt_token_ids, *request.generated_token_ids],
                params=params,
                cache_salt=request.cache_salt,
                session_id=request.session_id,
                priority=request.priority,
                trace_headers=trace_headers or {},
                num_generated=len(request.generated_token_ids),
                prepared=prepared,
            )

        self._gate.check_new(request.request_id)
        self._requests[request.request_id] = request
        try:
            outcome = await self._gate.generate(
                request.request_id,
                make,
                on_pause=request.on_pause,
                timeout_s=max(0.0, request.timeout_s - (time.monotonic() - started)),
                gone=gone,
                on_admit=on_admit,
                on_delta=on_delta,
            )
        finally:
            # the gate frees an id before it has returned: another request may have it by now
            if self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
        return self._answer_of(request, outcome)

    def _cancelled(self) -> Refused:
        return Refused(self._gate.generation, CancelReason.CANCELLED)

    def _is_refused(self, request: GenerateRequest) -> bool:
        returns = request.on_pause is OnPause.RETURN
        return returns and request.multi_modal_data is not None and not self._gate.is_open

    @staticmethod
    def _takes_long(request: GenerateRequest) -> bool:
        grammar = request.sampling_params.get("structured_outputs") is not None
        media = request.multi_modal_data is not None
        return grammar or media or bool(request.lora) or request.return_routed_experts

    async def _ready(
        self, request: GenerateRequest, budget: Budget
    ) -> tuple[Budget, Prepared | None, object | None]:
        """All that may take long, before the gate; no parameters where there is no budget."""
        prepared = await self._prepare(request)
        if prepared is not None and prepared.prompt is not None:
            budget = make_budget(
                request,
                max_model_len=self._max_model_len(),
                num_prompt_tokens=prepared.num_prompt_tokens,
            )
        return budget, prepared, await self._params(budget) if budget.tokens else None

    async def _prepare(self, request: GenerateRequest) -> Prepared | None:
        """None where there is nothing to prepare."""
        media = request.multi_modal_data
        urls = {name: urls for name, urls in media if urls} if media else {}
        if not (urls or request.lora or request.return_routed_experts):
            return None
        return await self._engine.prepare(
            request.prompt_token_ids,
            lora=request.lora,
            media=urls or None,
            routed_experts=request.return_routed_experts,
        )

    async def _params(self, budget: Budget) -> object:
        if budget.params.get("structured_outputs") is None:
            return self._engine.sampling_params(budget.params, max_tokens=budget.tokens)
        return await asyncio.to_thread(
            self._engine.sampling_params, budget.params, max_tokens=budget.tokens
        )

    async def cancel(self, request_id: str) -> GenerateResponse | None:
        """Cut one request and return its partial, as its own caller gets it; None if it is not
        alive.
        """
        if (preparing := self._preparing.get(request_id)) is not None:
            preparing.cut.set()
            return self._answer_of(preparing.request, self._cancelled())
        request = self._requests.get(request_id)
        if request is None:
            return None
        outcome = await self._gate.cancel_one(request_id)
        return self._answer_of(request, outcome) if outcome else None

    def _answer_of(self, request: GenerateRequest, outcome: Finished | Refused) -> GenerateResponse:
        if isinstance(outcome, Refused):
            output = EngineOutput((), (), FinishReason.ABORT)
            return self._answer(request, output, cancel_reason=outcome.cancel_reason)
        output = outcome.output
        if len(output.log_probs) != len(output.token_ids):
            raise AssertionError(
                f"{len(output.token_ids)} tokens with {len(output.log_probs)} log-probs"
            )
        spans = [
            WeightVersionSpan(
                version=span.weights.version, step=span.weights.step, start=span.start, end=span.end
            )
            for span in outcome.spans
        ]
        return self._answer(
            request,
            output,
            cancel_reason=outcome.cancel_reason,
            spans=spans,
            generation=outcome.admission.generation,
        )

    def _answer(
        self,
        request: GenerateRequest,
        output: EngineOutput,
        *,
        cancel_reason: CancelReason | None = None,
        spans: list[WeightVersionSpan] | None = None,
        generation: int | None = None,
    ) -> GenerateResponse:
        finish_reason = FinishReason(output.finish_reason)
        return GenerateResponse.model_construct(  # of the pod's own values, not checked again
            request_id=request.request_id,
            token_ids=list(output.token_ids),
            log_probs=list(output.log_probs),
            is_cancel=finish_reason is FinishReason.ABORT,
            finish_reason=finish_reason,
            stop_reason=output.stop_reason,
            cancel_reason=cancel_reason,
            weight_versions=spans or [],
            attempt=request.attempt,
            generation=self._gate.generation if generation is None else generation,
            num_cached_tokens=output.num_cached_tokens,
            top_log_probs=tops_of(output.top_log_probs),
            prompt_log_probs=_prompt_log_probs_of(output.prompt_log_probs),
            routed_experts=_experts_of(output.routed_experts),
        )

"""The engine client that vLLM's server is given: its ``generate`` passes the pod's gate."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from rollout_pod.engine import grammars
from rollout_pod.engine.base import (
    EngineError,
    EngineInternalError,
    EngineRequest,
    InvalidSamplingParams,
)
from rollout_pod.engine.front_end import CALL, Call
from rollout_pod.engine.openai.choice import Choice, Piece
from rollout_pod.engine.openai.native import Native

_PASSED = frozenset(
    {
        "vllm_config",
        "model_config",
        "renderer",
        "input_processor",
        "check_admission",
        "do_log_stats",
        "is_tracing_enabled",
        "add_lora",
        "get_kv_event_sources",
        "get_supported_tasks",
        "get_tokenizer",
        "notify_kv_transfer_request_rejected",
    }
)
"""What else of ``AsyncLLM`` the server may use: nothing that generates, pauses or loads."""


class GatedClient:
    """Stands for vLLM's ``AsyncLLM`` before its own server.

    Args:
        llm: vLLM's ``AsyncLLM``.
    """

    errored = False
    is_running = True
    is_stopped = False
    dead_error: BaseException | None = None
    """The pod's liveness is for others to tell; here a dead engine fails each request."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._tasks: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        """Only what is harmless."""
        if name not in _PASSED:
            raise AttributeError(f"the pod does not pass on {name}")
        return getattr(self._llm, name)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As ``AsyncLLM.generate``, for all sequences of a request, over pauses and updates."""
        if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
            raise ValueError("only prompts that are made of tokens are supported")
        call = CALL.get()
        first = call.new_choices(sampling_params.n)
        return self._generate(call, first, prompt, sampling_params, request_id, options)

    async def close(self, *, timeout_s: float) -> None:
        """Wait for what is left of requests whose readers have gone."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def _generate(
        self,
        call: Call,
        first: int,
        prompt: Mapping[str, Any],
        params: Any,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:
        try:
            await self._check_grammar(params)
        except Exception as error:
            call.failed(_told(error))
            raise
        from vllm.v1.engine.output_processor import RequestOutputCollector

        outbox = RequestOutputCollector(params.output_kind, request_id)
        answer = _Answer(outbox, request_id, params, prompt, options.get("lora_request"))
        sequences = []
        for index in range(params.n):
            own = params.clone()
            if params.n > 1 and params.seed is not None:
                own.seed = params.seed + index  # as vLLM does
            choice = Choice(params=own, prompt=prompt, tokenizer=self._llm.renderer.tokenizer)
            sequences.append(_Sequence(call, first + index, index, choice, answer))
        for sequence in sequences:
            task = asyncio.create_task(sequence.run(options), name=f"openai {request_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            finished = False
            while not finished:
                output = outbox.get_nowait() or await outbox.get()
                finished = output.finished
                yield output
        finally:
            for sequence in sequences:
                sequence.leave()

    async def _check_grammar(self, params: Any) -> None:
        """Before the gate, and not in the event loop: it may take long."""
        if params.structured_outputs is None:
            return
        grammars.check_made(params.structured_outputs)
        config = self._llm.vllm_config

        def verify() -> None:
            with grammars.timed(params, any_backend=True):
                params.verify(
                    config.model_config,
                    config.speculative_config,
                    config.structured_outputs_config,
                    self._llm.renderer.tokenizer,
                )

        await asyncio.to_thread(verify)


def _told(error: Exception) -> Exception:
    """What vLLM's class raises of a grammar, in our words: its server answers 400."""
    if isinstance(error, ValueError) and not isinstance(error, InvalidSamplingParams):
        return InvalidSamplingParams("structured_outputs", str(error))
    return error


class _Answer:
    """Puts the pieces of all sequences of a request together, as vLLM's server expects them."""

    def __init__(
        self, outbox: Any, request_id: str, params: Any, prompt: Mapping[str, Any], lora: Any
    ) -> None:
        from vllm.sampling_params import RequestOutputKind

        self.outbox = outbox
        self._request_id = request_id
        self._prompt = prompt
        self._lora = lora
        self._left = params.n
        self._streams = params.output_kind == RequestOutputKind.DELTA
        self._complete: dict[int, Any] = {}

    def add(self, index: int, choice: Choice, piece: Piece) -> None:
        """Answer a piece; where nothing is streamed, sequences are answered at once, when all
        of them are complete.
        """
        output = self._output(index, choice, piece)
        if choice.is_complete:
            self._left -= 1
        if not self._streams:
            self._complete[index] = output
            if self._left:
                return
            output.outputs = [self._complete[i].outputs[0] for i in sorted(self._complete)]
        output.finished = self._left == 0
        self.outbox.put(output)

    def _output(self, index: int, choice: Choice, piece: Piece) -> Any:
        from vllm.outputs import CompletionOutput, RequestOutput

        last = choice.last
        raw = last.outputs[0] if last else None
        completion = CompletionOutput(
            index=index,
            text=piece.text,
            token_ids=piece.token_ids,
            cumulative_logprob=piece.cumulative_log_prob,
            logprobs=piece.log_probs,
            routed_experts=raw.routed_experts if raw else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt.get("prompt"),
            prompt_token_ids=list(self._prompt["prompt_token_ids"]),
            prompt_logprobs=choice.prompt_log_probs,
            outputs=[completion],
            finished=False,
            metrics=last.metrics if last else None,
            lora_request=self._lora,
            num_cached_tokens=choice.num_cached_tokens,
        )


class _Sequence:
    """Runs one sequence to its end, however often it is cut."""

    def __init__(
        self, call: Call, number: int, index: int, choice: Choice, answer: _Answer
    ) -> None:
        self._call = call
        self._number = number
        self._index = index
        self._choice = choice
        self._answer = answer
        self._is_left = False
        self._ended = asyncio.Event()
        """Nothing more is wanted of the engine."""

    def leave(self) -> None:
        """Its reader has gone, or has all of it."""
        self._is_left = True
        self._ended.set()

    async def run(self, options: dict[str, Any]) -> None:
        """Never raises: the reader gets the error."""
        try:
            await self._run(options)
        except Exception as error:
            if self._is_left:
                return
            self._call.failed(error)
            self._answer.outbox.put(_in_vllms_words(error))

    async def _run(self, options: dict[str, Any]) -> None:
        choice = self._choice
        while not choice.is_complete:
            prompt, params = choice.attempt()
            native = Native(prompt, params, options, self._take)

            def make(engine_id: str, native: Native = native) -> EngineRequest:
                ids = native.prompt["prompt_token_ids"]
                return EngineRequest(engine_id, ids, params=None, native=native)

            passage = await self._call.pass_gate(make, self._ended)
            if self._is_left:
                return
            choice.cut(passage.spans, goes_on=passage.goes_on)
        reason = choice.finish_reason or ""
        self._call.finished(self._number, choice.spans, reason=reason, tokens=choice.num_tokens)
        self._answer.add(self._index, choice, choice.finish())

    def _take(self, output: Any) -> None:
        piece = self._choice.take(output)
        if self._choice.is_complete:
            self._ended.set()
        elif piece and (piece.token_ids or piece.text):
            self._answer.add(self._index, self._choice, piece)


def _in_vllms_words(error: Exception) -> Exception:
    """What its server makes the right answer of: its own error, or one that means 400."""
    if not isinstance(error, EngineError):
        return error
    if isinstance(error.__cause__, Exception):
        return error.__cause__
    return error if isinstance(error, EngineInternalError) else ValueError(str(error))

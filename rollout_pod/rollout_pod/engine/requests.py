"""Requests to an engine that runs: checked, put in vLLM's words, run to their final output."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollout_pod.engine import params
from rollout_pod.engine.base import (
    EngineDeadError,
    EngineError,
    EngineInternalError,
    EngineOutput,
    EngineRequest,
    InvalidTokens,
    OnDelta,
)
from rollout_pod.engine.lifeline import Lifeline, words_of
from rollout_pod.engine.openai.native import Native
from rollout_pod.engine.outputs import NON_FINITE, Transcript, is_refusal
from rollout_pod.engine.prepare import Preparation
from rollout_pod.engine.seam import SeamStop

log = logging.getLogger(__name__)

_ABORT_S = 60.0


class Requests:
    """Of one engine.

    Args:
        llm: vLLM's ``AsyncLLM``.
        lifeline: That watches it.
        loras: Its adapters, by name.
    """

    def __init__(self, llm: Any, lifeline: Lifeline, loras: Mapping[str, Any]) -> None:
        model = llm.vllm_config.model_config
        self.preparation = Preparation(llm, loras)
        self._llm = llm
        self._lifeline = lifeline
        self._vocab_size = model.get_vocab_size()
        self._max_logprobs = model.max_logprobs
        self._has_tokenizer = not model.skip_tokenizer_init
        self._has_row_limits = bool(llm.vllm_config.use_v2_model_runner)
        self._takes_session = "session_id" in inspect.signature(llm.generate).parameters

    def sampling_params(self, raw: Mapping[str, Any], *, max_tokens: int) -> object:
        """See ``Engine``."""
        llm = self._llm
        config = llm.vllm_config

        def verify(made: Any) -> None:
            made.verify(  # what vLLM itself would check when the request is queued
                config.model_config,
                config.speculative_config,
                config.structured_outputs_config,
                llm.renderer.tokenizer,
            )
            params.check_bad_words(made, llm.renderer.tokenizer)
            params.check_thinking(made, config)

        return params.build(
            raw,
            max_tokens=max_tokens,
            vocab_size=self._vocab_size,
            max_logprobs=self._max_logprobs,
            has_tokenizer=self._has_tokenizer,
            has_row_limits=self._has_row_limits,
            verify=verify,
        )

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """See ``Engine``."""
        size = self._vocab_size
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
            return
        at = next(i for i, token in enumerate(token_ids) if not 0 <= token < size)
        raise InvalidTokens(
            at, f"{token_ids[at]} is no token id of this model (0 to {size - 1}); at index {at}"
        )

    async def generate(
        self, request: EngineRequest, on_delta: OnDelta | None = None
    ) -> EngineOutput:
        """See ``Engine``."""
        llm = self._llm
        prompt = list(request.prompt_token_ids)
        try:
            self.check_tokens(prompt)  # vLLM's process dies of others
        except InvalidTokens as error:
            raise EngineError(f"prompt: {error}") from error

        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        # What vLLM's renderer makes of token ids: nothing has to be awaited before it is queued.
        rendered: dict[str, Any] = {"type": "token", "prompt_token_ids": prompt}
        prepared = request.prepared
        if prepared is not None and isinstance(prepared.prompt, dict):
            generated = prompt[len(prompt) - request.num_generated :]
            prompt = [*prepared.prompt["prompt_token_ids"], *generated]
            rendered = {**prepared.prompt, "prompt_token_ids": prompt}
        if request.cache_salt is not None:
            rendered["cache_salt"] = request.cache_salt
        native = request.native
        if isinstance(native, Native):
            params.check(
                native.params,
                vocab_size=self._vocab_size,
                has_tokenizer=self._has_tokenizer,
                has_row_limits=self._has_row_limits,
            )
            params.check_bad_words(native.params, llm.renderer.tokenizer)
            rendered, asked, options = native.prompt, native.params, native.options
            transcript = Transcript(read=native.read)
        else:
            given: Any = request.params
            stops = None
            if given.stop and request.num_generated:
                stops = SeamStop(
                    given,
                    before=prompt,
                    num_generated=request.num_generated,
                    tokenizer=llm.renderer.tokenizer,
                )
            asked, top = params.for_output(
                given, streams=on_delta is not None, stops_here=stops is not None
            )
            options = {
                "priority": request.priority,
                "trace_headers": request.trace_headers or None,
            }
            if self._takes_session:
                options["session_id"] = request.session_id
            if prepared is not None and prepared.lora is not None:
                options["lora_request"] = prepared.lora
            wants_prompt = given.prompt_logprobs is not None
            transcript = Transcript(
                top=top,
                prompt=len(prompt) - request.num_generated if wants_prompt else None,
                prompt_top=given.prompt_logprobs or 0,
                experts=prepared is not None and prepared.routed_experts,
                stops=stops,
            )
        try:
            async for output in llm.generate(rendered, asked, request.engine_id, **options):
                had_ended = transcript.ends_early
                delta = transcript.add(output)
                if on_delta is not None and delta.token_ids:
                    on_delta(delta)
                if transcript.ends_early and not had_ended:
                    if transcript.is_cut:
                        log.error("request %s: %s; output cut", request.engine_id, NON_FINITE)
                    if not output.finished:
                        await self.abort(request.engine_id)
        except (EngineError, EngineDeadError):
            raise
        except VllmDeadError as error:
            raise EngineDeadError(await self._lifeline.last_words()) from error
        except Exception as error:
            if self._lifeline.death() is not None:
                raise EngineDeadError(await self._lifeline.last_words()) from error
            # vLLM keeps, and would keep, a request that it could not hand to its engine
            with suppress(EngineError, EngineDeadError):
                await self.abort(request.engine_id)
            kind = EngineError if is_refusal(error) else EngineInternalError
            raise kind(words_of(error)) from error
        return transcript.output()

    async def abort(self, engine_id: str) -> None:
        """See ``Engine``."""
        await self._lifeline.call(self._llm.abort(engine_id), "abort a request", _ABORT_S)

"""``generate`` that survives pauses, weight updates and lost connections."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from rollout_client import http as pods
from rollout_client.errors import (
    DeadlineExceeded,
    EngineFailed,
    ProtocolError,
    RequestRefused,
)
from rollout_client.rollout import InvalidAnswer, Rollout, extend
from rollout_pod.protocol import FinishReason, GenerateRequest, GenerateResponse, OnPause

OnPartial = Callable[[Rollout], None]

_BACKOFF: Final = wait_random_exponential(multiplier=0.1, max=5)


class RolloutClient:
    """Calls one or several pods; a rollout stays with one of them while it answers.

    Args:
        endpoints: Base URLs of data ports, such as ``http://qwen.default.svc:8000``.
        max_concurrency: Requests on the wire at once; others wait for their turn.
        connect_timeout_s: For one connection.
        park_s: How long a pod may hold a request that finds the gate closed, before the client
            asks again.
        engine_failures: Engine errors in a row after which ``generate`` gives up.
        transport: Takes the place of the network in tests.
    """

    def __init__(
        self,
        endpoints: Sequence[str] | str,
        *,
        max_concurrency: int = 256,
        connect_timeout_s: float = 5.0,
        park_s: float = 60.0,
        engine_failures: int = 5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        urls = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not urls:
            raise ValueError("endpoints: name at least one, such as http://qwen.default.svc:8000")
        self._endpoints = tuple(url.rstrip("/") for url in urls)
        self._park_s = park_s
        self._engine_failures = engine_failures
        self._slots = asyncio.Semaphore(max_concurrency)
        self._http = httpx.AsyncClient(
            # A long generation sends no byte for minutes; the rollout's deadline bounds it.
            timeout=httpx.Timeout(None, connect=connect_timeout_s),
            limits=httpx.Limits(
                max_connections=max_concurrency, max_keepalive_connections=max_concurrency
            ),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        await self._http.aclose()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        lora: str | None = None,
        multi_modal_data: Mapping[str, Sequence[str]] | None = None,
        deadline_s: float = 600.0,
        on_partial: OnPartial | None = None,
    ) -> Rollout:
        """Generate one rollout to its end, however often it is cut on the way.

        One with ``structured_outputs`` begins anew when it is cut: its grammar cannot go on.

        Args:
            prompt_token_ids: The prompt, with a placeholder for each of ``multi_modal_data``.
            sampling_params: vLLM's names; ``max_tokens`` is the budget of the whole rollout.
            request_id: Made up where absent; must not be in use at the moment.
            session_id: Rollouts of one session prefer one pod (its prefix cache).
            lora: The name of one of the engine's adapters.
            multi_modal_data: URLs by kind, ``image`` and ``video``.
            deadline_s: For all attempts together.
            on_partial: Called with what the caller holds whenever the rollout was cut.

        Raises:
            RolloutError: one of its subclasses; each carries the partial.
            ValueError: the pod's schema refuses the arguments; nothing was sent.
        """
        run = _Run(
            prompt=list(prompt_token_ids),
            params=dict(sampling_params),
            session_id=session_id,
            more={"lora": lora, "multi_modal_data": multi_modal_data},
            rollout=Rollout(request_id=request_id or uuid.uuid4().hex),
            deadline=asyncio.get_running_loop().time() + deadline_s,
            on_partial=on_partial,
        )
        try:
            async with asyncio.timeout_at(run.deadline) as limit:
                while run.rollout.finish_reason is None:
                    await self._advance(run)
        except TimeoutError as error:
            if not limit.expired():
                raise
            why = f"; the last attempt failed: {run.last_failure}" if run.last_failure else ""
            raise DeadlineExceeded(
                f"not finished after {deadline_s} s{why}", partial=run.rollout
            ) from error
        return run.rollout

    async def _advance(self, run: "_Run") -> None:
        if run.budget is not None and 0 < run.budget <= len(run.rollout.token_ids):
            # Cut on its very last token: nothing is left to ask a pod for.
            run.rollout = replace(run.rollout, finish_reason=FinishReason.LENGTH)
            return
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(pods.Transient), wait=_wait, reraise=True
        )
        try:
            await retrying(self._attempt, run)
        except pods.Refused as error:
            raise RequestRefused(
                str(error), status=error.status, problem=error.problem, partial=run.rollout
            ) from error
        except (pods.NoDocument, InvalidAnswer) as error:
            raise ProtocolError(str(error), partial=run.rollout) from error

    async def _attempt(self, run: "_Run") -> None:
        endpoints = pods.preferred(self._endpoints, run.session_id or run.rollout.request_id)
        endpoint = endpoints[run.moves % len(endpoints)]
        async with self._slots:
            request = run.next_request(self._park_s)
            try:
                answer = await pods.exchange(self._http, endpoint, request)
            except pods.Transient as error:
                run.failed(error)
                if run.engine_failures >= self._engine_failures:
                    raise EngineFailed(str(error), partial=run.rollout) from error
                raise
            except pods.Refused as error:
                if run.lost_connection and error.duplicate:
                    # The attempt whose connection broke has not left the pod yet.
                    raise pods.Transient(str(error)) from error
                raise
        run.took(answer)


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after_s if isinstance(error, pods.Transient) else None
    return _BACKOFF(state) if asked is None else asked


class _Run:
    """One rollout on its way: what is asked, what is held, what went wrong."""

    def __init__(
        self,
        *,
        prompt: list[int],
        params: dict[str, Any],
        session_id: str | None,
        more: Mapping[str, Any],
        rollout: Rollout,
        deadline: float,
        on_partial: OnPartial | None,
    ) -> None:
        self.prompt, self.params, self.session_id = prompt, params, session_id
        self.more = more
        self.rollout, self.deadline, self.on_partial = rollout, deadline, on_partial
        budget = params.get("max_tokens")
        self.budget = budget if isinstance(budget, int) else None
        self.moves = 0
        self.engine_failures = 0
        self.lost_connection = False
        self.last_failure: str | None = None

    def next_request(self, park_s: float) -> GenerateRequest:
        self.rollout = replace(self.rollout, attempts=self.rollout.attempts + 1)
        left = self.deadline - asyncio.get_running_loop().time()
        return GenerateRequest(
            request_id=self.rollout.request_id,
            prompt_token_ids=self.prompt,
            generated_token_ids=list(self.rollout.token_ids),
            sampling_params=self.params,
            attempt=self.rollout.attempts,
            session_id=self.session_id,
            on_pause=OnPause.WAIT,
            timeout_s=max(0.001, min(park_s, left)),
            **self.more,
        )

    def took(self, answer: GenerateResponse) -> None:
        self.rollout = extend(self.rollout, answer, budget=self.budget)
        self.engine_failures, self.last_failure = 0, None
        if not answer.is_cancel:
            return
        if self.on_partial is not None:
            self.on_partial(self.rollout)
        if self.params.get("structured_outputs") is not None:
            self.rollout = replace(self.rollout, token_ids=(), log_probs=(), weight_versions=())
        if not answer.token_ids:
            # Asked again at growing intervals, so that no pod is asked in a tight loop.
            raise pods.Transient(f"cut before its first token: {answer.cancel_reason}")

    def failed(self, error: pods.Transient) -> None:
        self.last_failure = str(error)
        self.moves += 1
        self.lost_connection |= isinstance(error, pods.ConnectionLost)
        self.engine_failures += isinstance(error, pods.EngineTrouble)

"""``generate`` that survives pauses, weight updates, lost connections and lost pods."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from rollout_client import http as pods
from rollout_client.batch import gather_batch
from rollout_client.endpoints import Endpoints, Fixed
from rollout_client.errors import DeadlineExceeded, GroupFailed, RolloutCancelled, RolloutError
from rollout_client.fleet import Fleet
from rollout_client.planning import Again, Cut, Done, Ended, Outcome, Policy, judge
from rollout_client.pools import Pools
from rollout_client.prompts import normalize_token_ids
from rollout_client.rollout import Draft, Rollout
from rollout_client.routing import NoReplica
from rollout_client.run import OnPartial, Run, error_of
from rollout_pod.protocol import FinishReason

_BACKOFF: Final = wait_random_exponential(multiplier=0.1, max=5)
_PARK_AMONG_S: Final = 5.0
_NO_REPLICA_S: Final = 1.0
"""The longest wait before it is asked again whether there is a replica."""


class RolloutClient:
    """Generates on one or many replicas. Use it as an async context manager, in one event loop.

    Args:
        endpoints: One base URL, several, or ``Service`` or ``kube.ReplicaSelector``, which find
            them.
        max_concurrency: Requests on the wire at once; others wait for their turn.
        connect_timeout_s: For one connection.
        park_s: How long a replica may hold a request that finds the gate closed. Where there are
            others, 5 seconds at most: then one of them is asked.
        policy: When a rollout is given up before its deadline.
        transport: Takes the place of the network in tests.
    """

    def __init__(
        self,
        endpoints: Sequence[str] | str | Endpoints,
        *,
        max_concurrency: int = 256,
        connect_timeout_s: float = 5.0,
        park_s: float = 30.0,
        policy: Policy = Policy(),  # noqa: B008 # frozen
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if isinstance(endpoints, str):
            endpoints = [endpoints]
        self._park_s = park_s
        self._policy = policy
        self._pools = Pools(
            max_concurrency,
            timeout=httpx.Timeout(pods.SILENCE_S, connect=connect_timeout_s, pool=None),
            transport=transport,
        )
        self._fleet = Fleet(
            Fixed(endpoints) if isinstance(endpoints, Sequence) else endpoints, self._pools.probes
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
        await self._fleet.aclose()
        await self._pools.aclose()

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: Mapping[str, Any],
        request_id: str | None = None,
        *,
        session_id: str | None = None,
        min_step: int | None = None,
        deadline_s: float = 600.0,
        on_partial: OnPartial | None = None,
        give_up: Callable[[], bool] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Generate one rollout to its end, however often it is cut on the way.

        One with ``structured_outputs`` begins anew when it is cut: its grammar cannot go on.
        Cancelling this coroutine ends the request in the pod; its partial is lost.

        Args:
            prompt_ids: Token ids: a list, an array, a tensor or a tokenizer's output (see
                ``normalize_token_ids``).
            sampling_params: vLLM's names; ``max_tokens`` is the budget of the whole rollout.
            request_id: Made up where absent; must not be in use at the moment.
            session_id: Rollouts of one session prefer one replica (its prefix cache).
            min_step: Only replicas that hold this ``weightStep`` or a later one are asked. The
                spans of the rollout say what really sampled it.
            deadline_s: For all attempts together.
            on_partial: Called with what the caller holds whenever the rollout was cut.
            give_up: Asked before every attempt but the first: where it says true nothing more is
                tried, and ``RolloutCancelled`` carries what there is.
            fields: Further fields of the pod's request, such as ``lora``, ``multi_modal_data``
                (the prompt holds a placeholder for each item), ``priority`` or ``cache_salt``.

        Raises:
            RolloutError: one of its subclasses; each carries the partial.
            ValueError: the arguments are wrong; nothing was sent.
        """
        budget = sampling_params.get("max_tokens")
        run = Run(
            draft=Draft(
                request_id or uuid.uuid4().hex, budget=budget if isinstance(budget, int) else None
            ),
            prompt=normalize_token_ids(prompt_ids),
            params=dict(sampling_params),
            session_id=session_id,
            min_step=min_step,
            deadline=asyncio.get_running_loop().time() + deadline_s,
            on_partial=on_partial,
            give_up=give_up,
            fields=dict(fields or {}),
        )
        run.request(self._park_s)  # wrong arguments are told before anything else
        try:
            async with asyncio.timeout_at(run.deadline) as limit:
                while run.draft.finish_reason is None:
                    await self._advance(run)
        except TimeoutError as error:
            if not limit.expired():
                raise
            why = f"; the last attempt: {run.last_failure}" if run.last_failure else ""
            raise DeadlineExceeded(
                f"not finished after {deadline_s:g} s{why}", partial=run.draft.rollout()
            ) from error
        return run.draft.rollout()

    async def generate_group(
        self,
        prompt_ids: Any,
        sampling_params: Mapping[str, Any],
        n: int,
        group_id: str | None = None,
        **options: Any,
    ) -> list[Rollout]:
        """Generate ``n`` rollouts of one prompt, on one replica's prefix cache where possible.

        Args:
            prompt_ids: As for ``generate``.
            sampling_params: As for ``generate``; a ``seed`` is raised by one from rollout to
                rollout.
            n: How many.
            group_id: Made up where absent; the rollouts are called ``{group_id}-0`` and so on.
            options: Those of ``generate``, for each of them.

        Raises:
            GroupFailed: not all finished; it has those that did and the partials of the others.
            ValueError: the arguments are wrong.
        """
        if n < 1:
            raise ValueError(f"n: must be at least 1, not {n}")
        group = group_id or uuid.uuid4().hex
        prompt, seed = normalize_token_ids(prompt_ids), sampling_params.get("seed")
        params = [
            {**sampling_params, "seed": seed + i} if isinstance(seed, int) else sampling_params
            for i in range(n)
        ]
        results = await self.generate_batch(
            [prompt] * n,
            params,
            request_ids=[f"{group}-{i}" for i in range(n)],
            **{"session_id": group, **options},
        )
        failed = [r for r in results if isinstance(r, RolloutError)]
        if failed:
            raise GroupFailed(
                f"{len(failed)} of {n} rollouts of group {group} failed: {failed[0]}",
                results=results,
            ) from failed[0]
        return [r for r in results if isinstance(r, Rollout)]

    async def generate_batch(
        self,
        prompts: Sequence[Any],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        request_ids: Sequence[str] | None = None,
        progress: bool = False,
        **options: Any,
    ) -> list[Rollout | RolloutError]:
        """Generate one rollout for each prompt; return them in order, a failed one as its error.

        Args:
            prompts: Each as for ``generate``.
            sampling_params: For all, or one for each.
            request_ids: Made up where absent.
            progress: Show a bar on the terminal's stderr (needs ``rollout-replica[rich]``).
            options: Those of ``generate``, for each of them.

        Raises:
            ValueError: the arguments of one are wrong; the others are given up.
        """
        return await gather_batch(
            self.generate, prompts, sampling_params,
            request_ids=request_ids, progress=progress, options=options,
        )  # fmt: skip

    async def _advance(self, run: Run) -> None:
        """Attempts until one brings tokens or the end."""
        if run.draft.is_full:
            # Cut on its very last token: nothing is left to ask a pod for.
            run.draft.finish(FinishReason.LENGTH)
            return
        retrying = AsyncRetrying(retry=retry_if_exception_type(_Retry), wait=_wait, reraise=True)
        await retrying(self._attempt, run)

    async def _attempt(self, run: Run) -> None:
        async with self._pools.slot() as http:
            if run.is_given_up():
                raise RolloutCancelled("given up by its caller", partial=run.draft.rollout())
            picked = await self._fleet.pick(run.key, avoid=run.avoid, min_step=run.min_step)
            if isinstance(picked, NoReplica):
                if picked.wait_s is None or run.last_failure is None:
                    run.last_failure = picked.why
                raise _Retry(picked)
            held = len(run.draft.token_ids)
            run.draft.attempts += 1
            park_s = self._park_s if self._fleet.size < 2 else min(self._park_s, _PARK_AMONG_S)
            with self._fleet.in_flight(picked):
                outcome = await pods.attempt(http, picked, run.request(park_s), run.draft)
        self._follow(run, picked, outcome, gained=len(run.draft.token_ids) - held)

    def _follow(self, run: Run, url: str, outcome: Outcome, *, gained: int) -> None:
        begins_anew = run.params.get("structured_outputs") is not None
        if begins_anew and not isinstance(outcome, Ended | Cut):
            gained = 0  # what is forgotten is no progress: a broken replica is asked less and less
        verdict = judge(outcome, gained=gained, counts=run.counts, policy=self._policy)
        if gained or isinstance(verdict, Done):
            self._fleet.worked(url)
            run.avoid, run.last_failure = set(), None
        if isinstance(verdict, Done):
            return
        if not isinstance(verdict, Again):
            raise error_of(verdict.kind, verdict.why, outcome, run.draft.rollout())
        run.counts, run.last_failure = verdict.counts, verdict.why
        if verdict.rest_s:
            self._fleet.rest(url, verdict.rest_s, asked_s=verdict.asked_s)
            run.avoid.add(url)
        if run.on_partial is not None and (gained or isinstance(outcome, Cut)):
            run.on_partial(run.draft.rollout())
        if begins_anew:
            run.draft.begin_anew()
        if verdict.backoff and not run.draft.is_full:
            raise _Retry(None)


class _Retry(Exception):
    """Ask again, at growing intervals."""

    def __init__(self, nobody: NoReplica | None) -> None:
        super().__init__()
        self.nobody = nobody


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    nobody = error.nobody if isinstance(error, _Retry) else None
    if nobody is None:
        return _BACKOFF(state)
    if nobody.wait_s is None:
        return min(_BACKOFF(state), _NO_REPLICA_S)
    return nobody.wait_s

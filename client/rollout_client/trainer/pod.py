"""A pod that no operator owns, steered over its admin port by desired documents."""

from pathlib import Path
from typing import Any, Final

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from rollout_client.trainer.answers import checked, clearing
from rollout_client.trainer.control import Facts, asleep_text
from rollout_client.trainer.errors import (
    AdapterError,
    Asleep,
    OwnedByOperator,
    Refused,
    Superseded,
    Unreachable,
    UpdateFailed,
    WeightsUnavailable,
)
from rollout_client.trainer.targets import PodTarget
from rollout_client.trainer.wishes import Hold, Wish, changed, judge, overruled, progress
from rollout_client.verdict import Failed, Failure, Reached
from rollout_pod.protocol import (
    BASE_VERSION,
    LOCAL_OWNER,
    CachesCleared,
    DesiredDocument,
    SleepTag,
    StateDocument,
)

_POLL_S: Final = 25.0
_EXTRA_S: Final = 10.0
"""Beyond what the pod was asked to take."""
_CONFLICTS: Final = 20

_ERRORS: Final[dict[Failure, type[AdapterError]]] = {
    Failure.STALLED: Refused,
    Failure.UPDATE_FAILED: UpdateFailed,
    Failure.WEIGHTS_UNAVAILABLE: WeightsUnavailable,
    Failure.SUPERSEDED: Superseded,
}


class PodControl:
    """See ``Control``. A pod that restarts meanwhile is waited for and told again.

    Args:
        target: where it is.
        transport: takes the place of the network in tests.
    """

    def __init__(
        self, target: PodTarget, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.name = target.url
        self.run_dir = target.run_dir
        self.told = "nothing was heard of it"
        self._token = target.token
        self._generation = 0
        self._http = httpx.AsyncClient(base_url=target.url, timeout=_EXTRA_S, transport=transport)

    async def aclose(self) -> None:
        """See ``Control``."""
        await self._http.aclose()

    async def facts(self) -> Facts:
        """See ``Control``."""
        return facts_of(await self._state())

    async def wish(self, wish: Wish) -> "PodFollowing":
        """See ``Control``: put the changed document; after another writer's, put it again.

        Raises:
            OwnedByOperator: the pod is another one's.
        """
        return PodFollowing(self, wish, await self.put(wish))

    async def put(self, wish: Wish) -> int:
        """Have the wish in the document in force; return that one's generation."""
        for _ in range(_CONFLICTS):
            state = await self._state()
            current = await self._document(state)
            fresh = changed(wish, current)
            if fresh == current and state.owner is not None:
                self._generation = current.generation
                return current.generation
            fresh = fresh.model_copy(update={"generation": current.generation + 1})
            answer = await self._send(
                "PUT",
                "/admin/v1/desired",
                content=fresh.model_dump_json(),
                headers={
                    "If-Match": f'"{state.boot_id}:{state.revision}"',
                    "Content-Type": "application/json",
                },
            )
            if answer.status_code != httpx.codes.PRECONDITION_FAILED:
                checked(self.name, answer)
                self._generation = fresh.generation
                return fresh.generation
        raise Unreachable(
            f"{self.name}: its state changed {_CONFLICTS} times while a document was put",
            target=self.name,
        )

    async def check_update(self, wish: Hold) -> None:
        """See ``Control``."""
        if wish.source is None and wish.version != BASE_VERSION:
            raise Refused(
                f"{self.name}: no operator knows where {wish.version} lies: hand over the weights, "
                "or say it: source=WeightsSource(path=...)",
                target=self.name,
            )
        state = await self._state()
        if SleepTag.WEIGHTS not in state.resident:
            raise Asleep(asleep_text(self.name), target=self.name)

    def has_forgotten(self, state: StateDocument) -> bool:
        """See ``Control``: ``rollout-pod serve`` without ``--keep-state``."""
        is_ours = state.owner in (None, LOCAL_OWNER)
        return is_ours and (state.generation or 0) < self._generation

    async def clear_caches(self, timeout_s: float) -> Facts:
        """See ``Control``."""
        answer = await self._send(
            "POST",
            "/admin/v1/clear-caches",
            **clearing(timeout_s),
        )
        CachesCleared.model_validate_json(checked(self.name, answer))
        return await self.facts()

    async def until(self, wish: Wish, generation: int) -> Facts:
        """Follow the state until the wish has come true."""
        after: StateDocument | None = None
        while True:
            state = await self._state(after)
            self.told = progress(state)
            if state.generation is None or state.generation < generation:
                # it was started anew and has forgotten
                generation, after = await self.put(wish), None
                continue
            verdict = judge(wish, state)
            if state.generation > generation and not isinstance(verdict, Reached):
                document = await self._document(state)
                if (why := overruled(wish, document)) is not None:
                    verdict = Failed(kind=Failure.SUPERSEDED, message=why)
            if isinstance(verdict, Reached):
                return facts_of(state)
            if isinstance(verdict, Failed):
                raise _ERRORS[verdict.kind](f"{self.name}: {verdict.message}", target=self.name)
            after = state

    async def _document(self, state: StateDocument) -> DesiredDocument:
        if state.owner not in (None, LOCAL_OWNER):
            raise OwnedByOperator(
                f"{self.name}: an operator owns this pod, and would take back what it is told "
                "directly; name its RolloutReplica instead: ReplicaTarget(name=...)",
                target=self.name,
            )
        if state.owner is None:
            return DesiredDocument(owner=LOCAL_OWNER, generation=0)
        body = checked(self.name, await self._send("GET", "/admin/v1/desired"))
        return DesiredDocument.model_validate_json(body)

    async def _state(self, after: StateDocument | None = None) -> StateDocument:
        params: dict[str, str] = {}
        if after is not None:
            params = {"timeout": str(_POLL_S), "after": f"{after.boot_id}:{after.revision}"}
        answer = await self._send(
            "GET", "/admin/v1/state", params=params, timeout=_EXTRA_S + (_POLL_S if params else 0)
        )
        return StateDocument.model_validate_json(checked(self.name, answer))

    async def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send until somebody answers: a pod that restarts is silent for a while.

        What is sent may be sent twice: documents are fenced, and all else is idempotent.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Again),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            reraise=True,
        )
        return await retrying(self._send_once, method, path, **more)

    async def _send_once(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {**more.pop("headers", {}), "Authorization": f"Bearer {self._read_token()}"}
        try:
            answer = await self._http.request(method, path, headers=headers, **more)
        except httpx.TransportError as error:
            self.told = f"no pod answers there ({type(error).__name__}: {error})"
            raise _Again(self.told) from error
        if answer.status_code == httpx.codes.UNAUTHORIZED and isinstance(self._token, Path):
            self.told = f"it refuses the token in {self._token}"
            raise _Again(self.told)  # one that has just been started has yet to write its own
        return answer

    def _read_token(self) -> str:
        if isinstance(self._token, str):
            return self._token
        try:
            return self._token.read_text().strip()
        except OSError as error:
            self.told = f"{self._token}: {error.strerror}; give the pod's --run-dir"
            raise _Again(self.told) from error


class PodFollowing:
    """See ``Following``."""

    def __init__(self, control: PodControl, wish: Wish, generation: int) -> None:
        self._control, self._wish, self._generation = control, wish, generation

    async def reached(self) -> Facts:
        """See ``Following``."""
        return await self._control.until(self._wish, self._generation)


class _Again(Exception):
    """Worth another try; says how it stands."""


def facts_of(state: StateDocument) -> Facts:
    """The few that every kind of target has."""
    return Facts(phase=state.phase.value, weight_version=state.weight_version)

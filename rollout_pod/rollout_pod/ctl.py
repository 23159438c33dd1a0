"""``rollout-pod ctl``: drives a pod that no operator owns, over its admin port."""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from rollout_pod.protocol import (
    AT_REST,
    LOCAL_OWNER,
    CachesCleared,
    DesiredDocument,
    GateState,
    PodPhase,
    Problem,
    SleepTag,
    StateDocument,
)

_ATTEMPTS = 10
_CLEAR_EXTRA_S = 200.0
"""The engine's own deadlines for the three calls of the last attempt."""


class CtlError(Exception):
    """What went wrong, and what to do about it, in one line."""


class Ctl:
    """One pod's admin port."""

    def __init__(
        self, url: str, token: str, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=70.0,
            transport=transport,
        )  # fmt: skip

    @classmethod
    def of_run_dir(cls, run_dir: Path, url: str) -> Self:
        """The pod that ``rollout-pod serve`` runs from this folder."""
        try:
            token = (run_dir / "admin" / "token").read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            raise CtlError(
                f"no pod runs from {run_dir}, or it has just been started: give its --run-dir"
            ) from None
        except OSError as error:
            raise CtlError(f"the token in {run_dir} cannot be read: {error.strerror}") from None
        return cls(url, token)

    def __enter__(self) -> Self:
        """Use as a context manager to close the connection."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Close the connection."""
        self._http.close()

    def state(self, *, after: StateDocument | None = None, timeout_s: float = 0.0) -> StateDocument:
        """The state; with ``after`` as soon as there is a newer one."""
        params = {"timeout": f"{timeout_s:g}"}
        if after is not None:
            params["after"] = f"{after.boot_id}:{after.revision}"
        return StateDocument.model_validate(self._call("GET", "/admin/v1/state", params=params))

    def change(self, edit: Callable[[DesiredDocument], DesiredDocument]) -> StateDocument:
        """Read, edit and put the desired document; again if somebody else was quicker.

        Raises:
            CtlError: an operator owns the pod, or the pod refused.
        """
        for _ in range(_ATTEMPTS):
            state = self.state()
            if state.owner not in (None, LOCAL_OWNER):
                raise CtlError(
                    "an operator owns this pod: patch its RolloutReplica with kubectl instead"
                )
            current = DesiredDocument(owner=LOCAL_OWNER, generation=0)
            if state.owner is not None:
                current = DesiredDocument.model_validate(self._call("GET", "/admin/v1/desired"))
            fresh = edit(current).model_copy(update={"generation": current.generation + 1})
            answer = self._send(
                "PUT",
                "/admin/v1/desired",
                content=fresh.model_dump_json(),
                headers={
                    "If-Match": f'"{state.boot_id}:{state.revision}"',
                    "Content-Type": "application/json",
                },
            )
            if answer.status_code != 412:
                return StateDocument.model_validate(self._checked(answer))
        raise CtlError(f"the pod's state changed {_ATTEMPTS} times meanwhile: try again")

    def clear_caches(self, *, timeout_s: float) -> CachesCleared:
        """Clear every cache of the engine; it is tried again for ``timeout_s``.

        Raises:
            CtlError: requests held a cache for all that time, or the engine sleeps.
        """
        answer = self._send(
            "POST", "/admin/v1/clear-caches", json={"timeout_s": timeout_s},
            timeout=timeout_s + _CLEAR_EXTRA_S,
        )  # fmt: skip
        return CachesCleared.model_validate(self._checked(answer))

    def wait(self, done: Callable[[StateDocument], bool], *, timeout_s: float) -> StateDocument:
        """Follow the state until ``done``.

        Raises:
            CtlError: the time was over before; says what the pod said last.
        """
        deadline = time.monotonic() + timeout_s
        state = self.state()
        while not done(state):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                message = state.update.message if state.update else ""
                awaited = f"A trainer has to push {state.needs}. " if state.needs else ""
                raise CtlError(
                    f"not there after {timeout_s:g} s: phase {state.phase}, "
                    f"weights {state.weight_version}. {awaited}{message}"
                )
            state = self.state(after=state, timeout_s=min(30.0, remaining))
        return state

    def _call(self, method: str, path: str, *, params: dict[str, str] | None = None) -> object:
        return self._checked(self._send(method, path, params=params))

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **more)
        except httpx.TransportError as error:
            raise CtlError(f"no pod answers at {self._http.base_url}: {error}") from error

    def _checked(self, answer: httpx.Response) -> object:
        if answer.is_success:
            return answer.json()
        try:
            problem = Problem.model_validate_json(answer.content)
        except ValueError:
            raise CtlError(f"{answer.status_code}: {answer.text[:500]}") from None
        raise CtlError(f"{problem.title}: {problem.detail}")


def is_paused(state: StateDocument) -> bool:
    """The gate is closed, nothing is left in the engine, and every caller has its partial."""
    return state.gate is GateState.CLOSED and state.phase in AT_REST


def is_asleep(tags: Collection[SleepTag], level: int) -> Callable[[StateDocument], bool]:
    """Whether exactly ``tags`` sleep; raises ``CtlError`` if the engine refuses."""

    def done(state: StateDocument) -> bool:
        sleep = state.sleep
        if sleep is None:
            return not tags
        if not sleep.tags:
            raise CtlError(f"the engine does not sleep: {sleep.message}")
        is_deep = SleepTag.WEIGHTS not in tags or sleep.level >= level
        return set(sleep.tags) == set(tags) and is_deep

    return done


def is_settled_on(version: str) -> Callable[[StateDocument], bool]:
    """Whether the pod holds ``version``; raises ``CtlError`` if it gave up on it."""

    def done(state: StateDocument) -> bool:
        if state.rejected and state.rejected.version == version:
            raise CtlError(f"{version} was rejected: {state.rejected_message}")
        return state.weight_version == version and state.phase in (
            PodPhase.SERVING,
            PodPhase.PAUSED,
            PodPhase.SLEEPING,
        )

    return done

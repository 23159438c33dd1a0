"""Holds one long poll to a pod and tells when it says something new."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog
from prometheus_client import Gauge

from rollout_operator.background import Background
from rollout_operator.control.pod_client import NotConnected, PodClient, PodError, Unauthorized
from rollout_operator.control.routes import PodAddress
from rollout_operator.plan.observed import Report
from rollout_pod.protocol import StateDocument

log = structlog.get_logger(__name__)

_BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0)


class _Said(NamedTuple):
    """A state as JSON, its defaults left out: read, it would take ten times as much."""

    boot_id: str
    revision: int
    text: bytes


class PodWatch:
    """The newest state of one incarnation of a pod, kept by a task of its own."""

    # thousands of these are held at once
    __slots__ = (
        "_answered",
        "_background",
        "_error",
        "_failing_since",
        "_gauge",
        "_pods",
        "_said",
        "_started",
        "_token",
        "_unauthorized",
        "_unconnected",
        "_wake",
        "pod",
        "uid",
    )

    def __init__(
        self,
        pods: PodClient,
        *,
        uid: str,
        pod: PodAddress,
        token: Callable[[], str],
        wake: Callable[[], None],
        gauge: Gauge,
    ) -> None:
        self.uid = uid
        self.pod = pod
        self._pods = pods
        self._token = token
        self._wake = wake
        self._gauge = gauge
        self._said: _Said | None = None
        self._error = ""
        self._failing_since: float | None = None
        self._unauthorized = self._unconnected = False
        self._answered = False
        self._started = time.monotonic()
        self._background = Background()

    def start(self) -> None:
        """Begin to ask."""
        self._background.start(self._run())

    async def stop(self) -> None:
        """End the task; a held poll is given up."""
        await self._background.stop()

    def unheard(self, patience_s: float) -> float:
        """Return the rest of ``patience_s`` while the pod has neither answered nor failed to."""
        if self._answered:
            return 0.0
        return max(0.0, self._started + patience_s - time.monotonic())

    def report(self) -> Report:
        """Return what is known of the pod."""
        since, said = self._failing_since, self._said
        return Report(
            state=None if said is None else StateDocument.model_validate_json(said.text),
            error=self._error,
            failing_for=0.0 if since is None else time.monotonic() - since,
            unauthorized=self._unauthorized,
        )

    @property
    def unconnected(self) -> bool:
        """Whether nobody took the last attempt's connection; ``wake`` tells when somebody does."""
        return self._unconnected

    def offer(self, state: StateDocument) -> None:
        """Take a state that the pod answered to another request."""
        self._take(state)

    def _take(self, state: StateDocument) -> bool:
        known = self._said
        if known and known.boot_id == state.boot_id and known.revision >= state.revision:
            return False
        text = state.model_dump_json(exclude_defaults=True).encode()
        self._said = _Said(state.boot_id, state.revision, text)
        return True

    async def _run(self) -> None:
        with self._gauge.track_inprogress():
            await self._listen()

    async def _listen(self) -> None:
        failures = 0
        while True:
            well = self._failing_since is None
            try:
                # bound to no name, which would keep it until the next one comes
                self._heard(await self._ask())
            except Exception as error:
                if not isinstance(error, PodError):
                    # a bug must not end the only one who listens
                    log.exception("poll failed", pod_uid=self.uid)
                first, denied = self._failing_since is None, self._unauthorized
                self._fail(error)
                # a token that is refused is for the worker to read again
                if first or (self._unauthorized and not denied):
                    self._wake()
                delay = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                failures += 1
                await asyncio.sleep(delay * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
                continue
            if well:
                # not at once: of some pods only held polls fail
                failures = 0

    async def _ask(self) -> StateDocument:
        if self._failing_since is None:
            return await self._pods.get_state(self.pod, self._token(), after=self._said)
        # a pod that is back answers at once: held, its answer would tell only later that it is
        return await self._pods.get_state(self.pod, self._token(), after=None, timeout=0.0)

    def _heard(self, state: StateDocument) -> None:
        mended = self._failing_since is not None
        self._error, self._failing_since = "", None
        self._unauthorized = self._unconnected = False
        if self._take(state) or mended or not self._answered:
            self._answered = True
            self._wake()

    def _fail(self, error: Exception) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        self._error = str(error) or type(error).__name__
        self._unauthorized = isinstance(error, Unauthorized)
        self._unconnected = isinstance(error, NotConnected)
        self._answered = True

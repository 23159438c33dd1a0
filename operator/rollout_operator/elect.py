"""Keeps the Lease, and says when this operator begins and ends to work."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import structlog

from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.kube import LEASES, JsonObject, Kube
from rollout_operator.background import Background
from rollout_operator.metrics import Metrics
from rollout_operator.plan.lease import LeaseSeen, Move, Timing, held, may_work, next_move, released

_RELEASE_DEADLINE_S: Final = 2.0

log = structlog.get_logger(__name__)


def steady() -> float:
    """Return seconds of a clock that no one sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Elector:
    """One task that takes, renews and gives back one Lease.

    kubernetes.aio has a leader election, too. It reads the wall clock, lets a request that hangs
    outlast its deadline, and never gives a Lease back.
    """

    def __init__(
        self,
        kube: Kube,
        *,
        name: str,
        namespace: str,
        me: str,
        timing: Timing,
        gained: Callable[[], None],
        lost: Callable[[], Awaitable[None]],
        metrics: Metrics,
        clock: Callable[[], float] = steady,
    ) -> None:
        self._kube = kube
        self._name = name
        self._namespace = namespace
        self._me = me
        self._timing = timing
        self._gained = gained
        self._lost = lost
        self._metrics = metrics
        self._clock = clock
        self._known: LeaseSeen | None = None
        self._known_since = 0.0
        self._exists = False
        self._current = False
        """``_known`` was read or written so lately that a write may be tried on it."""
        self._renewed_at: float | None = None
        self._working = False
        self._background = Background()
        self.trouble = ""
        """Why the Lease can be neither read nor written; empty while it can."""

    def may_work(self) -> bool:
        """Tell whether nobody else can be working now."""
        return self._working and may_work(self._renewed_at, self._clock(), self._timing)

    def start(self) -> None:
        """Begin to ask for the Lease."""
        self._background.start(self._run())

    async def stop(self) -> None:
        """End the work, then let the next candidate have the Lease at once."""
        await self._background.stop()
        held_still = self.may_work()
        await self._step_down("stopped")
        if held_still:
            await self._release()

    async def _run(self) -> None:
        while True:
            succeeded = await self._attempt()
            if self._working and self._due_s() <= 0:
                await self._step_down(self.trouble or f"{self._holder()} holds the Lease")
            elif not self._working and self._due_s() > 0:
                self._begin()
            await asyncio.sleep(self._pause_s(succeeded))

    async def _attempt(self) -> bool:
        """Look at the Lease and renew or take it if that may be done; False: no answer."""
        limit = self._due_s() if self._working else self._timing.renew_deadline
        try:
            async with asyncio.timeout(limit):
                await self._move()
        except KubeError as error:
            # at a conflict somebody was faster, or an earlier answer was lost
            self._current = False
            if not error.conflict:
                self._complain(str(error))
            return False
        except TimeoutError:
            self._current = False
            self._complain("the API server does not answer in time")
            return False
        except Exception as error:
            # a bug must not leave a holder that neither renews nor steps down
            log.exception("lease attempt failed")
            self._current = False
            self.trouble = f"{type(error).__name__}: {error}"
            return False
        self.trouble = ""
        return True

    async def _move(self) -> None:
        if not (self._current and self._holder() == self._me):
            raw = await self._kube.get(LEASES, self._namespace, self._name)
            self._see(raw)
        move = next_move(
            self._known,
            exists=self._exists,
            me=self._me,
            unchanged_s=self._clock() - self._known_since,
        )
        if move is Move.WAIT:
            self._renewed_at = None
            return
        # from before the request: the others count from when they see what it wrote
        begun = self._clock()
        body = held(
            self._known if self._exists else None,
            name=self._name,
            namespace=self._namespace,
            me=self._me,
            stamp=_stamp(),
            timing=self._timing,
        )
        if move is Move.CREATE:
            answer = await self._kube.create(LEASES, self._namespace, body)
        else:
            answer = await self._kube.replace(LEASES, self._namespace, self._name, body)
        self._see(answer)
        self._renewed_at = begun

    def _see(self, raw: JsonObject | None) -> None:
        self._exists = self._current = raw is not None
        if raw is None:
            return
        seen = LeaseSeen.parse(raw)
        if self._known is None or self._known.version != seen.version:
            self._known, self._known_since = seen, self._clock()

    def _holder(self) -> str:
        return self._known.holder if self._known is not None else ""

    def _due_s(self) -> float:
        """Seconds that remain of our time; 0 or less: none."""
        if self._renewed_at is None:
            return 0.0
        return self._renewed_at + self._timing.renew_deadline - self._clock()

    def _pause_s(self, succeeded: bool) -> float:
        if self._working and succeeded:
            return min(self._timing.renew_every, max(0.0, self._due_s()))
        # jitter, so that candidates do not ask in step
        pause = self._timing.retry * random.uniform(0.8, 1.0)  # noqa: S311 - jitter
        return min(pause, max(0.0, self._due_s())) if self._working else pause

    def _begin(self) -> None:
        self._working = True
        self._metrics.leader.set(1)
        log.info("works from now on", lease=self._name, holder=self._me)
        self._gained()

    async def _step_down(self, why: str) -> None:
        if not self._working:
            return
        self._working = False
        self._metrics.leader.set(0)
        log.warning("works no longer", lease=self._name, reason=why)
        await self._lost()

    async def _release(self) -> None:
        if self._known is None or self._holder() != self._me:
            return
        body = released(self._known, name=self._name, namespace=self._namespace, stamp=_stamp())
        try:
            async with asyncio.timeout(_RELEASE_DEADLINE_S):
                await self._kube.replace(LEASES, self._namespace, self._name, body)
        except (KubeError, TimeoutError) as error:
            # the others wait until it runs out
            log.warning("lease not released", reason=str(error) or "no answer in time")

    def _complain(self, text: str) -> None:
        if text != self.trouble:
            log.warning("no lease", lease=f"{self._namespace}/{self._name}", reason=text)
        self.trouble = text


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

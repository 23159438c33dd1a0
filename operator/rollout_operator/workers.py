"""One asyncio task per replica: waits to be woken, runs a pass, backs off, never dies silently.

There are tasks only while this operator may work (``elect.Elector``).
"""

import asyncio
import contextvars
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

import structlog

from rollout_operator.apply.cache import Key
from rollout_operator.apply.errors import KubeError
from rollout_operator.memory import Memory
from rollout_operator.metrics import Metrics
from rollout_operator.reconcile import Next

PASS_DEADLINE_S: Final = 60.0
QUEUE_DEADLINE_S: Final = 300.0
"""So long a pass may wait for its turn; only a start with very many replicas comes near."""
FAST_LANE: Final = 24
"""Passes at once."""
SLOW_LANE: Final = 8
"""Passes at once over replicas whose last one failed or was slow: they wait for each other only."""
_SLOW_S: Final = 2.0
_REPORT_DEADLINE_S: Final = 30.0
_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)

log = structlog.get_logger(__name__)


class Pass(Protocol):
    """One pass over a replica (``Reconciler.reconcile``)."""

    def __call__(
        self, key: Key, memory: Memory, *, fresh: bool, wake: Callable[[], None]
    ) -> Awaitable[Next | None]:
        """Return when to look again; None ends the worker."""


class Report(Protocol):
    """Makes a pass that failed for no known reason visible (``Reconciler.report_failure``)."""

    def __call__(self, key: Key, error: Exception) -> Awaitable[None]:
        """Write it where people look."""


class _Worker:
    """What is known of one task."""

    __slots__ = ("due", "fresh", "memory", "slow", "task", "woken")

    def __init__(self) -> None:
        self.memory = Memory()
        self.woken = asyncio.Event()
        self.fresh = False
        self.slow = False
        """Its last pass failed, or took long."""
        self.due = 0.0
        """Monotonic time by which its present pass must have ended or its next one begun."""
        self.task: asyncio.Task[None] | None = None


class Workers:
    """All workers. Events that come during a pass make exactly one more pass."""

    def __init__(
        self,
        run: Pass,
        *,
        report: Report,
        metrics: Metrics,
        ended: Callable[[Key], None] = lambda _: None,
    ) -> None:
        self._run = run
        self._report = report
        self._metrics = metrics
        self._ended = ended
        self._workers: dict[Key, _Worker] = {}
        self._open = False
        # asyncio's semaphores serve in the order in which they were asked
        self._fast = asyncio.Semaphore(FAST_LANE)
        self._slow = asyncio.Semaphore(SLOW_LANE)

    def open(self) -> None:
        """Let wake-ups begin workers from now on."""
        self._open = True

    def wake(self, key: Key, *, fresh: bool = False) -> None:
        """Have a pass run soon, where workers may run; ``fresh``: without trust in the cache."""
        if not self._open:
            return
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = _Worker()
            self._metrics.replicas.set(len(self._workers))
            worker.due = time.monotonic() + QUEUE_DEADLINE_S
            # an empty context: the watcher's own would pin the event's body for good
            worker.task = asyncio.create_task(
                self._work(key, worker), context=contextvars.Context()
            )
        worker.fresh |= fresh
        worker.woken.set()

    def knows(self, key: Key) -> bool:
        """Tell whether the replica has a worker."""
        return key in self._workers

    def overdue(self) -> tuple[Key, float] | None:
        """Return the replica that should have been looked at longest ago, with the seconds."""
        now = time.monotonic()
        late = [(now - worker.due, key) for key, worker in self._workers.items()]
        seconds, key = max(late, default=(0.0, ("", "")))
        return (key, seconds) if seconds > 0 else None

    async def stop(self) -> None:
        """End all workers at once. No pod is touched: the next operator goes on."""
        self._open = False
        tasks = [worker.task for worker in self._workers.values() if worker.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # a task that had not begun when it was cancelled did not remove itself
        self._workers.clear()
        self._metrics.replicas.set(0)

    async def _work(self, key: Key, worker: _Worker) -> None:
        failures = 0
        try:
            while True:
                worker.due = time.monotonic() + QUEUE_DEADLINE_S
                async with self._turn(worker):
                    # what comes while it waits for its turn is in this pass
                    worker.woken.clear()
                    fresh, worker.fresh = worker.fresh, False
                    worker.due = time.monotonic() + PASS_DEADLINE_S
                    following, error = await self._pass(key, worker, fresh=fresh)
                worker.slow |= error is not None
                if error is None:
                    failures = 0
                    if following is None:
                        if worker.woken.is_set():
                            continue  # it came back meanwhile
                        return
                else:
                    following = Next(delay=_backoff(failures, error))
                    failures += 1
                await _wait(worker, following)
        finally:
            # no await between the last look at woken and this: a later wake makes a new worker
            if self._workers.get(key) is worker:
                del self._workers[key]
            self._metrics.replicas.set(len(self._workers))
            self._ended(key)
            await worker.memory.close()

    @asynccontextmanager
    async def _turn(self, worker: _Worker) -> AsyncIterator[None]:
        with self._metrics.queued.track_inprogress():
            lane = self._slow if worker.slow else self._fast
            await lane.acquire()
        begun = time.monotonic()
        worker.slow = True
        try:
            yield
            worker.slow = time.monotonic() - begun > _SLOW_S
        finally:
            lane.release()

    async def _pass(
        self, key: Key, worker: _Worker, *, fresh: bool
    ) -> tuple[Next | None, Exception | None]:
        def wake() -> None:
            worker.woken.set()

        started = time.monotonic()
        outcome = "error"
        try:
            async with asyncio.timeout(PASS_DEADLINE_S):
                following = await self._run(key, worker.memory, fresh=fresh, wake=wake)
            outcome = "ok"
        except KubeError as error:
            self._metrics.reconcile_errors.labels(reason=_reason(error)).inc()
            log.warning("pass failed", namespace=key[0], replica=key[1], error=str(error))
            if error.forbidden:
                # only a person can mend that
                await self._tell(key, error)
            return None, error
        except Exception as error:
            # a bug or a deadline in one replica must not stop the others
            self._metrics.reconcile_errors.labels(reason=type(error).__name__).inc()
            log.exception("pass failed", namespace=key[0], replica=key[1])
            await self._tell(key, error)
            return None, error
        finally:
            self._metrics.reconciles.labels(outcome=outcome).inc()
            self._metrics.reconcile_seconds.observe(time.monotonic() - started)
        return following, None

    async def _tell(self, key: Key, error: Exception) -> None:
        try:
            async with asyncio.timeout(_REPORT_DEADLINE_S):
                await self._report(key, error)
        except Exception:
            # the pass is tried again, and this with it
            log.exception("failure not reported", namespace=key[0], replica=key[1])


async def _wait(worker: _Worker, following: Next) -> None:
    worker.due = time.monotonic() + following.delay + PASS_DEADLINE_S
    try:
        async with asyncio.timeout(following.delay):
            await worker.woken.wait()
    except TimeoutError:
        worker.fresh |= following.fresh


def _reason(error: KubeError) -> str:
    return error.reason or (f"HTTP {error.status}" if error.status else "NoAnswer")


def _backoff(failures: int, error: Exception) -> float:
    asked = error.retry_after if isinstance(error, KubeError) and error.retry_after else 0.0
    usual = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
    return max(asked, usual) * random.uniform(0.8, 1.2)  # noqa: S311 - jitter

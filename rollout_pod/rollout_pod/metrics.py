"""The pod's own metrics, beside those of the engine."""

import asyncio
from collections.abc import Callable
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from rollout_pod.admission import CancelCounts
from rollout_pod.protocol import UpdatePhase, UpdateState

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class PodMetrics:
    """A registry of its own: several pods may live in one test process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        ProcessCollector(registry=r)  # memory, file descriptors and time of the pod's own process
        self._tasks = Gauge("rollout_asyncio_tasks", "Tasks of the pod's event loop", registry=r)
        self._gate = Gauge(
            "rollout_gate_open", "1 while requests pass the gate, else 0", registry=r
        )
        self._gate_changed = Gauge(
            "rollout_gate_changed_timestamp_seconds",
            "Unix time at which the gate last opened or closed", registry=r,
        )  # fmt: skip
        self._unfinished = Gauge(
            "rollout_unfinished", "Requests in the engine whose callers have no answer", registry=r
        )
        self._parked = Gauge("rollout_parked", "Requests that wait for the gate", registry=r)
        self._requests = Counter(
            "rollout_requests",
            "Answered requests for generation, by finish reason, cancel reason or problem code",
            ["result"], registry=r,
        )  # fmt: skip
        self._refused = Counter(
            "rollout_refused_requests",
            "Requests that were refused, by problem code or by why the gate was closed",
            ["reason"], registry=r,
        )  # fmt: skip
        self._tokens = Counter(
            "rollout_generated_tokens",
            "Tokens returned to callers, by whether the answer was cut", ["cut"], registry=r,
        )  # fmt: skip
        self._mixed = Counter(
            "rollout_mixed_version_answers",
            "Answers whose tokens are of more than one weight version", registry=r,
        )  # fmt: skip
        self._cancels = Counter(
            "rollout_cancels", "Cancels of all requests, for a pause or an update", registry=r
        )
        self._cancel_requests = Counter(
            "rollout_cancel_aborted_requests", "Requests that cancels cut", registry=r
        )
        self._requests_of = cache(self._requests.labels)  # a look-up costs more than the count
        # both are there from the start, so that they can be compared
        self._tokens_whole, self._tokens_cut = map(self._tokens.labels, ("false", "true"))
        self._cancel_tokens = Counter(
            "rollout_cancel_returned_tokens", "Tokens of requests that cancels cut", registry=r
        )
        self._cancel_seconds = Histogram(
            "rollout_cancel_seconds",
            "From the begin of a cancel until every caller had its partial", registry=r,
            buckets=_SECONDS,
        )  # fmt: skip
        self._updates = Counter(
            "rollout_weight_updates", "Weight updates that ended, by how", ["result"], registry=r
        )
        self._update_seconds = Histogram(
            "rollout_weight_update_seconds", "Time that a weight update spent in a step", ["step"],
            registry=r, buckets=_SECONDS,
        )  # fmt: skip

        self._fetched = Gauge(
            "rollout_weight_fetch_bytes", "Of the version that is being fetched", registry=r
        )
        self._fetch_total = Gauge(
            "rollout_weight_fetch_total_bytes", "Its size; 0 while none is fetched", registry=r
        )

    def watch(
        self,
        *,
        gate_open: Callable[[], bool],
        gate_changed: Callable[[], float],
        unfinished: Callable[[], int],
        parked: Callable[[], int],
        fetched: Callable[[], tuple[int, int]],
    ) -> None:
        """Read these when they are scraped."""
        self._tasks.set_function(_count_tasks)
        self._gate.set_function(lambda: float(gate_open()))
        self._gate_changed.set_function(gate_changed)
        self._unfinished.set_function(unfinished)
        self._parked.set_function(parked)
        self._fetched.set_function(lambda: fetched()[0])
        self._fetch_total.set_function(lambda: fetched()[1])

    def answered(
        self, result: str, *, tokens: int = 0, cut: bool = False, versions: int = 1
    ) -> None:
        """One request for generation was answered: a finish reason, a cancel reason or a problem
        code, with ``tokens`` that so many weight ``versions`` sampled.
        """
        self._requests_of(result).inc()
        (self._tokens_cut if cut else self._tokens_whole).inc(tokens)
        if versions > 1:
            self._mixed.inc()

    def refused(self, reason: str) -> None:
        """A request was refused: a problem code, or why the gate was closed."""
        self._refused.labels(reason).inc()

    def cancelled(self, counts: CancelCounts) -> None:
        """All requests were cut."""
        self._cancels.inc()
        self._cancel_requests.inc(counts.aborted)
        self._cancel_tokens.inc(counts.tokens_returned)
        self._cancel_seconds.observe(counts.seconds)

    def updated(self, update: UpdateState) -> None:
        """An update was committed, failed or was rejected."""
        self._updates.labels(update.phase.lower()).inc()
        if update.phase is UpdatePhase.COMMITTED:
            for step, seconds in update.seconds:
                if seconds is not None:
                    self._update_seconds.labels(step).observe(seconds)

    def paused_for_update(self, seconds: float) -> None:
        """From the gate closed by an update to the gate open again."""
        self._update_seconds.labels("paused").observe(seconds)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


def _count_tasks() -> float:
    try:
        return float(len(asyncio.all_tasks()))
    except RuntimeError:  # read without a loop
        return 0.0

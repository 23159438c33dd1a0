"""What is told of each replica; its series vanish with it, or when another operator serves it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout_operator.api.conditions import ConditionType
from rollout_operator.api.replica import Replica
from rollout_operator.api.status import ReplicaStatus
from rollout_operator.apply.cache import Key
from rollout_operator.plan.document import wanted_version

_OWN = ("namespace", "name")


@dataclass(frozen=True, slots=True)
class _Shown:
    uid: str
    ready: bool
    behind_since: float | None
    steps: int | None
    restarts: tuple[tuple[str, int], ...]


class ReplicaSeries(Collector):
    """Rendered when asked for: five thousand replicas hold five thousand small records."""

    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shown: dict[Key, _Shown] = {}
        registry.register(self)

    def show(self, replica: Replica, status: ReplicaStatus) -> None:
        """Tell of a replica what its newest status says."""
        key, spec = (replica.namespace, replica.name), replica.spec
        known = self._shown.get(key)
        behind, steps = None, None
        if spec is not None:
            if status.weight_version != wanted_version(spec):
                since = (
                    known.behind_since if known is not None and known.uid == replica.uid else None
                )
                behind = self._clock() if since is None else since
            held = status.last_committed.step if status.last_committed else None
            if spec.weight_step is not None and held is not None:
                steps = spec.weight_step - held
        ready = status.condition(ConditionType.READY)
        counts = status.restarts.by_reason if status.restarts is not None else ()
        self._shown[key] = _Shown(
            # one that was made anew owes nothing of what the one before did
            uid=replica.uid,
            ready=ready is not None and ready.status == "True",
            behind_since=behind,
            steps=steps,
            restarts=tuple((one.reason, one.count) for one in counts),
        )

    def forget(self, key: Key) -> None:
        """Tell no more of a replica."""
        self._shown.pop(key, None)

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        # one after the other: of thousands of replicas, each takes megabytes
        yield self._ready()
        yield self._lag()
        yield self._steps()
        yield self._restarts()

    def _ready(self) -> Metric:
        ready = GaugeMetricFamily(
            "rollout_replica_ready", "1 while the replica is Ready, else 0", labels=_OWN
        )
        for key, shown in self._shown.items():
            ready.add_metric(key, float(shown.ready))
        return ready

    def _steps(self) -> Metric:
        steps = GaugeMetricFamily(
            "rollout_replica_weight_lag_steps",
            "spec.weightStep less the step that was committed last, where both are known",
            labels=_OWN,
        )
        for key, shown in self._shown.items():
            if shown.steps is not None:
                steps.add_metric(key, float(shown.steps))
        return steps

    def _restarts(self) -> Metric:
        restarts = GaugeMetricFamily(
            "rollout_replica_restarts",
            "ends of the replica's pods and engines so far, by reason, as status.restarts counts",
            labels=(*_OWN, "reason"),
        )
        for key, shown in self._shown.items():
            for reason, count in shown.restarts:
                restarts.add_metric((*key, reason), float(count))
        return restarts

    def _lag(self) -> Metric:
        seconds = GaugeMetricFamily(
            "rollout_replica_weight_lag_seconds",
            "how long the replica has held another version than it should; 0 while it holds it",
            labels=_OWN,
        )
        now = self._clock()
        for key, shown in self._shown.items():
            lag = 0.0 if shown.behind_since is None else max(0.0, now - shown.behind_since)
            seconds.add_metric(key, lag)
        return seconds

"""The flow of one pass: observe, plan, act, tell the pod, write the status."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from rollout_operator.api import names
from rollout_operator.api.conditions import ConditionType, Reason
from rollout_operator.api.replica import Replica
from rollout_operator.api.selector import Selector
from rollout_operator.api.status import ReplicaStatus
from rollout_operator.apply.cache import Key
from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.events import transitions
from rollout_operator.apply.executor import Executor
from rollout_operator.apply.kube import REPLICAS, Kube
from rollout_operator.control.pod_client import PodClient
from rollout_operator.memory import Memory
from rollout_operator.metrics import Metrics
from rollout_operator.observe import Caches, Observer, report
from rollout_operator.plan.actions import Plan
from rollout_operator.plan.diagnosis import UNREACHABLE_GRACE_S
from rollout_operator.plan.history import finished_steps
from rollout_operator.plan.observed import Seen
from rollout_operator.plan.plan import PodDefaults, make_plan
from rollout_operator.plan.restarts import newly_counted
from rollout_operator.plan.status import render_failure, render_refusal, render_status
from rollout_operator.series import ReplicaSeries
from rollout_operator.steer import Steering

_ROUNDS: Final = 6
_RESTLESS_S: Final = 1.0
_SETTLE_S: Final = 0.3
"""So long a pod may take to do what it was told before "on its way" is worth a write."""
_PASSING: Final = frozenset(
    {
        Reason.PAUSING,
        Reason.RESUMING,
        Reason.UPDATING,
        Reason.AWAITING_PUSH,  # its trainer may be pushing by now
        Reason.LOADING_WEIGHTS,
    }
)


@dataclass(frozen=True, kw_only=True)
class Next:
    """When to look again if nothing happens before; ``fresh``: without trust in the cache."""

    delay: float
    fresh: bool = True


class Reconciler:
    """Everything that a pass needs; holds no state of a replica."""

    def __init__(
        self,
        kube: Kube,
        pods: PodClient,
        caches: Caches,
        *,
        defaults: PodDefaults,
        metrics: Metrics,
        resync_s: float,
        selector: Selector,
        series: ReplicaSeries,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kube = kube
        self._caches = caches
        self._defaults = defaults
        self._resync_s = resync_s
        self._clock = clock
        self._observer = Observer(kube, caches, selector=selector, resync_s=resync_s)
        self._executor = Executor(
            kube, pods=caches.pods, services=caches.services, metrics=metrics, clock=clock
        )
        self._metrics = metrics
        self._series = series
        self._steering = Steering(pods, self._observer, metrics=metrics)

    async def reconcile(
        self, key: Key, memory: Memory, *, fresh: bool, wake: Callable[[], None]
    ) -> Next | None:
        """Bring one replica nearer to its spec. None: there is no such replica any more.

        Raises:
            KubeError: the API server did not answer; try again later.
        """
        current = await self._observer.replica(key, fresh=fresh)
        for _ in range(_ROUNDS):
            if current is None:
                return None
            replica = current
            await memory.belong_to(replica.uid)
            now = self._clock()
            seen = await self._observer.observe(replica, memory, fresh=fresh, now=now)
            fresh = False
            plan = make_plan(replica, seen, now, defaults=self._defaults)
            if plan.actions:
                current = await self._act(replica, plan, memory)
                continue
            unheard = await self._steering.listen(replica, plan, seen.pod, memory, wake)
            if unheard > 0:
                return Next(delay=unheard, fresh=False)
            steered = await self._steering.steer(replica, plan, seen.pod, memory)
            if not steered.again:
                seen = replace(seen, report=report(memory, seen.pod))
                return await self._conclude(replica, seen, plan, memory, steered.retry)
            current = steered.replica
        return Next(delay=_RESTLESS_S)

    async def report_failure(self, key: Key, error: Exception) -> None:
        """Write down, once, that passes over the replica end in ``error``: one that nobody foresaw,
        or that the API server forbids what they need.

        Raises:
            KubeError: the API server did not answer.
        """
        replica = await self._observer.replica(key, fresh=True)
        if replica is None or replica.deleting:
            return
        if isinstance(error, KubeError):
            text = f"the API server refuses the operator: {error.message or error.reason}"
            status = render_refusal(replica, text, self._clock())
        else:
            status = render_failure(replica, error, self._clock())
        if status != replica.status:
            await self._write(replica, status)

    async def _act(self, replica: Replica, plan: Plan, memory: Memory) -> Replica | None:
        newest = await self._observer.replica((replica.namespace, replica.name), fresh=True)
        # nothing is made or destroyed for a spec that is no longer the newest
        if newest is not None and newest.same_as(replica):
            for action in plan.actions:
                if not await self._executor.execute(action, replica, memory):
                    break
        return newest

    async def _conclude(
        self, replica: Replica, seen: Seen, plan: Plan, memory: Memory, retry: float | None
    ) -> Next:
        waits = [plan.requeue_after, retry]
        if seen.report is not None and 0 < seen.report.failing_for < UNREACHABLE_GRACE_S:
            waits.append(UNREACHABLE_GRACE_S - seen.report.failing_for + 0.1)
        status = render_status(replica, seen, plan, self._clock())
        self._series.show(replica, status)
        if status != replica.status:
            left = _settling(status, memory)
            if left > 0:
                return Next(delay=left, fresh=False)
            newest = await self._write(replica, status)
            # a spec that the answer was the first to show wakes nobody: its event is no news then
            asks_for_more = not newest.same_as(replica)
            # or the pod's fallback is another one now
            if asks_for_more or status.last_committed != replica.status.last_committed:
                return Next(delay=0, fresh=False)
        resync = self._resync_s * random.uniform(0.9, 1.1)  # noqa: S311 - jitter
        soonest = min((wait for wait in waits if wait is not None), default=resync)
        # what the watches lose the lists find (``relist``): one read for all, not one for each
        return Next(delay=soonest) if soonest < resync else Next(delay=resync, fresh=False)

    async def _write(self, replica: Replica, status: ReplicaStatus) -> Replica:
        """Returns the replica as the API server has it now."""
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            # the uid is a precondition: never the status of another replica of this name
            "metadata": {
                "name": replica.name,
                "namespace": replica.namespace,
                "uid": replica.uid,
            },
            "status": status.dump(),
        }
        answer = await self._kube.apply(
            REPLICAS, replica.namespace, replica.name, body, subresource="status"
        )
        self._caches.replicas.put(answer)
        for reason, count in newly_counted(replica.status.restarts, status.restarts).items():
            self._metrics.restarts.labels(reason=reason).inc(count)
        for step, seconds in finished_steps(replica.status, status).items():
            self._metrics.update_seconds.labels(step=step).observe(seconds)
        for kind, reason, message in transitions(replica.status, status):
            await self._executor.tell(replica, kind, reason, message)
        return Replica.parse(answer)


def _settling(status: ReplicaStatus, memory: Memory) -> float:
    ready = status.condition(ConditionType.READY)
    if memory.told is None or ready is None or ready.reason not in _PASSING:
        return 0.0
    return memory.told.at + _SETTLE_S - time.monotonic()

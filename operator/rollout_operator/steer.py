"""Tells pods what to become, and keeps listening to them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from rollout_operator.api.replica import Replica
from rollout_operator.control.pod_client import (
    Fenced,
    PodClient,
    Refused,
    Unauthorized,
    Unreachable,
)
from rollout_operator.control.pod_watch import PodWatch
from rollout_operator.control.routes import PodAddress
from rollout_operator.memory import Memory, Told
from rollout_operator.metrics import Metrics
from rollout_operator.observe import Observer, token
from rollout_operator.plan.actions import Plan
from rollout_operator.plan.observed import PodSeen, Report
from rollout_pod.protocol import DesiredDocument, StateDocument

_FIRST_ANSWER_S: Final = 2.0
_RETRY_S: Final = 5.0
_UNCONNECTED_RETRY_S: Final = 30.0
_REFUSED_RETRY_S: Final = 60.0
"""A pod that refused a document may take it later: its disk was full, say."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Steered:
    """What came of it."""

    replica: Replica | None
    """Read afresh where the pod knew better; None if it is gone."""
    again: bool = False
    """What was learnt calls for another plan."""
    retry: float | None = None


class Steering:
    """The way to the pods' admin ports."""

    def __init__(self, pods: PodClient, observer: Observer, *, metrics: Metrics) -> None:
        self._pods = pods
        self._observer = observer
        self._metrics = metrics

    async def listen(
        self,
        replica: Replica,
        plan: Plan,
        pod: PodSeen | None,
        memory: Memory,
        wake: Callable[[], None],
    ) -> float:
        """Hold a long poll to the pod that the plan steers, and to no other.

        Returns for how many seconds it is too early to judge: the pod is about to answer.
        """
        wanted = pod if plan.document is not None and pod is not None and pod.answering else None
        current = memory.watch
        if current and (wanted is None or (current.uid, current.pod.ip) != (wanted.uid, wanted.ip)):
            await memory.close()
        if wanted is None:
            return 0.0
        if memory.watch is None:
            memory.watch = self._watch(replica, wanted, memory, wake)
        # after a restart of the operator: look before the status is touched
        return memory.watch.unheard(_FIRST_ANSWER_S) if wanted.ready else 0.0

    def _watch(
        self, replica: Replica, wanted: PodSeen, memory: Memory, wake: Callable[[], None]
    ) -> PodWatch:
        watch = PodWatch(
            self._pods,
            uid=wanted.uid,
            pod=_address(replica, wanted),
            token=lambda: token(memory),
            wake=wake,
            gauge=self._metrics.polls,
        )
        watch.start()
        return watch

    async def steer(
        self, replica: Replica, plan: Plan, pod: PodSeen | None, memory: Memory
    ) -> Steered:
        """Tell the pod its document unless it is known to have it."""
        watch, document = memory.watch, plan.document
        if pod is None or document is None or watch is None or memory.fenced_uid == pod.uid:
            return Steered(replica=replica)
        report = watch.report()
        if report.unauthorized:
            await self._observer.read_secret(replica, memory)
        if _has(memory.told, pod, document, report):
            done = report.state is None or _done(memory.told, report.state, document)
            return Steered(replica=replica, retry=None if done else _again_s(memory.told))
        if watch.unconnected:
            # seconds of a lane in vain, for each of many: the poll wakes us when it gets through
            return Steered(replica=replica, retry=_UNCONNECTED_RETRY_S)
        try:
            state = await self._pods.put_desired(_address(replica, pod), token(memory), document)
        except Fenced as error:
            return await self._fenced(replica, pod, memory, str(error))
        except Refused as error:
            boot = report.state.boot_id if report.state else ""
            memory.told = _told(pod, boot, document, refused=str(error))
            log.warning("document refused", replica=replica.name, pod=pod.name, error=str(error))
            return Steered(replica=replica, retry=_REFUSED_RETRY_S)
        except Unauthorized:
            memory.denied = True
            await self._observer.read_secret(replica, memory)
            return Steered(replica=replica, retry=_RETRY_S)
        except Unreachable:
            return Steered(replica=replica, retry=_RETRY_S)
        memory.denied = False
        watch.offer(state)
        memory.told = _told(pod, state.boot_id, document)
        return Steered(replica=replica)

    async def _fenced(self, replica: Replica, pod: PodSeen, memory: Memory, error: str) -> Steered:
        newest = await self._observer.replica((replica.namespace, replica.name), fresh=True)
        if newest is not None and newest.same_as(replica):
            log.warning("fenced", replica=replica.name, pod=pod.name, error=error)
            memory.fenced_uid = pod.uid
        return Steered(replica=newest, again=True)


def _address(replica: Replica, pod: PodSeen) -> PodAddress:
    return PodAddress(namespace=replica.namespace, name=pod.name, ip=pod.ip)


def _told(pod: PodSeen, boot_id: str, document: DesiredDocument, *, refused: str = "") -> Told:
    return Told(
        pod_uid=pod.uid,
        boot_id=boot_id,
        document=document.model_dump_json(),
        at=time.monotonic(),
        refused=refused,
    )


def _has(told: Told | None, pod: PodSeen, document: DesiredDocument, report: Report) -> bool:
    if told is None or told.pod_uid != pod.uid or told.document != document.model_dump_json():
        return False
    state = report.state
    if state is None:
        return True
    if state.boot_id != told.boot_id:
        return False
    # one that took the document a moment ago may need another to act on it
    return _done(told, state, document) or _again_s(told) > 0


def _done(told: Told | None, state: StateDocument, document: DesiredDocument) -> bool:
    refused = told is not None and bool(told.refused)
    return not refused and _obeys(state, document)


def _again_s(told: Told | None) -> float:
    """Seconds until a pod that was told and does not obey is told again."""
    if told is None:
        return 0.0
    wait = _REFUSED_RETRY_S if told.refused else _RETRY_S
    return max(0.0, told.at + wait - time.monotonic())


def _obeys(state: StateDocument, document: DesiredDocument) -> bool:
    return (state.owner, state.generation) == (document.owner, document.generation)

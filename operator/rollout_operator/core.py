"""The operator between its two ways out: to the API server and to the pods. Knows neither's I/O."""

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Callable
from typing import Final

from rollout_operator.api.selector import Selector
from rollout_operator.apply.cache import Cache, Key, slim_pod
from rollout_operator.apply.kube import Kube
from rollout_operator.apply.leased import LeasedKube
from rollout_operator.background import Background
from rollout_operator.control.pod_client import PodClient
from rollout_operator.elect import Elector, steady
from rollout_operator.hub import Hub
from rollout_operator.metrics import Metrics
from rollout_operator.observe import Caches
from rollout_operator.plan.lease import Timing
from rollout_operator.plan.plan import PodDefaults
from rollout_operator.reconcile import Reconciler
from rollout_operator.relist import Relist
from rollout_operator.series import ReplicaSeries
from rollout_operator.settings import Settings
from rollout_operator.workers import Workers

_STAND_S: Final = 2.0
"""So long a first list waits for the election."""


class Core:
    """Hub, workers and elector of one operator."""

    def __init__(
        self,
        settings: Settings,
        *,
        kube: Kube,
        pods: PodClient,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        steady_clock: Callable[[], float] = steady,
    ) -> None:
        self._metrics = metrics
        self._starting, self._opening = Background(), Background()
        self._gained = asyncio.Event()
        series = ReplicaSeries(metrics.registry, clock=clock)
        caches = Caches(replicas=Cache(), pods=Cache(slim=slim_pod), services=Cache())
        selector = Selector.parse(settings.replica_selector)
        reconciler = Reconciler(
            LeasedKube(kube, self.may_work),
            pods,
            caches,
            defaults=PodDefaults(
                image=settings.default_image, image_pull_policy=settings.image_pull_policy
            ),
            metrics=metrics,
            resync_s=settings.resync_seconds,
            selector=selector,
            series=series,
            clock=clock,
        )
        self._workers = Workers(
            reconciler.reconcile,
            report=reconciler.report_failure,
            metrics=metrics,
            ended=series.forget,
        )
        self.hub = Hub(caches, self._workers)
        self._relist = Relist(
            kube,
            caches,
            self.hub,
            namespaces=settings.namespaces(),
            selector=selector,
            period_s=settings.resync_seconds,
            wanted=self.may_work,
        )
        lease = settings.lease()
        self._elector = lease and Elector(
            kube,
            namespace=lease[0],
            name=lease[1],
            me=settings.identity or f"{socket.gethostname()}_{uuid.uuid4()}",
            timing=Timing(duration=settings.lease_seconds),
            gained=self._gain,
            lost=self._lose,
            metrics=metrics,
            clock=steady_clock,
        )

    def start(self) -> None:
        """List everything, then work; or stand for election, and then list and work."""
        self._starting.start(self._stand())

    async def _stand(self) -> None:
        if self._elector:
            self._elector.start()
            # whoever is elected at once lists once
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STAND_S):
                    await self._gained.wait()
            self._relist.start()
        else:
            self._relist.start()
            # without it every worker would read its replica's children one by one
            await self._relist.first.wait()
            self._metrics.leader.set(1)
            self._begin()

    async def stop(self) -> None:
        """End all work, and give the Lease back."""
        await self._starting.stop()
        await self._opening.stop()
        await self._relist.stop()
        if self._elector:
            await self._elector.stop()
        await self._workers.stop()

    def may_work(self) -> bool:
        """Tell whether no other operator can be working now."""
        return self._elector.may_work() if self._elector else True

    def trouble(self) -> str:
        """Return why this operator can neither work nor wait for its turn; empty else."""
        if not self._relist.first.is_set():
            return f"nothing is listed yet: {self._relist.trouble or 'on its way'}"
        if self._elector and self._elector.trouble:
            return f"no Lease: {self._elector.trouble}"
        return ""

    def overdue(self) -> tuple[Key, float] | None:
        """Return the replica that should have been looked at longest ago, with the seconds."""
        return self._workers.overdue()

    def _gain(self) -> None:
        self._gained.set()
        self._opening.start(self._open())

    async def _open(self) -> None:
        """Work, once it is known what the operator before did last: its watches saw it, ours may
        have lost it.
        """
        await self._relist.renew()
        if self.may_work():
            self._begin()

    async def _lose(self) -> None:
        await self._opening.stop()
        await self._workers.stop()

    def _begin(self) -> None:
        self._workers.open()
        self.hub.all()

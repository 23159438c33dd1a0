"""Puts the parts together, starts and stops them."""

import asyncio
import socket
import uuid
from contextlib import AsyncExitStack
from typing import Final

import structlog

from rollout_operator.api import names
from rollout_operator.apply.cache import Cache
from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.kube import KubeApi
from rollout_operator.apply.leased import LeasedKube
from rollout_operator.control.pod_client import PodClient
from rollout_operator.elect import Elector
from rollout_operator.hub import Hub
from rollout_operator.metrics import Metrics
from rollout_operator.observe import Caches
from rollout_operator.plan.lease import Timing
from rollout_operator.plan.plan import PodDefaults
from rollout_operator.probes import serving
from rollout_operator.reconcile import Reconciler
from rollout_operator.settings import Settings
from rollout_operator.workers import Workers

_CRD_POLL_S: Final = 2.0

log = structlog.get_logger(__name__)


class Runtime:
    """Everything that lives as long as the operator does."""

    def __init__(self, settings: Settings, *, server: str | None = None) -> None:
        self.settings = settings
        self.server = server
        """The API server's plain address; None: found as usual."""
        self.metrics = Metrics()
        self.ports: tuple[int, int] = (0, 0)
        """Of metrics and probes, once started."""
        self.watching = asyncio.Event()
        """Set when the watches begin."""
        self._stack = AsyncExitStack()
        self._workers: Workers | None = None
        self._hub: Hub | None = None
        self._elector: Elector | None = None

    @property
    def hub(self) -> Hub:
        """Where watch events go."""
        if self._hub is None:
            raise RuntimeError("the operator has not started")
        return self._hub

    async def start(self) -> None:
        """Start all parts; waits until the API server serves our kind."""
        settings = self.settings
        self.ports = await self._stack.enter_async_context(
            serving(
                metrics=self.metrics,
                healthy=self._unhealthy,
                ready=self._unready,
                address=settings.probe_address,
                metrics_port=settings.metrics_port,
                probe_port=settings.probe_port,
            )
        )
        kube = await KubeApi.connect(metrics=self.metrics, server=self.server)
        self._stack.push_async_callback(kube.close)
        pods = await self._stack.enter_async_context(
            PodClient(metrics=self.metrics, admin_port=settings.admin_port, may_work=self._may_work)
        )
        caches = Caches(replicas=Cache(), pods=Cache())
        reconciler = Reconciler(
            LeasedKube(kube, self._may_work),
            pods,
            caches,
            defaults=PodDefaults(
                image=settings.default_image, image_pull_policy=settings.image_pull_policy
            ),
            metrics=self.metrics,
            resync_s=settings.resync_seconds,
        )
        workers = Workers(
            reconciler.reconcile, report=reconciler.report_failure, metrics=self.metrics
        )
        self._stack.push_async_callback(workers.stop)
        await _kind_served(kube)
        self._workers, self._hub = workers, Hub(caches, workers)
        self._elect(kube)
        log.info("started", namespaces=settings.namespaces() or "all")

    def _elect(self, kube: KubeApi) -> None:
        lease = self.settings.lease()
        if lease is None:
            self.metrics.leader.set(1)
            self._begin()
            return
        self._elector = Elector(
            kube,
            namespace=lease[0],
            name=lease[1],
            me=self.settings.identity or f"{socket.gethostname()}_{uuid.uuid4()}",
            timing=Timing(duration=self.settings.lease_seconds),
            gained=self._begin,
            lost=self._end,
            metrics=self.metrics,
        )
        self._stack.push_async_callback(self._elector.stop)
        self._elector.start()

    def _may_work(self) -> bool:
        return self._elector is None or self._elector.may_work()

    def _begin(self) -> None:
        if self._workers is not None:
            self._workers.open()
            self.hub.all()

    async def _end(self) -> None:
        if self._workers is not None:
            await self._workers.stop()

    async def stop(self) -> None:
        """Stop all parts, within seconds. Pods go on by themselves."""
        self.watching.clear()
        await self._stack.aclose()
        log.info("stopped")

    def _unhealthy(self) -> str:
        late = self._workers.overdue() if self._workers is not None else None
        if late is None or late[1] < self.settings.hang_seconds:
            return ""
        (namespace, name), seconds = late
        return f"replica {namespace}/{name} should have been looked at {seconds:.0f} s ago"

    def _unready(self) -> str:
        if not self.watching.is_set():
            return "not watching yet"
        return (
            f"no Lease: {self._elector.trouble}" if self._elector and self._elector.trouble else ""
        )


async def _kind_served(kube: KubeApi) -> None:
    told = ""
    while True:
        try:
            if await kube.served():
                return
            text = f"the API server does not serve {names.PLURAL}.{names.GROUP}: install the CRD"
        except KubeError as error:
            text = f"the API server: {error}"
        if text != told:
            log.warning("waiting", reason=text)
            told = text
        await asyncio.sleep(_CRD_POLL_S)

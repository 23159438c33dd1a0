"""Puts the parts together, starts and stops them."""

import asyncio
from contextlib import AsyncExitStack
from typing import Final

import structlog

from rollout_operator.api import names
from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.kube import KubeApi
from rollout_operator.control.pod_client import PodClient
from rollout_operator.control.routes import Direct, ThroughApiServer
from rollout_operator.core import Core
from rollout_operator.hub import Hub
from rollout_operator.metrics import Metrics
from rollout_operator.probes import serving
from rollout_operator.settings import Settings

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
        self._kube: KubeApi | None = None
        self._core: Core | None = None

    @property
    def hub(self) -> Hub:
        """Where watch events go."""
        if self._core is None:
            raise RuntimeError("the operator has not started")
        return self._core.hub

    async def connect(self) -> None:
        """Find the API server, before all else: what is wrong there no second try mends.

        Raises:
            NoConfiguration: nothing says where it is.
        """
        self._kube = await KubeApi.connect(metrics=self.metrics, server=self.server)
        self._stack.push_async_callback(self._kube.close)

    async def start(self) -> None:
        """Start all parts; waits until the API server serves our kind."""
        settings, kube = self.settings, self._kube
        if kube is None:
            raise RuntimeError("connect first")
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
        pods = await self._stack.enter_async_context(
            PodClient(
                metrics=self.metrics,
                admin_port=settings.admin_port,
                route=(
                    ThroughApiServer(kube.sign, tls=kube.tls)
                    if settings.pod_access == "proxy"
                    else Direct()
                ),
                may_work=self._may_work,
            )
        )
        core = Core(settings, kube=kube, pods=pods, metrics=self.metrics)
        self._stack.push_async_callback(core.stop)
        await _kind_served(kube)
        self._core = core
        core.start()
        log.info("started", namespaces=settings.namespaces() or "all")

    def _may_work(self) -> bool:
        return self._core is not None and self._core.may_work()

    async def stop(self) -> None:
        """Stop all parts, within seconds. Pods go on by themselves."""
        self.watching.clear()
        await self._stack.aclose()
        log.info("stopped")

    def _unhealthy(self) -> str:
        late = self._core.overdue() if self._core is not None else None
        if late is None or late[1] < self.settings.hang_seconds:
            return ""
        (namespace, name), seconds = late
        return f"replica {namespace}/{name} should have been looked at {seconds:.0f} s ago"

    def _unready(self) -> str:
        if not self.watching.is_set():
            return "not watching yet"
        return self._core.trouble() if self._core is not None else "not started yet"


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

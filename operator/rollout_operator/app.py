"""Kopf's part: log in, watch, hand the events on. Nothing else of Kopf is used."""

import asyncio
import os
from typing import Any, Final

import kopf

from rollout_operator.api import names
from rollout_operator.runtime import Runtime
from rollout_operator.unstored import NoDiffBase, NoMemo, NoProgress

_OURS: Final = f"{names.MANAGED_BY_LABEL}={names.MANAGER}"


def build_registry(runtime: Runtime) -> kopf.OperatorRegistry:
    """Return the handlers that feed ``runtime``."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry, id="start")
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        if runtime.settings.replica_selector:
            settings.watching.label_selectors[names.GROUP, names.VERSION, names.PLURAL] = (
                runtime.settings.replica_selector
            )
        await runtime.start()

    @kopf.on.cleanup(registry=registry, id="stop")
    async def stop(**_: Any) -> None:
        await runtime.stop()

    @kopf.on.login(registry=registry, id="login")
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        if runtime.server is not None:
            return kopf.ConnectionInfo(server=runtime.server)
        # the same order as KubeApi.connect
        if os.environ.get("KUBECONFIG"):
            return kopf.login_with_kubeconfig(**kwargs)
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def replica(event: Any, **_: Any) -> None:
        runtime.hub.replica(event)

    @kopf.on.event("v1", "pods", registry=registry)
    async def pod(event: Any, **_: Any) -> None:
        runtime.hub.pod(event)

    @kopf.on.event("v1", "services", registry=registry)
    async def service(event: Any, **_: Any) -> None:
        runtime.hub.service(event)

    return registry


def configure(settings: kopf.OperatorSettings) -> None:
    """Set what proved necessary; all else stays as Kopf has it."""
    settings.peering.standalone = True
    # we know our namespaces and our kind: no permission to list either is needed
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.persistence.finalizer = f"{names.GROUP}/unused"
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    watching = settings.watching
    watching.server_timeout, watching.client_timeout, watching.connect_timeout = 300, 310, 30
    watching.chunk_size = 50
    watching.label_selectors["v1", "pods"] = _OURS
    watching.label_selectors["v1", "services"] = _OURS
    settings.networking.request_timeout = 30
    # Kopf's growing pauses would keep a watch away long after the API server is back
    settings.networking.error_backoffs = [0.2, 0.5, 1, 1] + [2] * 300
    # of thousands of objects at the start, few have a worker of Kopf's at a time
    settings.queueing.idle_timeout = 0.01
    settings.queueing.exit_timeout = 0.2
    settings.process.ultimate_exiting_timeout = 4


async def run(runtime: Runtime, *, stop_flag: asyncio.Event | None = None) -> None:
    """Run until a signal, ``stop_flag`` or an error that a restart has to mend.

    Raises:
        NoConfiguration: nothing says where the API server is.
    """
    namespaces = runtime.settings.namespaces()
    await runtime.connect()
    await kopf.operator(
        registry=build_registry(runtime),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        stop_flag=stop_flag,
        ready_flag=runtime.watching,
        memo=NoMemo(),
    )

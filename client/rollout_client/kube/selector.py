"""Endpoints of all RolloutReplicas with certain labels, watched."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from rollout_client.endpoints import Endpoint, EndpointsUnavailable
from rollout_client.kube.api import Object, ReplicaApi
from rollout_client.kube.errors import ApiError
from rollout_client.kube.replicas import MANAGER

_FIRST_S = 10.0
_RETRY_S = 1.0


class ReplicaSelector:
    """For ``RolloutClient``: follows the RolloutReplicas of a namespace as they come and go.

    Needs the rights ``list`` and ``watch`` on them.

    Args:
        selector: A label selector, such as ``app=math,tier!=canary``; empty for all.
        namespace: That of the context or of the pod we run in, where it is not named.
        server: A plain address instead of the usual configuration, for tests.
    """

    def __init__(
        self, selector: str = "", *, namespace: str | None = None, server: str | None = None
    ) -> None:
        self._selector, self._namespace, self._server = selector, namespace, server
        self._objects: dict[str, Object] | None = None
        self._known = asyncio.Event()
        self._error = "the API server did not answer yet"
        self._task: asyncio.Task[None] | None = None

    async def list(self) -> Sequence[Endpoint]:
        """See ``Endpoints``. The first call begins the watch."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name="replica-selector")
        if self._task.done():
            self._task.result()  # a fault of ours ends every rollout, not this one silently
        if self._objects is None:
            try:
                async with asyncio.timeout(_FIRST_S):
                    await self._known.wait()
            except TimeoutError:
                raise EndpointsUnavailable(self._error) from None
        found = (endpoint_of(body) for body in (self._objects or {}).values())
        return [endpoint for endpoint in found if endpoint is not None]

    async def aclose(self) -> None:
        """See ``Endpoints``."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        api: ReplicaApi | None = None
        try:
            while True:
                try:
                    if api is None:
                        api = await ReplicaApi.connect(
                            namespace=self._namespace, manager=MANAGER, server=self._server
                        )
                    await self._list_and_watch(api)
                except ApiError as error:
                    self._error = str(error)
                    await asyncio.sleep(_RETRY_S)
        finally:
            if api is not None:
                await api.close()

    async def _list_and_watch(self, api: ReplicaApi) -> None:
        found = await api.list(api.namespace, selector=self._selector)
        objects = {body["metadata"]["name"]: body for body in found["items"]}
        self._objects = objects
        self._known.set()
        events = api.watch(
            api.namespace, version=found["metadata"]["resourceVersion"], selector=self._selector
        )
        async with aclosing(events):
            async for kind, body in events:
                if kind == "DELETED":
                    objects.pop(body["metadata"]["name"], None)
                else:
                    objects[body["metadata"]["name"]] = body


def endpoint_of(body: Object) -> Endpoint | None:
    """What a replica's status says of where it is and what it holds; None while it has no address.

    One that is paused or being deleted is not ready: rollouts in flight wait for it or move on.
    """
    status: dict[str, Any] = body.get("status") or {}
    if not status.get("endpoint"):
        return None
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    committed = status.get("lastCommitted") or {}
    is_held = committed.get("version") == status.get("weightVersion")
    return Endpoint(
        url=status["endpoint"],
        is_told=True,
        is_ready=conditions.get("Available") == "True"
        and conditions.get("Paused") != "True"
        and not body["metadata"].get("deletionTimestamp"),
        step=committed.get("step") if is_held else None,
    )

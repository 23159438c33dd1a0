"""Writes to the API server only while this operator may work."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.kube import JsonObject, Kube


class LeasedKube:
    """``Kube`` that asks before each write: a process that slept too long writes nothing."""

    def __init__(self, kube: Kube, may_work: Callable[[], bool]) -> None:
        self._kube = kube
        self._may_work = may_work

    async def get(self, resource: str, namespace: str, name: str) -> JsonObject | None:
        """See ``Kube``."""
        return await self._kube.get(resource, namespace, name)

    def pages(
        self, resource: str, namespace: str, *, selector: str = ""
    ) -> AsyncIterator[JsonObject]:
        """See ``Kube``."""
        return self._kube.pages(resource, namespace, selector=selector)

    async def create(
        self, resource: str, namespace: str, body: Mapping[str, Any], *, dry_run: bool = False
    ) -> JsonObject:
        """See ``Kube``."""
        self._check()
        return await self._kube.create(resource, namespace, body, dry_run=dry_run)

    async def apply(
        self,
        resource: str,
        namespace: str,
        name: str,
        body: Mapping[str, Any],
        *,
        subresource: str = "",
    ) -> JsonObject:
        """See ``Kube``."""
        self._check()
        return await self._kube.apply(resource, namespace, name, body, subresource=subresource)

    async def merge(
        self, resource: str, namespace: str, name: str, body: Mapping[str, Any]
    ) -> JsonObject:
        """See ``Kube``."""
        self._check()
        return await self._kube.merge(resource, namespace, name, body)

    async def replace(
        self, resource: str, namespace: str, name: str, body: Mapping[str, Any]
    ) -> JsonObject:
        """See ``Kube``."""
        self._check()
        return await self._kube.replace(resource, namespace, name, body)

    async def delete(
        self, resource: str, namespace: str, name: str, *, uid: str, force: bool = False
    ) -> JsonObject:
        """See ``Kube``."""
        self._check()
        return await self._kube.delete(resource, namespace, name, uid=uid, force=force)

    def _check(self) -> None:
        if not self._may_work():
            raise KubeError(0, "LeaseLost", "another operator may be working by now")

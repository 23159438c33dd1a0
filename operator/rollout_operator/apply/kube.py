"""The API server behind one small class: raw objects in, raw objects out."""

import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Protocol
from urllib.request import getproxies

import aiohttp
from kubernetes.aio import client, config

from rollout_operator.api import names
from rollout_operator.apply.errors import KubeError, NoConfiguration
from rollout_operator.metrics import Metrics

JsonObject = dict[str, Any]

REPLICAS: Final = names.PLURAL
PODS: Final = "pods"
SERVICES: Final = "services"
SECRETS: Final = "secrets"
EVENTS: Final = "events"
NODES: Final = "nodes"
"""The only kind here that no namespace holds."""
LEASES: Final = "leases"

_PREFIXES: Final = {
    REPLICAS: f"/apis/{names.API_VERSION}",
    LEASES: "/apis/coordination.k8s.io/v1",
}
_TIMEOUT: Final = aiohttp.ClientTimeout(total=20)
_PAGE: Final = 100
_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"
_APPLY: Final = "application/apply-patch+yaml"


class Kube(Protocol):
    """What the operator needs of the API server. Every method raises KubeError."""

    async def get(self, resource: str, namespace: str, name: str) -> JsonObject | None:
        """Return the object as it is now; None if there is none."""

    def pages(
        self, resource: str, namespace: str, *, selector: str = ""
    ) -> AsyncIterator[JsonObject]:
        """Yield lists of a page each; all namespaces where ``namespace`` is empty."""

    async def create(
        self, resource: str, namespace: str, body: Mapping[str, Any], *, dry_run: bool = False
    ) -> JsonObject:
        """Create strictly: an unknown field is an error."""

    async def apply(
        self,
        resource: str,
        namespace: str,
        name: str,
        body: Mapping[str, Any],
        *,
        subresource: str = "",
    ) -> JsonObject:
        """Apply server-side, as the only owner of the fields in ``body``."""

    async def merge(
        self, resource: str, namespace: str, name: str, body: Mapping[str, Any]
    ) -> JsonObject:
        """Merge ``body`` into the object."""

    async def replace(
        self, resource: str, namespace: str, name: str, body: Mapping[str, Any]
    ) -> JsonObject:
        """Replace the object if it still has the resourceVersion that stands in ``body``."""

    async def delete(
        self, resource: str, namespace: str, name: str, *, uid: str, force: bool = False
    ) -> JsonObject:
        """Delete the object if it still has that uid; ``force``: without waiting for a kubelet."""


class KubeApi:
    """``Kube`` over kubernetes.aio, without its models."""

    def __init__(self, api: client.ApiClient, *, metrics: Metrics) -> None:
        self._api = api
        self._api.user_agent = names.MANAGER
        self._metrics = metrics

    @classmethod
    async def connect(cls, *, metrics: Metrics, server: str | None = None) -> "KubeApi":
        """Connect by the service account, else by the kubeconfig, or plainly to ``server``.

        Raises:
            NoConfiguration: there is no usable one.
        """
        settings = client.Configuration()
        # else each request asks two threads for a proxy and a netrc
        settings.client_session_kwargs = {"trust_env": bool(getproxies())}
        try:
            if server is not None:
                settings.host = server
            elif os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
                config.load_incluster_config(client_configuration=settings)
            else:
                await config.load_kube_config(client_configuration=settings)
        except (config.ConfigException, OSError) as error:
            raise NoConfiguration(f"no way to the API server: {error}; set KUBECONFIG") from error
        return cls(client.ApiClient(settings), metrics=metrics)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What the connection is checked with; None where it is plain."""
        context: ssl.SSLContext = self._api.rest_client.ssl_context
        return context if self._api.configuration.host.startswith("https") else None

    async def sign(self, path: str) -> tuple[str, Mapping[str, str]]:
        """Return the URL and the headers with which this operator may ask for ``path``."""
        _, url, headers, *_ = await self._api.param_serialize(
            "GET", path, auth_settings=["BearerToken"]
        )
        return url, headers

    async def served(self) -> bool:
        """Tell whether the API server serves our kind."""
        try:
            found = await self._call("GET", f"/apis/{names.API_VERSION}", kind="discovery")
        except KubeError as error:
            if error.absent:
                return False
            raise
        return any(r.get("name") == names.PLURAL for r in found.get("resources") or ())

    async def get(self, resource: str, namespace: str, name: str) -> JsonObject | None:
        """See ``Kube``."""
        try:
            return await self._call("GET", _path(resource, namespace, name), kind=resource)
        except KubeError as error:
            if error.absent:
                return None
            raise

    async def pages(
        self, resource: str, namespace: str, *, selector: str = ""
    ) -> AsyncIterator[JsonObject]:
        """See ``Kube``."""
        query = {"limit": str(_PAGE)} | ({"labelSelector": selector} if selector else {})
        path = _path(resource, namespace)
        while True:
            page = await self._call("GET", path, kind=resource, query=query, verb="LIST")
            yield page
            following = page["metadata"].get("continue")
            if not following:
                return
            query["continue"] = following

    async def create(
        self, resource: str, namespace: str, body: Mapping[str, Any], *, dry_run: bool = False
    ) -> JsonObject:
        """See ``Kube``."""
        query = {"fieldValidation": "Strict", "fieldManager": names.MANAGER}
        if dry_run:
            query["dryRun"] = "All"
        return await self._call(
            "POST", _path(resource, namespace), kind=resource, body=body, query=query
        )

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
        return await self._call(
            "PATCH",
            _path(resource, namespace, name, subresource),
            kind=resource,
            body=body,
            query={"fieldManager": names.MANAGER, "force": "true"},
            content_type=_APPLY,
        )

    async def merge(
        self, resource: str, namespace: str, name: str, body: Mapping[str, Any]
    ) -> JsonObject:
        """See ``Kube``."""
        return await self._call(
            "PATCH",
            _path(resource, namespace, name),
            kind=resource,
            body=body,
            query={"fieldManager": names.MANAGER},
            content_type=_MERGE,
        )

    async def replace(
        self, resource: str, namespace: str, name: str, body: Mapping[str, Any]
    ) -> JsonObject:
        """See ``Kube``."""
        return await self._call("PUT", _path(resource, namespace, name), kind=resource, body=body)

    async def delete(
        self, resource: str, namespace: str, name: str, *, uid: str, force: bool = False
    ) -> JsonObject:
        """See ``Kube``."""
        body: JsonObject = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
        }
        if force:
            body["gracePeriodSeconds"] = 0
        return await self._call(
            "DELETE", _path(resource, namespace, name), kind=resource, body=body
        )

    async def _call(
        self,
        method: str,
        path: str,
        *,
        kind: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = _JSON,
        verb: str = "",
    ) -> JsonObject:
        code = "error"
        try:
            request = await self._api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": _JSON, "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._api.call_api(*request, _request_timeout=_TIMEOUT)
            data = await response.read()
            code = str(response.status)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise KubeError(0, type(error).__name__, str(error) or "no answer in time") from error
        finally:
            self._metrics.api_requests.labels(verb=verb or method, resource=kind, code=code).inc()
        if response.status >= 300:
            raise _error(response.status, response.headers.get("Retry-After"), data)
        answer: JsonObject = json.loads(data)
        return answer


def _path(resource: str, namespace: str, name: str = "", subresource: str = "") -> str:
    prefix = _PREFIXES.get(resource, "/api/v1")
    place = ("namespaces", namespace) if namespace else ()
    parts = (prefix, *place, resource, name, subresource)
    return "/".join(part for part in parts if part)


def _error(status: int, retry_after: str | None, data: bytes) -> KubeError:
    try:
        answer = json.loads(data)
        reason, message = str(answer.get("reason") or ""), str(answer.get("message") or "")
    except (ValueError, AttributeError):
        reason, message = "", data[:500].decode(errors="replace")
    wait = float(retry_after) if retry_after and retry_after.isdecimal() else None
    return KubeError(status, reason, message, wait)

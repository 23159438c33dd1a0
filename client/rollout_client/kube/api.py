"""The API server, as far as RolloutReplicas go: raw objects in, raw objects out."""

import json
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Final, Self
from urllib.request import getproxies

import aiohttp
from kubernetes.aio import client, config

from rollout_client.kube.errors import ApiError

API_VERSION: Final = "rollout.dev/v1alpha1"
KIND: Final = "RolloutReplica"
PLURAL: Final = "rolloutreplicas"

WATCH_S: Final = 30
"""A watch is begun anew after so long: one that silently lost its connection costs no more."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=20)
_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"
_APPLY: Final = "application/apply-patch+yaml"
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Object = dict[str, Any]


class ReplicaApi:
    """RolloutReplicas over ``kubernetes.aio``. Every method raises ``ApiError``.

    Args:
        api: Connected.
        namespace: Where none is named.
        manager: The field manager of all writes: who asked, in ``status.history``.
    """

    def __init__(self, api: client.ApiClient, *, namespace: str, manager: str) -> None:
        self._api = api
        self._api.user_agent = manager
        self.namespace = namespace
        self._manager = manager

    @classmethod
    async def connect(
        cls,
        *,
        namespace: str | None,
        manager: str,
        context: str | None = None,
        server: str | None = None,
    ) -> Self:
        """Connect by the service account, else by the kubeconfig, or plainly to ``server``.

        Raises:
            ApiError: there is no usable configuration.
        """
        settings = client.Configuration()
        # else each request asks two threads for a proxy and a netrc
        settings.client_session_kwargs = {"trust_env": bool(getproxies())}
        own = "default"
        try:
            if server is not None:
                settings.host = server
            elif os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
                config.load_incluster_config(client_configuration=settings)
                own = _ACCOUNT.read_text().strip() if _ACCOUNT.exists() else own
            else:
                # read now: the library's own default is that of its import
                file = os.environ.get("KUBECONFIG") or None
                await config.load_kube_config(
                    config_file=file, client_configuration=settings, context=context
                )
                contexts, active = config.list_kube_config_contexts(config_file=file)
                named = [c for c in contexts if c["name"] == context] or [active]
                own = named[0]["context"].get("namespace") or own
        except (config.ConfigException, OSError) as error:
            raise ApiError(0, "NoConfiguration", f"{error}; set KUBECONFIG") from error
        return cls(client.ApiClient(settings), namespace=namespace or own, manager=manager)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def get(self, namespace: str, name: str) -> Object | None:
        """Return the object as it is now; None if there is none."""
        try:
            return await self._call("GET", _path(namespace, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def list(self, namespace: str, *, selector: str = "") -> Object:
        """Return the list object."""
        query = {"labelSelector": selector} if selector else {}
        return await self._call("GET", _path(namespace), query=query)

    async def merge(self, namespace: str, name: str, body: Mapping[str, Any]) -> Object:
        """Merge ``body`` into the object."""
        query = {"fieldManager": self._manager, "fieldValidation": "Strict"}
        return await self._call(
            "PATCH", _path(namespace, name), body=body, query=query, content_type=_MERGE
        )

    async def apply(self, namespace: str, name: str, body: Mapping[str, Any]) -> Object:
        """Apply server-side; fields that another manager owns are a conflict."""
        query = {"fieldManager": self._manager, "fieldValidation": "Strict"}
        return await self._call(
            "PATCH", _path(namespace, name), body=body, query=query, content_type=_APPLY
        )

    async def delete(self, namespace: str, name: str) -> None:
        """Begin to delete the object; it is no error if there is none."""
        try:
            await self._call("DELETE", _path(namespace, name))
        except ApiError as error:
            if error.code != 404:
                raise

    async def watch(
        self, namespace: str, *, version: str, name: str = "", selector: str = ""
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """Yield event types and objects newer than ``version`` until the watch ends by itself.

        Raises:
            ApiError: also with 410, where ``version`` is too old.
        """
        query = {
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
            **({"fieldSelector": f"metadata.name={name}"} if name else {}),
            **({"labelSelector": selector} if selector else {}),
        }
        limit = aiohttp.ClientTimeout(total=WATCH_S + 15, sock_connect=10)
        try:
            response = await self._send("GET", _path(namespace), query=query, timeout=limit)
            try:
                async for line in response.content:
                    event = json.loads(line)
                    body = event["object"]
                    if event["type"] == "ERROR":
                        raise _error(body.get("code", 0), line)
                    yield event["type"], body
            finally:
                response.close()
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, type(error).__name__, str(error)) from error

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = _JSON,
    ) -> Object:
        try:
            response = await self._send(
                method, path, body=body, query=query, content_type=content_type, timeout=_TIMEOUT
            )
            answer: Object = json.loads(await response.read())
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            text = str(error) or "no answer in time"
            raise ApiError(0, type(error).__name__, text) from error
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = _JSON,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        request = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": _JSON, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._api.call_api(*request, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        if response.status >= 300:
            raise _error(response.status, await response.read())
        return response


def _path(namespace: str, name: str = "") -> str:
    parts = (f"/apis/{API_VERSION}/namespaces", namespace, PLURAL, name)
    return "/".join(part for part in parts if part)


def _error(code: int, data: bytes) -> ApiError:
    try:
        answer = json.loads(data)
        answer = answer.get("object", answer)
        return ApiError(code, str(answer.get("reason") or ""), str(answer.get("message") or ""))
    except (ValueError, AttributeError):
        return ApiError(code, "", data[:500].decode(errors="replace"))

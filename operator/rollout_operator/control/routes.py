"""Two ways to a pod's admin port: straight to its address, or through the API server's proxy."""

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rollout_pod.protocol import TOKEN_HEADER


@dataclass(frozen=True, kw_only=True, slots=True)
class PodAddress:
    """Where a pod is, for either way."""

    namespace: str
    name: str
    ip: str


class Route(Protocol):
    """How a request gets to a pod."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What the connection is checked with; None where it is plain."""

    async def request(
        self, pod: PodAddress, port: int, what: str, token: str
    ) -> tuple[str, Mapping[str, str]]:
        """Return the URL of ``what`` and the headers that open the doors on the way."""


class Direct:
    """From within the pods' network."""

    tls: ssl.SSLContext | None = None

    async def request(
        self, pod: PodAddress, port: int, what: str, token: str
    ) -> tuple[str, Mapping[str, str]]:
        """See ``Route``."""
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        return f"http://{host}:{port}{what}", {"Authorization": f"Bearer {token}"}


class ThroughApiServer:
    """From anywhere: needs the right to ``pods/proxy``, and costs the API server each held poll.

    The proxy keeps ``Authorization`` for itself, so the pod's token travels in a header of ours.
    Pods are found by name: one that was replaced answers in its successor's place, which takes no
    older document, and is asked anew as soon as the watch tells of it.
    """

    def __init__(
        self,
        sign: Callable[[str], Awaitable[tuple[str, Mapping[str, str]]]],
        *,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._sign = sign
        self.tls = tls

    async def request(
        self, pod: PodAddress, port: int, what: str, token: str
    ) -> tuple[str, Mapping[str, str]]:
        """See ``Route``."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}:{port}/proxy{what}"
        url, headers = await self._sign(path)
        return url, {**headers, TOKEN_HEADER: token}

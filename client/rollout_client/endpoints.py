"""Where the replicas are: a list, or all addresses of a name."""

import asyncio
import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx


class EndpointsUnavailable(Exception):
    """It cannot be found out at the moment where the replicas are; says why."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One replica's data port."""

    url: str
    """Such as ``http://qwen.rollout.svc:8000``."""
    is_told: bool = False
    """``is_ready`` and ``step`` are known from elsewhere; else the replica itself is asked."""
    is_ready: bool = True
    step: int | None = None


class Endpoints(Protocol):
    """Tells which replicas there are; asked before every attempt."""

    async def list(self) -> Sequence[Endpoint]:
        """Return all replicas.

        Raises:
            EndpointsUnavailable: nobody knows at the moment; asked again later.
        """

    async def aclose(self) -> None:
        """End what it has begun. Idempotent."""


class Fixed:
    """These and no others."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError("endpoints: name at least one, such as http://qwen.default.svc:8000")
        self._endpoints = tuple(Endpoint(url=base_url(url)) for url in dict.fromkeys(urls))

    async def list(self) -> Sequence[Endpoint]:
        """See ``Endpoints``."""
        return self._endpoints

    async def aclose(self) -> None:
        """See ``Endpoints``."""


class Service:
    """All addresses behind a name, such as a headless Service that selects many replicas' heads.

    The Service ``qwen`` of one replica has one address: for that a plain URL is enough.

    Args:
        url: Such as ``http://rollouts.default.svc:8000``; plain HTTP, since an address has no
            certificate.
        refresh_s: How long an answer of the name server is used.
    """

    def __init__(self, url: str, *, refresh_s: float = 5.0) -> None:
        self._url = httpx.URL(base_url(url))
        if self._url.scheme != "http":
            raise ValueError(f"Service: {url!r} must begin with http://")
        self._refresh_s = refresh_s
        self._known: tuple[Endpoint, ...] = ()
        self._asked_at: float | None = None
        self._asking = asyncio.Lock()

    async def list(self) -> Sequence[Endpoint]:
        """See ``Endpoints``. While the name server fails, what it said last is used."""
        async with self._asking:
            if self._asked_at is None or time.monotonic() - self._asked_at >= self._refresh_s:
                await self._resolve()
        return self._known

    async def aclose(self) -> None:
        """See ``Endpoints``."""

    async def _resolve(self) -> None:
        port = self._url.port or 80
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._url.host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if not self._known:
                raise EndpointsUnavailable(f"{self._url.host}: {error}") from error
        else:
            hosts = sorted({str(address[0]) for *_, address in found})
            self._known = tuple(
                Endpoint(url=str(self._url.copy_with(host=host, port=port)).rstrip("/"))
                for host in hosts
                if not ipaddress.ip_address(host).is_link_local
            )
        self._asked_at = time.monotonic()


def base_url(url: str) -> str:
    """Return the URL without a slash at its end.

    Raises:
        ValueError: it is no HTTP URL with a host.
    """
    parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"endpoints: {url!r} is no URL such as http://qwen.default.svc:8000")
    return url.rstrip("/")

"""HTTP connections for many requests at once, in small pools.

httpcore looks at every pair of a pool's connections whenever a request begins or ends: with 256 in
one pool that is most of a caller's CPU time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import httpx

POOL_SIZE: Final = 16
"""Requests in one pool at once."""


class Pools:
    """At most ``max_concurrency`` requests on the wire; others wait for their turn.

    Args:
        max_concurrency: At least 1.
        timeout: Of each connection.
        transport: Takes the place of the network in tests.

    Raises:
        ValueError: ``max_concurrency`` is less than 1.
    """

    def __init__(
        self,
        max_concurrency: int,
        *,
        timeout: httpx.Timeout,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency: must be at least 1, not {max_concurrency}")
        # probes of readiness must not wait for rollouts to end
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=POOL_SIZE)
        trusted = httpx.create_ssl_context()  # to read the certificates takes longer than the rest
        self._clients = [
            httpx.AsyncClient(timeout=timeout, limits=limits, transport=transport, verify=trusted)
            for _ in range(-(-max_concurrency // POOL_SIZE))
        ]
        self._slots = asyncio.Semaphore(max_concurrency)
        # the last one to be given back is the next one: few connections carry few requests
        self._free = [self._clients[i // POOL_SIZE] for i in reversed(range(max_concurrency))]

    @property
    def probes(self) -> httpx.AsyncClient:
        """For short requests that wait for no turn."""
        return self._clients[0]

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[httpx.AsyncClient]:
        """Wait for a turn and get a client for one request."""
        async with self._slots:
            client = self._free.pop()
            try:
                yield client
            finally:
                self._free.append(client)

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        for client in self._clients:
            await client.aclose()

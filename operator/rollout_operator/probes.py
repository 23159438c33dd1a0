"""Serves /metrics on one port, /healthz and /readyz on another."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rollout_operator.metrics import Metrics

Check = Callable[[], str]
"""Returns what is wrong; empty if nothing is."""


@asynccontextmanager
async def serving(
    *,
    metrics: Metrics,
    healthy: Check,
    ready: Check,
    address: str,
    metrics_port: int,
    probe_port: int,
) -> AsyncIterator[tuple[int, int]]:
    """Serve while the context lasts; yields the ports of metrics and probes.

    Raises:
        OSError: a port is taken.
    """

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    numbers = web.Application()
    numbers.router.add_get("/metrics", scrape)
    probes = web.Application()
    probes.router.add_get("/healthz", _answer(healthy))
    probes.router.add_get("/readyz", _answer(ready))
    runners: list[web.AppRunner] = []
    ports: list[int] = []
    try:
        for app, port in ((numbers, metrics_port), (probes, probe_port)):
            runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=0.5)
            runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, address, port).start()
            ports.append(runner.addresses[0][1])
        yield ports[0], ports[1]
    finally:
        for runner in runners:
            await runner.cleanup()


def _answer(check: Check) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(_: web.Request) -> web.StreamResponse:
        wrong = check()
        return web.Response(text=wrong or "ok", status=503 if wrong else 200)

    return handle

"""``rollout-pod front-end``: the process of one front end, started by ``serve``."""

import asyncio
import os
import socket
from typing import Any

import structlog
import uvloop

from rollout_pod.engine import registry
from rollout_pod.engine.base import EngineStartError, SharedEngine
from rollout_pod.front_ends.channel import Link
from rollout_pod.front_ends.front_end import FrontEnd
from rollout_pod.front_ends.settings import FrontEndSettings
from rollout_pod.serve import Server, bind
from rollout_pod.server.data_app import make_data_app

log = structlog.get_logger(__name__)


def run_front_end(channel: int, settings: FrontEndSettings) -> int:
    """Serve until told to end, or until the steering process is gone; returns the exit code."""
    return uvloop.run(_run(socket.socket(fileno=channel), settings))


async def _run(end: socket.socket, settings: FrontEndSettings) -> int:
    engine = registry.create(settings.engine, settings.engine_settings())
    if not isinstance(engine, SharedEngine):
        raise TypeError(f"engine {settings.engine} cannot be shared")
    front_end = FrontEnd(settings.share.index, engine, silence_s=settings.heartbeat_timeout_s)
    app = make_data_app(front_end)
    front_end.generation = app.state.generation
    ends = asyncio.Event()
    notes = {**front_end.notes(), "end": ends.set}
    link = await Link.open(end, notes, front_end.calls())
    front_end.channel = link.channel
    server = Server(app, bind((settings.host, settings.port), shared=True))
    attach = asyncio.create_task(engine.attach(settings.share), name="attach")
    helpers: set[asyncio.Task[Any]] = {
        asyncio.create_task(link.run(), name="channel"),
        asyncio.create_task(server.run_until_exit(), name="http"),
        asyncio.create_task(front_end.count(), name="counts"),
        asyncio.create_task(ends.wait(), name="end"),
    }
    try:
        await asyncio.wait({attach, *helpers}, return_when=asyncio.FIRST_COMPLETED)
        if attach.done():
            attach.result()
            front_end.take_requests()
            log.info("front end ready", index=settings.share.index)
            await asyncio.wait(helpers, return_when=asyncio.FIRST_COMPLETED)
        if not ends.is_set() and not link.channel.is_closed:
            raise RuntimeError("the HTTP server ended")
    except EngineStartError as error:
        link.channel.tell("failed", str(error))
        return 1
    except Exception as error:
        log.exception("front end failed")
        link.channel.tell("failed", f"{type(error).__name__}: {error}")
        return 1
    else:
        return 0
    finally:
        is_attached = attach.done()
        await _end(server, attach, helpers)
        if not is_attached:
            # a thread waits for an engine that may never come, and nothing can interrupt it
            os._exit(1)
        await engine.shutdown()


async def _end(
    server: Server,
    attach: asyncio.Task[None],
    helpers: set[asyncio.Task[Any]],
) -> None:
    """Whoever is being answered is answered; then all the rest ends."""
    server.should_exit = True
    attach.cancel()
    await asyncio.wait([task for task in helpers if task.get_name() == "http"])
    for task in helpers:
        task.cancel()
    await asyncio.gather(attach, *helpers, return_exceptions=True)

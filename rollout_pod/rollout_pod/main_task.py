"""What the pod's processes share: one run folder, one task by which they live, and last words."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop

from rollout_pod import local

log = structlog.get_logger(__name__)

TERMINATION_LOG: Final = Path("/dev/termination-log")
"""Where kubelet picks up the last words of a container."""


def run_alone(
    run_dir: Path,
    work: Callable[[], Coroutine[Any, Any, int]],
    refusals: tuple[type[Exception], ...],
) -> int:
    """Run ``work`` as the only process of its run folder; returns the exit code, which is 2 where
    the folder is taken or ``work`` raises one of ``refusals``.
    """
    try:
        lock = local.claim_run_dir(run_dir)
    except local.RunDirError as error:
        log.error("not started", error=str(error))
        return 2
    try:
        return uvloop.run(work())
    except refusals as error:
        log.error("not started", error=str(error))
        _leave(str(error))
        return 2
    finally:
        os.close(lock)


async def exit_code_of(
    main: asyncio.Task[None],
    helpers: Collection[asyncio.Task[None]],
    failure: type[Exception],
) -> int:
    """Wait for ``main``, which no helper may end before; 1 if it fails, by a ``failure`` or a bug.
    Whoever calls ends what then still runs.
    """
    try:
        await asyncio.wait({main, *helpers}, return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            for helper in helpers:
                if helper.done():
                    helper.result()
            raise failure("an HTTP server ended")
        await main
    except failure as error:
        log.error("failed", error=str(error))
        _leave(str(error))
        return 1
    except Exception as error:
        log.exception("failed unexpectedly")
        _leave(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _leave(words: str) -> None:
    """What kubelet shows of a container that ended."""
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(words[-4096:])

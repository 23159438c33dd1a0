"""The process that holds a node's ranks: started by ``follow``, ended with it."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

import msgspec
import structlog

from rollout_pod.engine import registry
from rollout_pod.engine.base import EngineSettings, EngineStartError, Node, SpanningEngine
from rollout_pod.engine.registry import EngineChoiceError
from rollout_pod.nodes.follower import FollowError

log = structlog.get_logger(__name__)

_TERM_S: Final = 5.0
"""For the engine's own end."""


class RanksSettings(msgspec.Struct, frozen=True):
    """The command line of ``follow``, as far as the ranks need it."""

    engine: str
    model: str
    args: tuple[str, ...]
    run_dir: str
    shm_dir: str
    node: Node
    log_level: str


def run_ranks(settings: RanksSettings) -> str:
    """Run them until one ends; returns why they cannot run, or did not go on. Blocks."""
    given = EngineSettings(
        model=settings.model, args=settings.args, run_dir=Path(settings.run_dir),
        shm_dir=Path(settings.shm_dir), node=settings.node,
    )  # fmt: skip
    try:
        engine = registry.create(settings.engine, given)
        if not isinstance(engine, SpanningEngine):
            return f"engine {settings.engine} works on one node only"
        engine.run_ranks()
    except (EngineStartError, EngineChoiceError) as error:
        return str(error)
    return "a rank of this node ended"


async def keep_ranks(settings: RanksSettings) -> None:
    """Run them as a child, until cancelled.

    Raises:
        FollowError: it ended by itself.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollout_pod", "ranks", f"--parent={os.getpid()}"),
        f"--settings={msgspec.json.encode(settings).decode()}",
    )
    log.info("ranks started", pid=child.pid)
    try:
        code = await child.wait()
    finally:
        if child.returncode is None:
            child.terminate()
            try:
                async with asyncio.timeout(_TERM_S):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    raise FollowError(f"this node's ranks ended ({how}); see the log")

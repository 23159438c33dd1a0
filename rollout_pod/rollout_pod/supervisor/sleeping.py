"""Falling asleep and waking up, done. What is asked for is the plan's business."""

from dataclasses import dataclass, replace

import structlog

from rollout_pod.engine.base import Engine, SleepUnsupported
from rollout_pod.gate import Gate
from rollout_pod.protocol import SleepState, SleepTag
from rollout_pod.supervisor.board import Board

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Sleeping:
    """What the engine raises goes on to the caller: nobody knows what it holds then, and only a
    new process helps.
    """

    board: Board
    engine: Engine
    gate: Gate

    async def sleep(self, level: int) -> None:
        """Release the engine's memory. Level 2 forgets the version: only a complete load brings
        one back. An engine that cannot sleep says so and goes on as it was.
        """
        before = self.board.state
        drops = level == 2
        self.board.set(
            replace(
                before,
                resizing=True,
                caches_clear=False,
                loaded=None if drops else before.loaded,
                transferred=before.transferred and not drops,
                committed=None if drops else before.committed,
            )
        )
        try:
            report = await self.engine.sleep(level)
        except SleepUnsupported as error:
            # only what was touched above: the rest may have changed meanwhile
            self.board.change(
                resizing=False,
                caches_clear=before.caches_clear,
                loaded=before.loaded,
                transferred=before.transferred,
                committed=before.committed,
                sleep_refusal=str(error),
            )
            return
        if drops:
            self.gate.unpublish()
        sleep = SleepState(
            level=level, tags=tuple(SleepTag), released=report.bytes > 0, bytes=report.bytes,
            message=report.message,
        )  # fmt: skip
        self.board.change(resizing=False, sleep=sleep)
        log.info("asleep", level=level, bytes=report.bytes, message=report.message)

    async def wake(self, tags: frozenset[SleepTag]) -> None:
        """Take memory back. The engine stays paused; requests come with ``OpenGate`` only."""
        sleep = self.board.state.sleep
        if sleep is None:
            raise RuntimeError("only an engine that sleeps is woken")
        self.board.change(resizing=True)
        taken = await self.engine.wake(tags)
        left = tuple(tag for tag in sleep.tags if tag not in tags)
        rest = sleep.model_copy(update={"tags": left, "bytes": max(0, sleep.bytes - taken)})
        self.board.change(resizing=False, sleep=rest if left else None)
        log.info("woken", tags=sorted(tags), asleep=left, bytes=taken)

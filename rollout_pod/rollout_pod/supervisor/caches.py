"""Clearing the engine's caches on request, beside everything else that a pod does."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from rollout_pod.engine.base import CacheReport, Engine, EngineDeadError
from rollout_pod.protocol import CachesCleared
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.state import EngineStatus, PodState

CACHES: Final = ("prefix", "multimodal", "encoder")
"""As ``CacheReport`` names them."""

_PAUSE_S = 0.1


class EngineNotUp(Exception):
    """The engine is still starting."""


class EngineAsleep(Exception):
    """The engine sleeps: what its caches held is gone already."""


class CachesInUse(Exception):
    """Not every cache could be cleared in time; the message names those."""


@dataclass
class CacheClearing:
    """One request at a time; it needs no step of the plan, since it changes nothing of it."""

    board: Board
    engine: Engine
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def clear(self, *, timeout_s: float) -> CachesCleared:
        """Clear prefix, multimodal and encoder caches; tried again while requests hold blocks.

        Raises:
            EngineNotUp: the engine is starting.
            EngineDeadError: it is dead.
            EngineAsleep: it sleeps, or falls asleep meanwhile.
            EngineError: it failed.
            CachesInUse: the time was over before all were cleared.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise CachesInUse(f"they were being cleared for others for {timeout_s:g} s") from None
        try:
            return await self._clear(started, timeout_s)
        finally:
            self._turn.release()

    async def _clear(self, started: float, timeout_s: float) -> CachesCleared:
        attempts = 0
        left = "the engine was loading weights"
        while True:
            state = self.board.state
            _check(state)
            if not state.transferring:  # an update clears them itself when it is loaded
                attempts += 1
                report = await self.engine.clear_caches()
                seconds = time.monotonic() - started
                if report.is_complete:
                    return CachesCleared(cleared=CACHES, attempts=attempts, seconds=seconds)
                left = f"not cleared, since requests need them: {', '.join(_missing(report))}"
            if time.monotonic() - started >= timeout_s:
                raise CachesInUse(f"{left} ({attempts} attempts in {timeout_s:g} s); pause first")
            await asyncio.sleep(_PAUSE_S)


def _check(state: PodState) -> None:
    if state.engine is EngineStatus.NEW:
        raise EngineNotUp("the engine is starting; it has cached nothing yet")
    if state.engine is EngineStatus.DEAD:
        raise EngineDeadError(state.last_error or "the engine is dead")
    if state.asleep or state.resizing:
        raise EngineAsleep("the engine sleeps, and its caches are empty: wake it first")


def _missing(report: CacheReport) -> list[str]:
    return [name for name in CACHES if not getattr(report, name)]

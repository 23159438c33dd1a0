"""The heartbeat: an engine whose loop does not answer is dead, even if its process lives; so is one
whose device has faulted.

Paused, sleeping and compiling engines answer between two steps. While weights are loaded, or
memory is released or taken back, calls wait behind that: it has a deadline of its own, and the
heartbeat rests.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollout_pod.engine.base import Engine, EngineDeadError, EngineError
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.state import EngineStatus, PodState

PERIOD_S: Final = 5.0


@dataclass(frozen=True)
class Heartbeat:
    """Runs beside the supervisor's loop, and is owned by it."""

    board: Board
    engine: Engine
    fail: Callable[[str], None]
    """Told once, of a dead engine."""
    timeout_s: float
    period_s: float = PERIOD_S

    async def run(self) -> None:
        """Beat until the engine is dead."""
        while True:
            await asyncio.sleep(self.period_s)
            state = self.board.state
            if not _beats(state):
                continue
            try:
                await self.engine.ping(timeout_s=self.timeout_s)
            except EngineDeadError:
                return  # seen by the supervisor's own look at the engine
            except EngineError as error:
                # a load that began meanwhile held the answer up: it has a deadline of its own
                if _beats(self.board.state) and self.board.state.loaded == state.loaded:
                    self.fail(str(error))
                    return


def _beats(state: PodState) -> bool:
    return state.engine is EngineStatus.UP and not state.transferring and not state.resizing

"""Sends the last version again to a pod that has lost it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from rollout_client.trainer.control import Control
from rollout_client.trainer.errors import AdapterError, Refused
from rollout_client.trainer.push_socket import ask_state, client_of
from rollout_client.trainer.wishes import Hold
from rollout_pod.protocol import StateDocument

log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
SETTLE_S: Final = 1.0
"""How long a pod has to need it: one that is woken for the next version needs the old one first."""
_FAILED_S: Final = 5.0
RESEND_S: Final = 600.0


class Keeper:
    """Watches the pods over their push sockets between two updates.

    Args:
        resend: sends the last version to one replica, within so many seconds.
    """

    def __init__(self, resend: Callable[[Control, float], Awaitable[object]]) -> None:
        self._resend = resend
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, controls: Sequence[Control], wish: Hold) -> None:
        """Watch these for this version, and no others."""
        for control in controls:
            if control.run_dir is not None:
                work = self._keep(control, control.run_dir, wish)
                self._tasks.append(asyncio.create_task(work, name=f"keep {control.name}"))

    async def stop(self) -> None:
        """Watch none; what is being sent again is given up first. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result  # a fault of ours

    async def _keep(self, control: Control, run_dir: Path, wish: Hold) -> None:
        async with client_of(run_dir) as http:
            state: StateDocument | None = None
            while True:
                newer = await ask_state(http, state)
                if newer is None or _is_same(newer, state):
                    # nobody answers, or a pod that ends, which holds no question any more
                    state = None
                    await asyncio.sleep(_RETRY_S)
                    continue
                state = newer
                try:
                    if control.has_forgotten(state):
                        await control.wish(wish)
                    elif state.needs == wish.version:
                        await asyncio.sleep(SETTLE_S)
                        again = await ask_state(http)
                        if again is not None and again.needs == wish.version:
                            log.info("%s needs %s again", control.name, wish.version)
                            await self._resend(control, RESEND_S)
                        state = None
                except Refused as error:
                    log.warning("%s is not sent again: %s", wish.version, error)
                    return
                except AdapterError as error:
                    log.warning("%s was not sent again: %s", wish.version, error)
                    await asyncio.sleep(_FAILED_S)
                    state = None


def _is_same(newer: StateDocument, state: StateDocument | None) -> bool:
    return state is not None and (newer.boot_id, newer.revision) == (state.boot_id, state.revision)

"""Sends the last version again to a pod that has lost it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import httpx
from pydantic import ValidationError

from rollout_client.trainer.control import Control
from rollout_client.trainer.errors import AdapterError, Refused
from rollout_client.trainer.wishes import Hold
from rollout_pod.protocol import PUSH_SOCKET, StateDocument

log = logging.getLogger(__name__)

_HOLD_S: Final = 25.0
_ANSWER_S: Final = 10.0
_RETRY_S: Final = 1.0
SETTLE_S: Final = 1.0
"""How long a pod has to need it: one that is woken for the next version needs the old one first."""
_FAILED_S: Final = 5.0


class Keeper:
    """Watches the pods over their push sockets between two updates.

    Args:
        resend: sends the last version to one replica.
    """

    def __init__(self, resend: Callable[[Control], Awaitable[object]]) -> None:
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
        async with _client(run_dir) as http:
            state: StateDocument | None = None
            while True:
                newer = await _ask(http, state)
                if newer is None:
                    state = None
                    await asyncio.sleep(_RETRY_S)
                    continue
                state = newer
                try:
                    if control.has_forgotten(state):
                        await control.wish(wish)
                    elif state.needs == wish.version:
                        await asyncio.sleep(SETTLE_S)
                        again = await _ask(http, None)
                        if again is not None and again.needs == wish.version:
                            log.info("%s needs %s again", control.name, wish.version)
                            await self._resend(control)
                        state = None
                except Refused as error:
                    log.warning("%s is not sent again: %s", wish.version, error)
                    return
                except AdapterError as error:
                    log.warning("%s was not sent again: %s", wish.version, error)
                    await asyncio.sleep(_FAILED_S)
                    state = None


async def needs(control: Control) -> str | None:
    """The version that a pod waits for; None where it waits for none, or is not to be reached."""
    if control.run_dir is None:
        return None
    async with _client(control.run_dir) as http:
        state = await _ask(http, None)
    return state.needs if state is not None else None


def _client(run_dir: Path) -> httpx.AsyncClient:
    # reading certificates would take longer than an update
    socket = httpx.AsyncHTTPTransport(uds=str(run_dir / PUSH_SOCKET), verify=False)
    return httpx.AsyncClient(transport=socket, base_url="http://pod", trust_env=False)


async def _ask(http: httpx.AsyncClient, after: StateDocument | None) -> StateDocument | None:
    """The state, as soon as it is another one; None where nobody answers."""
    query = {"timeout": str(_HOLD_S if after else 0.0)}
    if after is not None:
        query["after"] = f"{after.boot_id}:{after.revision}"
    try:
        answer = await http.get("/v1/push/state", params=query, timeout=_ANSWER_S + _HOLD_S)
        return StateDocument.model_validate_json(answer.raise_for_status().content)
    except (httpx.HTTPError, ValidationError):
        return None

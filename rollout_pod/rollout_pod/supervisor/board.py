"""The board: the present state, the desired document in force, and who waits for news of them."""

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from rollout_pod.protocol import DesiredDocument, StateDocument, UpdateState
from rollout_pod.supervisor.render import render_state, same_news
from rollout_pod.supervisor.state import PodState

_REMEMBERED: Final = 32
"""Sessions of trainers."""


class Board:
    """One owner writes (the supervisor), many wait. All on the event loop's thread."""

    def __init__(self, *, unfinished: Callable[[], int]) -> None:
        self.boot_id = uuid.uuid4().hex
        self.state = PodState()
        self.desired: DesiredDocument | None = None
        self._unfinished = unfinished
        self._news = asyncio.Event()
        self._closed = False
        self._sessions: OrderedDict[str, UpdateState] = OrderedDict()
        self._document = self._render(revision=1)

    def document(self) -> StateDocument:
        """The state of this moment, counters included."""
        return self._render(revision=self._document.revision)

    def change(self, **changes: Any) -> None:
        """Replace fields of the state, and tell those who wait if it is news."""
        self.set(replace(self.state, **changes))

    def set(self, state: PodState) -> None:
        """Replace the state, and tell those who wait if it is news."""
        self.state = state
        self._remember(state.update)
        self.publish()

    def session(self, session: str) -> UpdateState | None:
        """The last record of an update that a trainer's session brought."""
        return self._sessions.get(session)

    def _remember(self, update: UpdateState | None) -> None:
        if update is None or update.session is None:
            return
        self._sessions[update.session] = update
        while len(self._sessions) > _REMEMBERED:
            self._sessions.popitem(last=False)

    def publish(self) -> None:
        """Make a new revision if anything changed that somebody may wait for."""
        fresh = self._render(revision=self._document.revision + 1)
        if not same_news(self._document, fresh):
            self._document = fresh
            self._news.set()
            self._news = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """There is no more news."""
        return self._closed

    def close(self) -> None:
        """Let everybody go who waits."""
        self._closed = True
        self._news.set()

    async def wait_news(self, *, after: str | None, timeout_s: float) -> StateDocument:
        """The document as soon as it is newer than ``after`` (``<boot_id>:<revision>``; another
        boot counts as newer), or when ``timeout_s`` is over.
        """
        deadline = time.monotonic() + timeout_s
        while after == f"{self.boot_id}:{self._document.revision}" and not self._closed:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._news.wait()
        return self.document()

    def _render(self, *, revision: int) -> StateDocument:
        return render_state(
            state=self.state,
            desired=self.desired,
            boot_id=self.boot_id,
            revision=revision,
            unfinished=self._unfinished(),
        )

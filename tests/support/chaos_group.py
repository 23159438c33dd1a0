"""A pod that follows a head, for the chaos of the operator: what nodes do, without their protocol."""

from collections.abc import Callable

from tests.support.chaos_pods import JOIN_S, SILENCE_S, SYNC_S, ChaosPod, Pod
from tests.support.chaos_site import Site
from tests.support.fake_apiserver import Json
from tests.support.operator_kit import running_status


class Follower(Pod):
    """A node that is not the head's: its ranks, and nothing that could be steered."""

    def __init__(
        self, site: Site, raw: Json, ip: str, node: str, *, head: Callable[[], ChaosPod | None]
    ) -> None:
        super().__init__(site, raw, ip, node)
        self._head = head
        self._waits_until = site.loop.now + JOIN_S
        self._heard: float | None = None
        """When the head answered last; None before it has."""
        self._drains = False
        self._head_drained = False

    @property
    def is_up(self) -> bool:
        return self.exit_code is None

    @property
    def has_joined(self) -> bool:
        """It was heard of a moment ago."""
        heard = self._heard is not None and self._site.loop.now - self._heard < 2 * SYNC_S
        return heard and self.is_up and not self.gone

    def kill_container(self) -> None:
        self._over(1)

    async def kill(self) -> None:
        self._over(137)

    def begin_drain(self) -> None:
        self._drains = True

    def _over(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code

    def live(self) -> None:
        if not self.is_up:
            return
        now, head = self._site.loop.now, self._head()
        if head is not None and head.is_up and now >= max(head.deaf_until, self.deaf_until):
            self._heard = now
            self._head_drained = head.oracle.draining
            if self._drains:
                head.begin_drain()
        elif self._drains and self._heard is None:
            self._over(0)
        elif head is not None and head.exit_code is not None and self._heard is not None:
            self._over(0 if head.exit_code == 0 or self._drains else 1)
        elif self._heard is not None and now - self._heard > SILENCE_S:
            self._over(0 if self._head_drained or self._drains else 1)
        elif self._heard is None and now > self._waits_until:
            self._over(1)

    def _running(self) -> Json:
        head = self._head()
        up = head is not None and head.is_up and head.supervisor.is_started
        return running_status(self.ip, ready=up, started=up)

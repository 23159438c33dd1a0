"""What this client knows of its replicas, and who of them gets the next request."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import httpx
from pydantic import ValidationError

from rollout_client.endpoints import Endpoint, Endpoints, EndpointsUnavailable
from rollout_client.routing import NoReplica, ReplicaView, choose
from rollout_pod.protocol import ReadyFacts

READY_PATH: Final = "/readyz"
FRESH_S: Final = 1.0
"""How long a replica's word about its step is used."""
_PROBE_S: Final = 2.0
_SESSIONS: Final = 100_000


@dataclass
class _Known:
    in_flight: int = 0
    rests_until: float = 0.0
    asked_until: float = 0.0
    is_ready: bool = True
    step: int | None = None
    asked_at: float = float("-inf")


class Fleet:
    """The replicas of one client."""

    def __init__(self, endpoints: Endpoints, http: httpx.AsyncClient) -> None:
        self._endpoints = endpoints
        self._http = http
        self._known: dict[str, _Known] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._probing = asyncio.Lock()
        self.size = 0
        """Replicas that were known when the last one was picked."""

    async def aclose(self) -> None:
        """End what finds the endpoints."""
        await self._endpoints.aclose()

    async def pick(
        self, key: str, *, avoid: Collection[str], min_step: int | None
    ) -> str | NoReplica:
        """Pick a replica for the session ``key`` and remember it; see ``routing.choose``."""
        try:
            endpoints = await self._endpoints.list()
        except EndpointsUnavailable as error:
            return NoReplica(why=f"no replica is known: {error}")
        self.size = len(endpoints)
        if min_step is not None:
            await self._ask_steps([e.url for e in endpoints if not e.is_told])
        picked = choose(
            [self._view(endpoint, min_step) for endpoint in endpoints],
            key=key,
            sticky=self._sessions.get(key),
            avoid=avoid,
            min_step=min_step,
            now=time.monotonic(),
        )
        self._forget({endpoint.url for endpoint in endpoints})
        if isinstance(picked, NoReplica):
            return picked
        self._sessions[key] = picked.url
        self._sessions.move_to_end(key)
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        return picked.url

    @contextmanager
    def in_flight(self, url: str) -> Iterator[None]:
        """Count a request."""
        known = self._of(url)
        known.in_flight += 1
        try:
            yield
        finally:
            known.in_flight -= 1

    def rest(self, url: str, seconds: float, *, asked_s: float = 0.0) -> None:
        """Leave a replica alone if there are others, and for ``asked_s`` in any case."""
        known, now = self._of(url), time.monotonic()
        known.rests_until, known.asked_until = now + seconds, now + asked_s

    def worked(self, url: str) -> None:
        """It brought tokens."""
        known = self._of(url)
        known.rests_until = known.asked_until = 0.0

    def _of(self, url: str) -> _Known:
        return self._known.setdefault(url, _Known())

    def _view(self, endpoint: Endpoint, min_step: int | None) -> ReplicaView:
        known = self._of(endpoint.url)
        asked = min_step is not None and not endpoint.is_told
        return ReplicaView(
            url=endpoint.url,
            is_ready=known.is_ready if asked else endpoint.is_ready,
            step=known.step if asked else endpoint.step,
            in_flight=known.in_flight,
            rests_until=known.rests_until,
            asked_until=known.asked_until,
        )

    def _forget(self, present: set[str]) -> None:
        for url in [u for u, k in self._known.items() if u not in present and not k.in_flight]:
            del self._known[url]

    async def _ask_steps(self, urls: list[str]) -> None:
        async with self._probing:
            late = time.monotonic() - FRESH_S
            await asyncio.gather(*(self._ask(u) for u in urls if self._of(u).asked_at < late))

    async def _ask(self, url: str) -> None:
        known = self._of(url)
        try:
            answer = await self._http.get(url + READY_PATH, timeout=_PROBE_S)
            known.is_ready = answer.is_success
            facts = ReadyFacts.model_validate_json(answer.content) if answer.is_success else None
        except (httpx.HTTPError, ValidationError):
            known.is_ready, facts = False, None
        known.step = facts.weight_step if facts else None
        known.asked_at = time.monotonic()

"""Where the chaos of the operator happens: an API server in process, and ways to it that go wrong."""

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollout_operator.api import names
from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.kube import KubeApi
from rollout_operator.core import Core
from rollout_operator.metrics import Metrics
from rollout_operator.settings import Settings
from tests.support.fake_apiserver import FakeApiServer, Json, Refused, Request
from tests.support.virtual_time import VirtualLoop

if TYPE_CHECKING:
    from tests.support.chaos_judge import Judge
    from tests.support.chaos_kubelet import Kubelet

NAMESPACE = "ns"
EPOCH = 1_800_000_000.0
RESYNC_S = 10.0
TIMEOUT_S = 20.0
WATCH_S = 30.0
LATENCY_S = (0.001, 0.01)
FATES = ("refused", "lost", "answer lost", "twice")


class Site:
    """What all parts share. ``trouble`` is the share of requests that something happens to."""

    judge: "Judge"
    kubelet: "Kubelet"

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.dice = random.Random(seed)
        self.server = FakeApiServer(NAMESPACE)
        self.server.clock = self.clock
        self.api_trouble = 0.0
        self.watch_trouble = 0.0
        self.pod_trouble = 0.0
        self.down_until = 0.0
        """Nobody reaches the API server."""
        self.cut_until: dict[str, float] = {}
        """Nobody reaches it by this door."""
        self.denied_until: dict[str, float] = {}
        """The Lease cannot be reached by this door."""
        self.silent_until = 0.0
        """Watches stay open and tell nothing."""
        self._blind_until = 0.0
        self.log: list[str] = []

    def trouble_watches(self, share: float) -> None:
        """From now on something happens to this share of events."""
        if self.watch_trouble:
            self._blind_until = self.loop.now + 1.3 * WATCH_S
        self.watch_trouble = share

    def silence(self, seconds: float) -> None:
        """Every event is lost, and nobody notices."""
        self.silent_until = self.loop.now + seconds
        self._blind_until = self.silent_until + 1.3 * WATCH_S

    @property
    def is_blind(self) -> bool:
        """An operator may not have heard of something, and not have listed it since."""
        return self.watch_trouble > 0 or self.loop.now < self._blind_until

    def clock(self) -> float:
        return EPOCH + self.loop.now

    def note(self, text: str) -> None:
        self.log.append(f"{self.loop.now - 1000:8.3f} {text}")

    def fate(self, trouble: float) -> str:
        """What happens to one request."""
        return self.dice.choice(FATES) if self.dice.random() < trouble else ""

    def is_away(self, door: str) -> bool:
        return self.loop.now < max(self.down_until, self.cut_until.get(door, 0.0))

    def calm(self) -> None:
        """Faults are over."""
        self.api_trouble = self.watch_trouble = self.pod_trouble = 0.0
        self.down_until = self.silent_until = 0.0
        self.cut_until.clear()
        self.denied_until.clear()


class ChaosKube(KubeApi):
    """The operator's own class, with the chaos instead of HTTP."""

    def __init__(self, site: Site, door: str, *, metrics: Metrics) -> None:
        super().__init__(SimpleNamespace(user_agent=""), metrics=metrics)  # type: ignore[arg-type]
        self._site, self._door = site, door
        self.dead = False

    async def _call(
        self,
        method: str,
        path: str,
        *,
        kind: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        verb: str = "",
    ) -> Json:
        site = self._site
        request = _request(method, path, body, query, content_type, self._door, site.loop.now)
        await asyncio.sleep(site.dice.uniform(*LATENCY_S))
        if self.dead or site.loop.now < site.down_until:
            raise KubeError(0, "ClientConnectorError", "connection refused")
        fate = "lost" if site.is_away(self._door) else site.fate(site.api_trouble)
        if kind == "leases" and site.loop.now < site.denied_until.get(self._door, 0.0):
            fate = "lost"
        if fate == "refused":
            raise self._refusal(method)
        if fate == "lost":
            await self._never()
        answer = self._handle(request)
        if fate == "twice":  # a proxy that tries again: the client gets the second answer
            answer = self._handle(request)
        if fate == "answer lost":
            await self._never()
        await asyncio.sleep(site.dice.uniform(*LATENCY_S))
        if isinstance(answer, KubeError):
            raise answer
        return answer

    def _handle(self, request: Request) -> Json | KubeError:
        site = self._site
        if request.write and request.resource not in ("events", "leases"):
            site.judge.asks(request)
        try:
            answer = site.server.handle(request)
        except Refused as refused:
            return KubeError(refused.status, refused.reason, refused.message)
        if request.resource == "events":
            site.judge.told(request)
        elif request.write and "dryRun" not in request.query:
            site.judge.wrote(request)
        return answer

    def _refusal(self, method: str) -> KubeError:
        status = self._site.dice.choice((429, 500, 503, *((409,) * (method != "GET"))))
        return KubeError(status, "Made", "to fail", 1.0 if status == 429 else None)

    async def _never(self) -> None:
        await asyncio.sleep(TIMEOUT_S)
        raise KubeError(0, "TimeoutError", "no answer in time")


def _request(
    method: str, path: str, body: Any, query: Any, content_type: str, door: str, now: float
) -> Request:
    rest = (path.partition(f"/namespaces/{NAMESPACE}/")[2] or path.rpartition("/v1/")[2]).split("/")
    resource, name, subresource = [*rest, "", ""][:3]
    return Request(
        method=method,
        resource=resource,
        name=name,
        subresource=subresource,
        query=dict(query or {}),
        content_type=content_type,
        body=None if body is None else json.loads(json.dumps(body)),
        door=door,
        at=now,
    )


class Operator:
    """One process: its core, and watches in Kopf's place."""

    def __init__(self, site: Site, door: str) -> None:
        from tests.support.chaos_kubelet import client_of

        self._site, self.door = site, door
        metrics = Metrics()
        settings = Settings(
            watch_namespaces=NAMESPACE,
            identity=door,
            lease_namespace=NAMESPACE,
            resync_seconds=RESYNC_S,
            default_image="pod:1",
        )
        self.kube = ChaosKube(site, door, metrics=metrics)
        self.pods = client_of(site, door, metrics=metrics, may_work=lambda: self.core.may_work())
        self.core = Core(
            settings,
            kube=self.kube,
            pods=self.pods,
            metrics=metrics,
            clock=site.clock,
            steady_clock=site.loop.time,
        )
        self._watches: list[asyncio.Task[None]] = []

    def start(self) -> None:
        hub = self.core.hub
        for resource, feed in (
            ("rolloutreplicas", hub.replica),
            ("pods", hub.pod),
            ("services", hub.service),
        ):
            self._watches.append(
                asyncio.create_task(self._watch(resource, feed), name=f"watch {resource}")
            )
        self.core.start()

    async def stop(self, *, killed: bool = False) -> None:
        """End it; ``killed``: nothing that it does on the way reaches anybody."""
        if killed:
            self.kube.dead = self.pods.dead = True
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self.core.stop()

    async def _watch(self, resource: str, feed: Any) -> None:
        site = self._site
        while True:
            while site.is_away(self.door):
                await asyncio.sleep(0.3)
            queue = site.server.watch(resource)
            try:
                for raw in site.server.all(resource):
                    _feed(feed, resource, None, raw)
                # Kopf ends each watch by its time and lists again
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(site.dice.uniform(0.8, 1.2) * WATCH_S):
                        await self._follow(queue, resource, feed)
            finally:
                site.server.unwatch(resource, queue)
            await asyncio.sleep(site.dice.uniform(0.05, 2.0))

    async def _follow(self, queue: Any, resource: str, feed: Any) -> None:
        """Until the watch breaks; then all is listed again, but for what was deleted meanwhile."""
        site, dice = self._site, self._site.dice
        while True:
            event = await queue.get()
            await asyncio.sleep(dice.uniform(*LATENCY_S))
            if site.is_away(self.door):
                return
            if site.loop.now < site.silent_until:
                continue
            if dice.random() < site.watch_trouble:
                fate = dice.choice(("lost", "late", "twice", "breaks"))
                if fate == "breaks":
                    return
                if fate == "lost":
                    continue
                if fate == "late":
                    await asyncio.sleep(dice.uniform(0.1, 4.0))
                else:
                    _feed(feed, resource, event["type"], json.loads(json.dumps(event["object"])))
            _feed(feed, resource, event["type"], event["object"])


def _feed(feed: Any, resource: str, kind: str | None, raw: Json) -> None:
    labels = raw["metadata"].get("labels") or {}
    if resource == "rolloutreplicas" or labels.get(names.MANAGED_BY_LABEL) == names.MANAGER:
        feed({"type": kind, "object": raw})

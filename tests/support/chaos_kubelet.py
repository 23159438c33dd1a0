"""Kubelet, nodes that hang, and the way to the pods, for the chaos of the operator."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from rollout_operator.api import names
from rollout_operator.control.pod_client import NotConnected, PodClient, Unreachable
from rollout_operator.control.routes import PodAddress
from rollout_pod.protocol import StateDocument
from tests.support.chaos_group import Follower
from tests.support.chaos_pods import SYNC_S, ChaosPod, Pod
from tests.support.chaos_site import Site
from tests.support.fake_apiserver import Json

NODES = ("n1", "n2")
"""The first one hangs now and then; the second takes what is made meanwhile."""
UNREADY_S = 3.0
TAINT_S = 5.0
"""After so long the controllers call a node that hangs not ready, and end its pods."""


class Kubelet:
    """Runs what the API server holds, unless it is paused."""

    def __init__(self, site: Site, root: Path) -> None:
        self._site = site
        self._root = root
        self._numbers = itertools.count(1)
        self.pods: dict[str, Pod] = {}
        self.committed: dict[str, set[str]] = {}
        """By replica: what pods that are gone had committed."""
        self.paused_until = 0.0
        self.hangs_until = 0.0
        self._hung_at: float | None = None
        self._steps = 0
        self._unready = ""
        self._ready_again = 0.0
        for node in NODES:
            site.server.put("nodes", {"metadata": {"name": node}})
            self._say(node, "True")

    # -- a node that hangs

    def hang(self, seconds: float) -> list[str]:
        """Nothing of the first node answers or ends for so long; returns its pods."""
        self.hangs_until = self._site.loop.now + seconds
        if self._hung_at is None:
            self._hung_at, self._steps = self._site.loop.now, 0
        held = [pod for pod in self.pods.values() if pod.node == NODES[0]]
        for pod in held:
            pod.deaf_until = max(pod.deaf_until, self.hangs_until)
        return [pod.name for pod in held]

    def unready_until(self, node: str) -> float:
        """When the API server last said that it is not ready (unix seconds)."""
        return self._site.clock() if self._unready == node else self._ready_again

    def _is_held(self, pod: Pod) -> bool:
        return self._hung_at is not None and pod.node == NODES[0]

    def _say(self, node: str, ready: str) -> None:
        conditions = [{"type": "Ready", "status": ready}]
        self._site.server.change("nodes", node, {"status": {"conditions": conditions}})

    def _watch_nodes(self) -> None:
        """The controllers' part."""
        if self._hung_at is None:
            return
        now, held = self._site.loop.now, [p for p in self.pods.values() if self._is_held(p)]
        if now >= self.hangs_until:
            self._hung_at = None
            if self._unready:
                self._unready, self._ready_again = "", self._site.clock()
            self._say(NODES[0], "True")
            return
        if self._steps == 0 and now >= self._hung_at + UNREADY_S:
            self._steps = 1
            self._unready = NODES[0]
            self._say(NODES[0], "Unknown")
            for pod in held:
                pod.lose_touch()
        if self._steps == 1 and now >= self._hung_at + TAINT_S:
            self._steps = 2
            for pod in held:
                pod.taint()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            self._site.server.collect_garbage()
            self._watch_nodes()
            for one in self.pods.values():
                if not self._is_held(one):
                    one.live()
            if self._site.loop.now >= self.paused_until:
                await self._sync()

    async def _sync(self) -> None:
        found = {raw["metadata"]["uid"]: raw for raw in self._site.server.peek("pods")}
        for uid, one in list(self.pods.items()):
            if self._is_held(one):
                continue
            if uid not in found or one.gone:
                await one.end()
                self.committed.setdefault(one.owner, set()).update(one.committed)
                del self.pods[uid]
        for uid, raw in found.items():
            if uid not in self.pods:
                if not raw["metadata"].get("ownerReferences"):
                    continue
                number = next(self._numbers)
                rank = int(raw["metadata"]["labels"].get(names.RANK_LABEL, 0))
                node = NODES[rank % 2] if self._hung_at is None else NODES[1]
                raw = self._site.server.change(
                    "pods", raw["metadata"]["name"], {"spec": {"nodeName": node}}
                )
                self.pods[uid] = self._start(
                    raw, f"10.0.0.{number}", node, self._root / str(number)
                )
            if not self._is_held(self.pods[uid]):
                await self.pods[uid].sync(raw)

    def _start(self, raw: Json, ip: str, node: str, folder: Path) -> Pod:
        labels = raw["metadata"]["labels"]
        if group := labels.get(names.GROUP_LABEL):
            return Follower(self._site, raw, ip, node, head=lambda: self._head(group))
        uid, nodes = raw["metadata"]["uid"], _nodes_of(raw)
        return ChaosPod(
            self._site, raw, ip, folder, node, joined=lambda: len(self._joined(uid)) == nodes - 1
        )

    def _head(self, uid: str) -> ChaosPod | None:
        found = self.pods.get(uid)
        return found if isinstance(found, ChaosPod) and not found.gone else None

    def _joined(self, uid: str) -> set[int]:
        """The ranks of those that a head hears of."""
        return {
            one.rank for one in self.pods.values()
            if isinstance(one, Follower) and one.group == uid and one.has_joined
        }  # fmt: skip

    def look(self) -> None:
        for one in self.pods.values():
            one.look()

    def at(self, ip: str) -> Pod | None:
        return next((p for p in self.pods.values() if p.ip == ip and not p.gone), None)

    async def stop(self) -> None:
        for one in list(self.pods.values()):
            await one.end()


def _nodes_of(raw: Json) -> int:
    (engine,) = [c for c in raw["spec"]["containers"] if c["name"] == names.ENGINE]
    args = engine["args"]
    return int(args[args.index("--nodes") + 1]) if "--nodes" in args else 1


class ChaosPodClient(PodClient):
    """The operator's own client over a network that loses, delays and repeats."""

    site: Site
    door: str
    dead = False

    async def _ask(
        self,
        verb: str,
        pod: PodAddress,
        what: str,
        token: str,
        *,
        timeout: float,
        body: str | None = None,
        query: dict[str, str] | None = None,
    ) -> StateDocument:
        site, dice = self.site, self.site.dice
        await asyncio.sleep(dice.uniform(0.001, 0.01))
        fate = site.fate(site.pod_trouble)
        found = site.kubelet.at(pod.ip)
        if self.dead or found is None or fate == "refused":
            raise NotConnected("connection refused")
        if fate == "lost":
            await asyncio.sleep(min(timeout, 3.0))
            raise Unreachable("no answer in time")
        try:
            async with asyncio.timeout(timeout):
                answer = await found.answer(verb, token, body=body, query=query)
                if fate == "twice" and verb == "PUT":
                    answer = await found.answer(verb, token, body=body, query=query)
        except TimeoutError:
            raise Unreachable("no answer in time") from None
        if fate == "answer lost":
            raise Unreachable("the connection broke")
        return answer


def client_of(site: Site, door: str, **given: Any) -> ChaosPodClient:
    made = ChaosPodClient(**given)
    made.site, made.door = site, door
    return made

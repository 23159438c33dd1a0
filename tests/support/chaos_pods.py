"""Kubelet and its pods for the chaos of the operator: real supervisors around the attacked fakes."""

import asyncio
import base64
import itertools
from pathlib import Path
from typing import Any

from rollout_operator.api.times import rfc3339
from rollout_operator.control.pod_client import (
    Fenced,
    NotConnected,
    PodClient,
    Refused,
    Unauthorized,
    Unreachable,
)
from rollout_operator.control.routes import PodAddress
from rollout_pod.protocol import DESIRED_ANNOTATION, DesiredDocument, StateDocument
from rollout_pod.supervisor import supervisor as supervision
from rollout_pod.supervisor.store import Store
from tests.support.attack_oracle import Oracle
from tests.support.attacked_fakes import AttackedAgent, AttackedEngine
from tests.support.chaos_site import Site
from tests.support.fake_apiserver import Json
from tests.support.operator_kit import running_status

NODES = ("n1", "n2")
"""The first one hangs now and then; the second takes what is made meanwhile."""
UNREADY_S = 3.0
TAINT_S = 5.0
"""After so long the controllers call a node that hangs not ready, and end its pods."""
TAINT_GRACE_S = 16.0
SYNC_S = 0.5
"""Kubelet looks at its pods so often, and tells the API server what changed."""
GRACE_S = 20.0


class ChaosPod:
    """One pod: its containers start again where they end, its files outlive them."""

    def __init__(self, site: Site, raw: Json, ip: str, folder: Path, node: str) -> None:
        self._site = site
        self.node = node
        self.name: str = raw["metadata"]["name"]
        self.uid: str = raw["metadata"]["uid"]
        self.owner: str = raw["metadata"]["ownerReferences"][0]["uid"]
        self.replica: str = raw["metadata"]["ownerReferences"][0]["name"]
        self.ip = ip
        self._folder = folder
        folder.mkdir()
        first = DesiredDocument.model_validate_json(
            raw["metadata"]["annotations"][DESIRED_ANNOTATION]
        )
        (folder / "first.json").write_text(first.model_dump_json())
        self.agent = AttackedAgent()
        self.oracle = Oracle(site.loop)
        self.oracle.desired = first
        self.restarts = -1
        self.documents = [first]
        self.committed: set[str] = set()
        self.paused_ever = False
        self.refuses_until = 0.0
        self.deaf_until = 0.0
        self.evicted = False
        self.gone = False
        self._told: Json = {}
        self._booted = False
        self._deleting_since: float | None = None
        self._boot()

    def _boot(self) -> None:
        site = self._site
        self.restarts += 1
        self.engine = AttackedEngine(broken=self.oracle.breaks, loads=self.oracle.loads)
        self.engine.agent = self.agent
        self.engine.turns = lambda: site.loop.turns
        self.supervisor = supervision.Supervisor(
            self.engine,
            self.agent,
            Store(self._folder, first_desired=self._folder / "first.json"),
            drain_timeout_s=1.0,
            heartbeat_timeout_s=60.0,
        )
        self.task = asyncio.create_task(self.supervisor.run(), name=f"supervisor {self.name}")
        self.oracle.booted(self.supervisor, self.engine)
        self.task.add_done_callback(self.oracle.exits)
        self._booted = True

    @property
    def is_listed(self) -> bool:
        """The API server has it still."""
        found = self._site.server.get("pods", self.name)
        return found is not None and found["metadata"]["uid"] == self.uid

    # -- what happens to it

    async def kill(self) -> None:
        """Its engine's container dies; kubelet starts another."""
        self.engine.kill("the container was killed")
        self.task.cancel()
        await self._end()

    def evict(self) -> None:
        self.evicted = True

    def lose_touch(self) -> None:
        """The controllers' part, once its node is not ready."""
        self._told = {}
        raw = self._site.server.get("pods", self.name)
        if self.is_listed and raw is not None and raw.get("status"):
            unready = [{"type": "Ready", "status": "False"}]
            self._site.server.change("pods", self.name, {"status": {"conditions": unready}})

    def taint(self) -> None:
        """The controllers' part, once the pod tolerates it no longer."""
        raw = self._site.server.get("pods", self.name)
        if not self.is_listed or raw is None or raw["metadata"].get("deletionTimestamp"):
            return
        disruption = {
            "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
        }  # fmt: skip
        conditions = [*((raw.get("status") or {}).get("conditions") or ()), disruption]
        by = {"deletionTimestamp": rfc3339(self._site.clock() + TAINT_GRACE_S)}
        self._site.server.change(
            "pods", self.name, {"metadata": by, "status": {"conditions": conditions}}
        )

    async def end(self) -> None:
        """Nothing of it is left."""
        self.gone = True
        if self._booted:
            await self.kill()

    async def _end(self) -> None:
        self._booted = False
        await asyncio.gather(self.task, return_exceptions=True)
        await self.engine.shutdown()

    # -- what kubelet does

    async def sync(self, raw: Json) -> None:
        """One look of kubelet's."""
        now = self._site.loop.now
        if raw["metadata"].get("deletionTimestamp") and self._deleting_since is None:
            self._deleting_since = now
            if self._booted:
                self.oracle.draining = True
                self.supervisor.begin_drain()
        if self._booted and self.task.done():
            error = None if self.task.cancelled() else self.task.exception()
            self.oracle.ended(error)
            await self._end()
        if self._deleting_since is not None:
            if not self._booted or now - self._deleting_since > GRACE_S:
                await self.end()
                if self.is_listed:
                    self._site.server.remove("pods", self.name)
            return
        if self.evicted:
            if self._booted:
                await self.kill()
            status: Json = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
        else:
            if not self._booted:
                self._boot()
            ready = self.supervisor.is_ready
            status = running_status(self.ip, ready=ready, restarts=self.restarts)
        if status != self._told and self.is_listed:
            self._told = status
            self._site.server.change("pods", self.name, {"status": status})

    def look(self) -> None:
        """In every turn: the design's invariants."""
        if not self._booted or self.task.done():
            return
        self.oracle.look()
        state = self.supervisor.board.state
        if state.committed is not None:
            self.committed.add(state.committed.version)

    # -- its admin port

    async def answer(
        self, verb: str, token: str, *, body: str | None, query: dict[str, str] | None
    ) -> StateDocument:
        if self._site.loop.now < self.deaf_until or not self._booted or self.task.done():
            raise Unreachable("no answer")
        secret = self._site.server.get("secrets", f"{self.replica}-admin") or {}
        if base64.b64decode((secret.get("data") or {}).get("token", "")).decode() != token:
            raise Unauthorized("another token")
        if verb == "PUT":
            assert body is not None
            return self._take(DesiredDocument.model_validate_json(body))
        assert query is not None
        return await self.supervisor.board.wait_news(
            after=query.get("after"), timeout_s=float(query["timeout"])
        )

    def _take(self, document: DesiredDocument) -> StateDocument:
        if self._site.loop.now < self.refuses_until:
            raise Refused("made to refuse")
        try:
            state = self.supervisor.put_desired(document)
        except supervision.Fenced as error:
            raise Fenced(str(error)) from error
        if document != self.documents[-1]:
            self.documents.append(document)
            self.oracle.accepted(document)
            self._site.judge.document(self, document)
        return state


class Kubelet:
    """Runs what the API server holds, unless it is paused."""

    def __init__(self, site: Site, root: Path) -> None:
        self._site = site
        self._root = root
        self._numbers = itertools.count(1)
        self.pods: dict[str, ChaosPod] = {}
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

    def _is_held(self, pod: ChaosPod) -> bool:
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
                node = NODES[0] if self._hung_at is None else NODES[1]
                raw = self._site.server.change(
                    "pods", raw["metadata"]["name"], {"spec": {"nodeName": node}}
                )
                self.pods[uid] = ChaosPod(
                    self._site, raw, f"10.0.0.{number}", self._root / str(number), node
                )
            if not self._is_held(self.pods[uid]):
                await self.pods[uid].sync(raw)

    def look(self) -> None:
        for one in self.pods.values():
            one.look()

    def at(self, ip: str) -> ChaosPod | None:
        return next((p for p in self.pods.values() if p.ip == ip and not p.gone), None)

    async def stop(self) -> None:
        for one in list(self.pods.values()):
            await one.end()


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

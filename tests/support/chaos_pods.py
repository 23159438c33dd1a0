"""Pods for the chaos of the operator: real supervisors around the attacked fakes."""

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout_operator.api import names
from rollout_operator.api.times import rfc3339
from rollout_operator.control.pod_client import (
    Fenced,
    Refused,
    Unauthorized,
    Unreachable,
)
from rollout_pod.engine.base import EngineStartError
from rollout_pod.protocol import DESIRED_ANNOTATION, DesiredDocument, EngineInfo, StateDocument
from rollout_pod.supervisor import supervisor as supervision
from rollout_pod.supervisor.store import Store
from tests.support.attack_oracle import Oracle
from tests.support.attacked_fakes import AttackedAgent, AttackedEngine
from tests.support.chaos_site import Site
from tests.support.fake_apiserver import Json
from tests.support.operator_kit import ended_status, running_status

TAINT_GRACE_S = 16.0
SILENCE_S = 10.0
"""So long the pods of one engine bear to hear nothing of each other."""
JOIN_S = 90.0
SYNC_S = 0.5
"""Kubelet looks at its pods so often, and tells the API server what changed."""
GRACE_S = 20.0


class Pod:
    """What kubelet and the controllers do to any pod."""

    def __init__(self, site: Site, raw: Json, ip: str, node: str) -> None:
        self._site = site
        self.node = node
        self.name: str = raw["metadata"]["name"]
        self.uid: str = raw["metadata"]["uid"]
        self.owner: str = raw["metadata"]["ownerReferences"][0]["uid"]
        self.replica: str = raw["metadata"]["ownerReferences"][0]["name"]
        labels = raw["metadata"]["labels"]
        self.rank = int(labels.get(names.RANK_LABEL, 0))
        self.group: str = labels.get(names.GROUP_LABEL, "") or self.uid
        self.is_final = raw["spec"].get("restartPolicy") == "Never"
        """Its containers start once."""
        self.ip = ip
        self.committed: set[str] = set()
        self.deaf_until = 0.0
        self.evicted = False
        self.gone = False
        self.exit_code: int | None = None
        """Of the engine's container, where that is over for good."""
        self._told: Json = {}
        self._deleting_since: float | None = None

    @property
    def is_listed(self) -> bool:
        """The API server has it still."""
        found = self._site.server.get("pods", self.name)
        return found is not None and found["metadata"]["uid"] == self.uid

    @property
    def is_up(self) -> bool:
        """Its process runs."""
        raise NotImplementedError

    # -- what happens to it

    def evict(self) -> None:
        self.evicted = True

    def kill_container(self) -> None:
        raise NotImplementedError

    def arm(self, fault: str) -> None:
        """The next update meets it."""

    def lose_staged(self) -> None:
        """What its agent holds."""

    def refuse_until(self, at: float) -> None:
        """It takes no document."""

    def calm(self) -> None:
        """Faults are over."""
        self.deaf_until = 0.0

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
        if self.is_up:
            await self.kill()

    async def kill(self) -> None:
        raise NotImplementedError

    # -- what kubelet does

    async def sync(self, raw: Json) -> None:
        """One look of kubelet's."""
        now = self._site.loop.now
        if raw["metadata"].get("deletionTimestamp") and self._deleting_since is None:
            self._deleting_since = now
            if self.is_up:
                self.begin_drain()
        await self._settle()
        if self._deleting_since is not None:
            if not self.is_up or now - self._deleting_since > GRACE_S:
                await self.end()
                if self.is_listed:
                    self._site.server.remove("pods", self.name)
            return
        if self.evicted:
            if self.is_up:
                await self.kill()
            status: Json = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
        elif self.is_final and not self.is_up:
            status = ended_status(self.ip, self.exit_code or 0, at=rfc3339(self._site.clock()))
            if self._told.get("phase") == status["phase"]:
                status = self._told  # with the time of then
        else:
            status = self._running()
        if status != self._told and self.is_listed:
            self._told = status
            self._site.server.change("pods", self.name, {"status": status})

    def begin_drain(self) -> None:
        """SIGTERM."""
        raise NotImplementedError

    async def _settle(self) -> None:
        """See whether the process has ended."""

    def live(self) -> None:
        """What its process does, however kubelet fares."""

    def _running(self) -> Json:
        """Its status while it runs; starts it where kubelet would."""
        raise NotImplementedError

    def look(self) -> None:
        """In every turn: the invariants of docs/invariants.md."""

    async def answer(
        self, verb: str, token: str, *, body: str | None, query: dict[str, str] | None
    ) -> StateDocument:
        """Its admin port."""
        raise Unreachable("no answer")


class ChaosPod(Pod):
    """A head: its containers start again where they end, unless it leads others; its files outlive
    them.
    """

    def __init__(
        self, site: Site, raw: Json, ip: str, folder: Path, node: str, *, joined: Callable[[], bool]
    ) -> None:
        super().__init__(site, raw, ip, node)
        self._joined = joined
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
        self.refuses_until = 0.0
        self._whole_at: float | None = None
        """When all nodes were heard of last."""
        self._booted = False
        self._boot()

    def _boot(self) -> None:
        site = self._site
        self.restarts += 1
        self.engine = GroupEngine(
            broken=self.oracle.breaks, loads=self.oracle.loads, joined=self._joined
        )
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
    def is_up(self) -> bool:
        return self._booted

    def kill_container(self) -> None:
        self.engine.kill("the container was killed")

    def arm(self, fault: str) -> None:
        attacked = self.agent if fault.startswith(("stage", "send")) else self.engine
        attacked.armed[fault] += 1

    def lose_staged(self) -> None:
        self.agent.staged.clear()

    def refuse_until(self, at: float) -> None:
        self.refuses_until = at

    def calm(self) -> None:
        super().calm()
        self.refuses_until = 0.0
        self.engine.armed.clear()
        self.agent.armed.clear()

    async def kill(self) -> None:
        """Its engine's container dies; kubelet starts another."""
        self.engine.kill("the container was killed")
        self.task.cancel()
        await self._end()

    async def _end(self) -> None:
        self._booted = False
        await asyncio.gather(self.task, return_exceptions=True)
        if self.is_final:
            self.exit_code = int(self.task.cancelled() or self.task.exception() is not None)
        await self.engine.shutdown()

    def begin_drain(self) -> None:
        if self._booted and not self.task.done():
            self.oracle.draining = True
            self.supervisor.begin_drain()

    def live(self) -> None:
        now = self._site.loop.now
        if self._joined():
            self._whole_at = now
        elif self._whole_at is not None and now - self._whole_at > SILENCE_S and self._booted:
            self.engine.kill("a node is lost")

    async def _settle(self) -> None:
        if self._booted and self.task.done():
            error = None if self.task.cancelled() else self.task.exception()
            self.oracle.ended(error)
            await self._end()

    def _running(self) -> Json:
        if not self._booted:
            self._boot()
        one = self.supervisor
        return running_status(
            self.ip, ready=one.is_ready, restarts=self.restarts, started=one.is_started
        )

    def look(self) -> None:
        if not self._booted or self.task.done():
            return
        self.oracle.look()
        state = self.supervisor.board.state
        if state.committed is not None:
            self.committed.add(state.committed.version)

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


@dataclass
class GroupEngine(AttackedEngine):
    """Starts when the pods of all ranks are there."""

    joined: Callable[[], bool] = lambda: True

    async def start(self) -> EngineInfo:
        tries = JOIN_S
        while not self.joined():
            tries -= 1
            if tries < 0:
                self.start_error = EngineStartError("a node is not there")
                break
            await asyncio.sleep(1.0)
        return await super().start()

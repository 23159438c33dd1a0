"""What an operator must not do, whatever happens to it: judged at every write and document."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.conditions import Reason
from rollout_operator.api.spec import RolloutSpec
from rollout_operator.api.times import unix
from rollout_operator.plan.ends import OVERDUE_S
from rollout_operator.plan.manifests import pod_hash
from rollout_pod.protocol import BASE_VERSION, DesiredDocument
from tests.support.chaos_pods import ChaosPod
from tests.support.chaos_site import Site
from tests.support.fake_apiserver import Json, Request

_ONLY_CONDITIONS = frozenset(
    {
        Reason.SERVING, Reason.PAUSED, Reason.FOREIGN_OBJECT, Reason.POD_UNREACHABLE, Reason.POISONED,
        Reason.ENGINE_RESTARTING, Reason.ENGINE_FAILED, Reason.DOCUMENT_REFUSED, Reason.UNAUTHORIZED,
        Reason.WEIGHTS_UNAVAILABLE, Reason.UPDATE_FAILED,
    }
)  # fmt: skip
"""Events of these reasons tell of the condition Ready, and of nothing else."""
LATE_S = 1.0
"""So long after a spec changed a write may still be on its way that was right before."""


@dataclass(frozen=True)
class Asked:
    """A spec that somebody wrote."""

    spec: RolloutSpec
    at: float


class Judge:
    """Knows every spec that there was, and who holds the Lease."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._asked: dict[tuple[str, int], Asked] = {}
        self._latest: dict[str, int] = {}
        self._gone_at: dict[str, float] = {}
        self._observed: dict[str, int] = {}
        self._ready: dict[str, str] = {}
        self._transitions: Counter[tuple[str, str]] = Counter()
        self._events: Counter[tuple[str, str]] = Counter()
        self._was_whole = False
        self.forced = 0
        self.holder = ""
        self.foreign: list[tuple[str, Json]] = []

    # -- what people do

    def asked(self, raw: Json) -> None:
        meta = raw["metadata"]
        asked = Asked(RolloutSpec.model_validate(raw["spec"]), self._site.loop.now)
        self._asked.setdefault((meta["uid"], meta["generation"]), asked)
        self._latest[meta["uid"]] = meta["generation"]

    def removed(self, raw: Json) -> None:
        self._gone_at[raw["metadata"]["uid"]] = self._site.loop.now

    # -- what the operator does

    def asks(self, request: Request) -> None:
        """A write arrives: only who holds the Lease may send any."""
        assert request.door == self.holder, f"{request} of {request.door}, {self.holder} holds"
        if request.method == "DELETE" and request.body.get("gracePeriodSeconds") == 0:
            self._judge_force(request)
        elif request.method == "DELETE" and request.resource == "pods":
            self._was_whole = self._is_whole(request.name)

    def wrote(self, request: Request) -> None:
        """A write was done."""
        if request.resource == "leases":
            before, self.holder = self.holder, request.body["spec"]["holderIdentity"] or ""
            if self.holder != before:
                self._site.note(f"the Lease is held by {self.holder or 'nobody'}")
            return
        self._site.note(f"{request.door}: {request}")
        if request.subresource == "status":
            self._judge_status(request.body)
        elif request.method == "POST" and request.resource == "pods":
            self._judge_creation(request.body)
        elif request.method == "DELETE" and request.body.get("gracePeriodSeconds") != 0:
            self._judge_deletion(request)
        for resource, body in self.foreign:
            assert self._site.server.get(resource, body["metadata"]["name"]) == body, (
                f"{request} changed what is not ours"
            )

    def _specs(self, uid: str) -> list[RolloutSpec]:
        """The spec in force, and those that were so a moment ago."""
        newest, now = self._latest[uid], self._site.loop.now
        found = [self._asked[uid, newest].spec]
        for generation in range(newest - 1, 0, -1):
            if now - self._asked[uid, generation + 1].at > LATE_S:
                break
            found.append(self._asked[uid, generation].spec)
        return found

    def _judge_creation(self, body: Json) -> None:
        (owner,) = body["metadata"]["ownerReferences"]
        uid = owner["uid"]
        if uid in self._gone_at:
            late = self._site.loop.now - self._gone_at[uid]
            assert late <= LATE_S, f"a pod is made for a replica that was deleted {late:.1f} s ago"
        made = body["metadata"]["annotations"][names.HASH_ANNOTATION]
        assert made in [pod_hash(s) for s in self._specs(uid)], "a pod is made for an old spec"
        group = body["metadata"]["labels"].get(names.GROUP_LABEL)
        if group:
            heads = [p for p in self._pods(uid) if p["metadata"]["uid"] == group]
            told = [s for p in heads for s in (p.get("status") or {}).get("containerStatuses", ())]
            started = any(status.get("started") for status in told)
            assert not started or self._site.is_blind, (
                "a pod is made for an engine that has started without it"
            )
        else:
            left = [p["metadata"]["name"] for p in self._pods(uid)]
            left.remove(body["metadata"]["name"])
            assert not left, f"a head is made while {left} are there"

    def _pods(self, uid: str) -> list[Json]:
        return [
            p for p in self._site.server.peek("pods")
            if uid in [o["uid"] for o in p["metadata"].get("ownerReferences") or ()]
        ]  # fmt: skip

    def _is_whole(self, name: str) -> bool:
        """The pod is of a group that is there, and of which none is on its way out."""
        found = self._site.server.get("pods", name)
        if found is None:
            return False
        uid = found["metadata"]["ownerReferences"][0]["uid"]
        pods = self._pods(uid)
        groups = {
            p["metadata"]["labels"].get(names.GROUP_LABEL, p["metadata"]["uid"]) for p in pods
        }
        going = [
            p for p in pods
            if p["metadata"].get("deletionTimestamp")
            or (p.get("status") or {}).get("phase") in ("Failed", "Succeeded")
        ]  # fmt: skip
        return len(pods) == self._specs(uid)[0].nodes and len(groups) == 1 and not going

    def _judge_deletion(self, request: Request) -> None:
        assert request.resource == "pods", f"{request}: owner references remove the rest"
        raw = self._site.server.get("pods", request.name)
        assert raw is not None and request.body["preconditions"]["uid"] == raw["metadata"]["uid"]
        uid = raw["metadata"]["ownerReferences"][0]["uid"]
        if (raw.get("status") or {}).get("phase") == "Failed":
            return
        made = raw["metadata"]["annotations"][names.HASH_ANNOTATION]
        wanted = [pod_hash(s) for s in self._specs(uid)]
        right = all(made == one for one in wanted)
        if self._specs(uid)[0].nodes > 1:
            right = right and self._was_whole
        assert not right, f"{request}: a pod that was right is deleted"

    def _judge_force(self, request: Request) -> None:
        raw, now = self._site.server.get("pods", request.name), self._site.clock()
        wanted = request.body["preconditions"]["uid"]
        if raw is None or raw["metadata"]["uid"] != wanted:
            return  # refused
        self.forced += 1
        by = unix(raw["metadata"].get("deletionTimestamp"))
        assert by and now >= by + OVERDUE_S, f"{request}: by force, before its time"
        node = raw["spec"]["nodeName"]
        assert now - self._site.kubelet.unready_until(node) <= LATE_S, f"{request}: {node} is well"

    def told(self, request: Request) -> None:
        """An event was taken: one for each time that the condition became this."""
        event = request.body
        key = event["involvedObject"]["uid"], event["reason"]
        # with the reason of an engine's end, the pods of its group are told of as well
        of_pod = event["message"].startswith(f"pod {event['involvedObject']['name']}-")
        if event["reason"] in _ONLY_CONDITIONS and not of_pod:
            self._events[key] += 1
            assert self._events[key] <= self._transitions[key], f"{event['reason']} told again"

    def _judge_status(self, body: Json) -> None:
        status, uid = body["status"], body["metadata"]["uid"]
        seen = status.get("observedGeneration", 0)
        assert self._observed.get(uid, 0) <= seen <= self._latest[uid], "observedGeneration"
        self._observed[uid] = seen
        conditions = {c["type"]: c for c in status["conditions"]}
        ready = conditions["Ready"]
        if self._ready.get(uid) != ready["reason"]:
            self._ready[uid] = ready["reason"]
            self._transitions[uid, ready["reason"]] += 1
        assert ready["reason"] != "InternalError", ready
        assert ready["observedGeneration"] == seen
        if ready["status"] != "True":
            return
        spec = self._asked[uid, seen].spec
        version = spec.weight_version or BASE_VERSION
        assert status["weightVersion"] == version, f"Ready for {version}: {status}"
        assert ready["reason"] == ("Paused" if spec.paused else "Serving"), ready
        told, *others = status["pods"]
        assert told["rank"] == 0 and len(others) < spec.nodes, status
        pods = [p for p in self._site.kubelet.pods.values() if p.name == told["name"]]
        # the news that it is gone may be lost
        known = set().union(*(p.committed for p in pods), self.committed.get(uid, set()))
        assert version in known, f"no pod ever committed {version}"

    # -- what a pod is told

    def document(self, pod: ChaosPod, document: DesiredDocument) -> None:
        """A pod took it."""
        self._site.note(f"{pod.name} takes generation {document.generation}")
        assert document.owner == pod.owner, "told by one that does not own it"
        asked = self._asked.get((document.owner, document.generation))
        assert asked is not None, f"nobody asked for generation {document.generation}"
        spec: Any = asked.spec
        assert document.paused == spec.paused
        version = document.weights.version if document.weights else BASE_VERSION
        assert version == (spec.weight_version or BASE_VERSION)
        if document.fallback is not None:
            ours = [p for p in self._site.kubelet.pods.values() if p.owner == pod.owner]
            known = set().union(*(p.committed for p in ours), self.committed.get(pod.owner, set()))
            assert document.fallback.version in known, f"{document.fallback} was never committed"

    @property
    def committed(self) -> dict[str, set[str]]:
        """By replica: what pods that are gone had committed."""
        return self._site.kubelet.committed

"""Reads what a plan needs: from the cache that the watches feed, or by name."""

import time
from dataclasses import dataclass, replace

import structlog

from rollout_operator.api import names
from rollout_operator.api.replica import Replica
from rollout_operator.api.selector import Selector
from rollout_operator.apply.cache import Cache, Key, reread
from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.kube import (
    NODES,
    PODS,
    REPLICAS,
    SECRETS,
    SERVICES,
    JsonObject,
    Kube,
)
from rollout_operator.memory import Memory, Token
from rollout_operator.plan import manifests
from rollout_operator.plan.ends import depends_on_node
from rollout_operator.plan.observed import (
    ChildSeen,
    NodeState,
    Ownership,
    PodSeen,
    Report,
    Seen,
    covers,
    node_state,
    ownership,
    pod_seen,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Caches:
    """What the watches feed."""

    replicas: Cache
    pods: Cache
    services: Cache


class Observer:
    """Everything that is read of the cluster."""

    def __init__(self, kube: Kube, caches: Caches, *, selector: Selector, resync_s: float) -> None:
        self._kube = kube
        self._caches = caches
        self._selector = selector
        self._resync_s = resync_s

    async def replica(self, key: Key, *, fresh: bool) -> Replica | None:
        """Return the replica; None if there is none. ``fresh``: from the API server itself."""
        raw = None if fresh else self._caches.replicas.get(key)
        if raw is None:
            raw = await reread(self._kube, self._caches.replicas, REPLICAS, key)
        if raw is None:
            return None
        if not self._selector.matches(raw["metadata"].get("labels") or {}):
            # its labels say that another operator serves it
            self._caches.replicas.drop(key)
            return None
        return Replica.parse(raw)

    async def observe(self, replica: Replica, memory: Memory, *, fresh: bool, now: float) -> Seen:
        """Return all that was seen of the replica's children (``now``: unix seconds)."""
        namespace, name = replica.namespace, replica.name
        wanted = manifests.services(replica)
        nodes = replica.spec.nodes if replica.spec else 1
        pod_key = (namespace, names.pod_name(name, 0))
        pod_keys = [(namespace, names.pod_name(name, rank)) for rank in range(nodes)]
        service_keys = [(namespace, service["metadata"]["name"]) for service in wanted]
        services, pods = self._caches.services, self._caches.pods
        # of a new replica: what has our names and not our labels no list shows
        missing = not memory.looked and (
            not all(key in pods for key in pod_keys)
            or not all(key in services for key in service_keys)
        )
        if fresh or missing:
            for key in service_keys:
                await reread(self._kube, services, SERVICES, key)
            for key in pod_keys:
                await reread(self._kube, pods, PODS, key)
        memory.looked = True
        lacks_pod = pod_key not in pods
        if fresh or lacks_pod or time.monotonic() >= memory.secret_due:
            # the pod that is made next cannot start without it
            await self.read_secret(replica, memory)
        raw = pods.get(pod_key)
        pod = None if raw is None else pod_seen(raw, name=name, uid=replica.uid)
        followers = self._followers(replica, nodes)
        return Seen(
            secret=_secret(memory.token),
            services=tuple(
                _service(replica, found, complete=_holds(found, service))
                for found, service in zip(map(services.get, service_keys), wanted, strict=True)
            ),
            pod=pod,
            followers=followers,
            nodes=nodes,
            lost=frozenset([f.name for f in followers if await self._lost(f, now)]),
            report=report(memory, pod),
            refusal=memory.refusal,
            refused=tuple(memory.refused.values()),
            node=await self._node(pod, now),
        )

    def _followers(self, replica: Replica, nodes: int) -> tuple[PodSeen, ...]:
        """Those that the spec asks for, whosever they are, and ours that it does not ask for."""
        found = []
        for rank in range(1, names.MAX_NODES):
            raw = self._caches.pods.get((replica.namespace, names.pod_name(replica.name, rank)))
            if raw is None:
                continue
            seen = pod_seen(raw, name=replica.name, uid=replica.uid)
            if rank < nodes or seen.owner is Ownership.OURS:
                found.append(replace(seen, rank=rank))
        return tuple(found)

    async def _lost(self, pod: PodSeen, now: float) -> bool:
        node = await self._node(pod, now)
        return node is not None and node.lost

    async def _node(self, pod: PodSeen | None, now: float) -> NodeState | None:
        """Ask for the node of a pod that goes: is there a kubelet to end it?"""
        if pod is None or not depends_on_node(pod, now):
            return None
        try:
            return node_state(await self._kube.get(NODES, "", pod.node))
        except KubeError as error:
            log.warning("node not read", node=pod.node, pod=pod.name, error=str(error))
            return NodeState.UNKNOWN

    async def read_secret(self, replica: Replica, memory: Memory) -> None:
        """Read the Secret with the token."""
        raw = await self._kube.get(SECRETS, replica.namespace, names.secret_name(replica.name))
        memory.token = Token.read(raw, replica=replica.name, uid=replica.uid)
        memory.secret_due = time.monotonic() + self._resync_s


def token(memory: Memory) -> str:
    """Return the token of the replica's own Secret; empty if there is none."""
    return memory.token.text if memory.token is not None else ""


def report(memory: Memory, pod: PodSeen | None) -> Report | None:
    """Return what the pod told; None while nobody asks it."""
    if pod is None or memory.watch is None or memory.watch.uid != pod.uid:
        return None
    told = memory.told if memory.told and memory.told.pod_uid == pod.uid else None
    heard = memory.watch.report()
    return replace(
        heard,
        unauthorized=heard.unauthorized or memory.denied,
        refused=told.refused if told else "",
        fenced=memory.fenced_uid == pod.uid,
    )


def _secret(token: Token | None) -> ChildSeen | None:
    if token is None:
        return None
    return ChildSeen(kind="Secret", name=token.name, owner=token.owner, complete=bool(token.text))


def _service(replica: Replica, raw: JsonObject | None, *, complete: bool) -> ChildSeen | None:
    if raw is None:
        return None
    return ChildSeen(
        kind="Service",
        name=raw["metadata"]["name"],
        owner=ownership(raw, name=replica.name, uid=replica.uid),
        complete=complete,
    )


def _holds(found: JsonObject | None, wanted: JsonObject) -> bool:
    if found is None:
        return False
    labels = covers(found["metadata"].get("labels") or {}, wanted["metadata"]["labels"])
    return labels and covers(found["spec"], wanted["spec"])

"""What was seen of a replica's children, boiled down from raw objects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.conditions import Reason
from rollout_operator.api.times import unix
from rollout_pod.protocol import StateDocument

Raw = Mapping[str, Any]


class NodeState(Enum):
    """What the API server says of a node."""

    READY = auto()
    NOT_READY = auto()
    ABSENT = auto()
    UNKNOWN = auto()
    """We may not ask, or got no answer."""

    @property
    def lost(self) -> bool:
        """Whether its kubelet will not tell of a pod's end."""
        return self in (NodeState.NOT_READY, NodeState.ABSENT)


class Ownership(Enum):
    """Whose an object with one of our names is."""

    OURS = auto()
    PREDECESSOR = auto()
    """Of a deleted replica of the same name: the garbage collector is about to remove it."""
    FOREIGN = auto()


@dataclass(frozen=True, kw_only=True)
class ChildSeen:
    """A Secret or a Service of ours, or something that has its name."""

    kind: str
    name: str
    owner: Ownership
    complete: bool
    """It holds all that we want of it."""


@dataclass(frozen=True, kw_only=True)
class ContainerSeen:
    """How a container fares. ``exit_*`` tell of its newest death, if it has died."""

    running: bool
    restarts: int
    waiting: str
    waiting_message: str
    exit_code: int | None
    exit_reason: str
    exit_message: str
    started: bool = False
    """Its startup probe has passed."""
    started_at: float = 0.0
    """Unix seconds since which it runs, or ran last; 0 where it never did."""
    ended_at: float = 0.0
    """Unix seconds of its newest death."""

    @property
    def ran(self) -> bool:
        """Whether its process was ever started."""
        return self.running or self.exit_code is not None


@dataclass(frozen=True, kw_only=True)
class PodSeen:
    """The pod that has our pod's name."""

    name: str
    uid: str
    owner: Ownership
    hash: str
    created: float
    phase: str
    ready: bool
    deleting: bool
    ip: str
    node: str
    unschedulable: str
    failure: str
    """Why the pod itself failed (an eviction); empty else."""
    reason: str
    """The first word of ``failure``: ``Evicted`` for one."""
    disruption: str
    """Who ended or ends it from outside: the reason of its condition DisruptionTarget."""
    disruption_message: str
    delete_by: float
    """Unix seconds by which it must be gone, since it was asked to stop; 0 where nobody asked."""
    engine: ContainerSeen | None
    weights: ContainerSeen | None
    rank: int = 0
    """0 is the head."""
    group: str = ""
    """The uid of the head's pod, of one that follows it."""
    image: str = ""
    """Of the engine, as the pod was made."""
    final: bool = False
    """Kubelet starts none of its containers again."""
    watched: bool = True
    """It has the labels by which the operator hears of it."""

    @property
    def over(self) -> bool:
        """Whether its containers will never run again."""
        # kubelet ends the sidecar first, and calls the pod Failed only then
        ended = self.engine is not None and self.engine.exit_code is not None
        over = self.final and ended and not (self.engine and self.engine.running)
        return over or self.phase in ("Failed", "Succeeded")

    @property
    def evicted_by_kubelet(self) -> bool:
        """Whether its node was short of memory or disk."""
        return self.reason == "Evicted"

    @property
    def answering(self) -> bool:
        """Whether its admin port may answer."""
        return bool(self.ip and self.engine and self.engine.running and not self.over)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the pod told over HTTP."""

    state: StateDocument | None = None
    """The newest; may be older than ``error``."""
    error: str = ""
    """Why the last attempt to ask failed; empty while the pod answers."""
    failing_for: float = 0.0
    """Seconds since ``error`` began."""
    unauthorized: bool = False
    refused: str = ""
    """Why the pod refused the present desired document; empty else."""
    fenced: bool = False
    """It obeys another owner or a later generation, and the replica was read afresh since."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The API server did not take our pod."""

    hash: str
    """Of the pod that was refused."""
    reason: Reason
    message: str
    retry_at: float


@dataclass(frozen=True, kw_only=True)
class ChildRefusal:
    """The API server did not take our Secret, or a Service."""

    child: str
    """Its kind and name."""
    reason: Reason
    message: str
    retry_at: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All that a plan is made from, besides the replica itself."""

    secret: ChildSeen | None = None
    services: tuple[ChildSeen | None, ...] = (None, None)
    """In the order of :func:`manifests.services`."""
    pod: PodSeen | None = None
    """The head: the one that is told what to become."""
    followers: tuple[PodSeen, ...] = ()
    """The pods of other ranks that there are, by rank; those that the spec does not ask for too."""
    nodes: int = 1
    """That the spec asks for."""
    lost: frozenset[str] = frozenset()
    """Names of followers whose node is lost; of those that :func:`ends.depends_on_node`."""
    report: Report | None = None
    refusal: Refusal | None = None
    refused: tuple[ChildRefusal, ...] = ()
    node: NodeState | None = None
    """Of a pod that :func:`ends.depends_on_node`; None else: nodes are not watched."""

    def on_lost_node(self, pod: PodSeen) -> bool:
        """Tell whether nobody will ever say that this pod of ours has ended."""
        if pod is self.pod:
            return self.node is not None and self.node.lost
        return pod.name in self.lost


def ownership(raw: Raw, *, name: str, uid: str) -> Ownership:
    """Tell whether an object belongs to the replica ``name`` with ``uid``."""
    for ref in raw["metadata"].get("ownerReferences") or ():
        if ref.get("uid") == uid:
            return Ownership.OURS
        if (ref.get("kind"), ref.get("name")) == (names.KIND, name) and str(
            ref.get("apiVersion", "")
        ).startswith(f"{names.GROUP}/"):
            return Ownership.PREDECESSOR
    return Ownership.FOREIGN


def pod_seen(raw: Raw, *, name: str, uid: str) -> PodSeen:
    """Boil a raw pod down; ``name`` and ``uid`` are the replica's."""
    meta, status = raw["metadata"], raw.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    disruption = conditions.get("DisruptionTarget") or {}
    disrupted = disruption.get("status") == "True"
    labels = meta.get("labels") or {}
    return PodSeen(
        name=meta["name"],
        uid=meta["uid"],
        owner=ownership(raw, name=name, uid=uid),
        hash=(meta.get("annotations") or {}).get(names.HASH_ANNOTATION, ""),
        created=unix(meta.get("creationTimestamp")),
        phase=status.get("phase", "Pending"),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        deleting=bool(meta.get("deletionTimestamp")),
        ip=status.get("podIP") or "",
        node=(raw.get("spec") or {}).get("nodeName") or "",
        unschedulable=(
            scheduled.get("message") or "no node fits"
            if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
            else ""
        ),
        failure=": ".join(filter(None, (status.get("reason"), status.get("message")))),
        reason=status.get("reason") or "",
        disruption=disruption.get("reason") or "" if disrupted else "",
        disruption_message=disruption.get("message") or "" if disrupted else "",
        delete_by=unix(meta.get("deletionTimestamp")),
        rank=_rank(labels.get(names.RANK_LABEL)),
        group=labels.get(names.GROUP_LABEL) or "",
        image=_image((raw.get("spec") or {}).get("containers"), names.ENGINE),
        final=(raw.get("spec") or {}).get("restartPolicy") == "Never",
        watched=(labels.get(names.MANAGED_BY_LABEL), labels.get(names.REPLICA_LABEL))
        == (names.MANAGER, name),
        engine=_container(status.get("containerStatuses"), names.ENGINE),
        weights=_container(status.get("initContainerStatuses"), names.WEIGHTS),
    )


def node_state(raw: Raw | None) -> NodeState:
    """Boil a raw node down; None: there is none of that name."""
    if raw is None:
        return NodeState.ABSENT
    conditions = {c["type"]: c["status"] for c in (raw.get("status") or {}).get("conditions") or ()}
    return NodeState.READY if conditions.get("Ready") == "True" else NodeState.NOT_READY


def covers(actual: Any, wanted: Any) -> bool:
    """Tell whether everything in ``wanted`` stands in ``actual`` as well (lists: item by item)."""
    if isinstance(wanted, Mapping):
        return isinstance(actual, Mapping) and all(
            key in actual and covers(actual[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(actual, list)
            and len(actual) == len(wanted)
            and all(map(covers, actual, wanted))
        )
    return bool(actual == wanted)


def _image(containers: Sequence[Raw] | None, name: str) -> str:
    return next((c.get("image") or "" for c in containers or () if c.get("name") == name), "")


def _container(statuses: Sequence[Raw] | None, name: str) -> ContainerSeen | None:
    raw = next((s for s in statuses or () if s.get("name") == name), None)
    if raw is None:
        return None
    state, last = raw.get("state") or {}, raw.get("lastState") or {}
    waiting = state.get("waiting") or {}
    death = state.get("terminated") or last.get("terminated") or {}
    return ContainerSeen(
        running="running" in state,
        restarts=raw.get("restartCount", 0),
        waiting=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        exit_code=death.get("exitCode"),
        exit_reason=death.get("reason") or "",
        exit_message=_last_line(death.get("message") or ""),
        started=raw.get("started") is True,
        started_at=unix((state.get("running") or death).get("startedAt")),
        ended_at=unix(death.get("finishedAt")),
    )


def _rank(label: str | None) -> int:
    return int(label) if label and label.isdecimal() else 0


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""

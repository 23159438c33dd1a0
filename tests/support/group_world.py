"""A replica of several pods in a world with a clock: the operator's plans, and what kubelet does.

The operator remembers nothing but the status.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from rollout_operator.api.conditions import ConditionType, Reason
from rollout_operator.plan.actions import Action, CreatePod, DeletePod
from rollout_operator.plan.ends import depends_on_node
from rollout_operator.plan.observed import NodeState, PodSeen, Report, Seen, pod_seen
from rollout_pod.protocol import PodPhase
from tests.support.operator_objects import UID, children, container, state
from tests.support.plan_world import PlanWorld


@dataclass
class GroupWorld(PlanWorld):
    pods: dict[str, PodSeen] = field(default_factory=dict)
    lost_nodes: set[str] = field(default_factory=set)
    made: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, name and group."""
    removed: list[tuple[float, str, Reason, bool]] = field(default_factory=list)
    """Time, name, reason, and whether by force."""
    _uids: int = 0

    @property
    def nodes(self) -> int:
        return int(self.spec.get("nodes", 1))

    @property
    def seen(self) -> Seen:
        head = self.pods.get("qwen-0")
        followers = sorted((p for n, p in self.pods.items() if n != "qwen-0"), key=lambda p: p.rank)
        report = None
        if head is not None and head.answering:
            up = head.ready
            said = (
                state(generation=self.generation)
                if up
                else state(None, phase=PodPhase.LOADING, generation=self.generation)
            )
            report = Report(state=said)
        return Seen(
            **children(),
            pod=head,
            followers=tuple(followers),
            nodes=self.nodes,
            lost=frozenset(p.name for p in followers if self._node_is_lost(p)),
            node=NodeState.NOT_READY if head and self._node_is_lost(head) else None,
            report=report,
        )

    def _node_is_lost(self, pod: PodSeen) -> bool:
        return depends_on_node(pod, self.now) and pod.node in self.lost_nodes

    def _do(self, action: Action) -> None:
        if isinstance(action, CreatePod):
            self._create(action)
        elif isinstance(action, DeletePod):
            pod = self.pods[action.name]
            assert pod.uid == action.uid
            self.removed.append((self.now, action.name, action.reason, action.force))
            if action.force or pod.over:
                del self.pods[action.name]
            else:
                self.change(pod.rank, deleting=True, delete_by=self.now + 45)

    def _create(self, action: CreatePod) -> None:
        manifest: Any = action.manifest
        name = manifest["metadata"]["name"]
        assert name not in self.pods, "its name is taken"
        self._uids += 1
        raw = {**manifest, "metadata": {**manifest["metadata"], "uid": f"pod-{self._uids}"}}
        pod = replace(
            pod_seen(raw, name="qwen", uid=UID), created=self.now, ip="10.0.0.1",
            node=f"node-{name[-1]}", engine=container(), weights=container(), phase="Running",
        )  # fmt: skip
        if pod.rank == 0:
            assert not self.pods, "a head while pods of another group are there"
        else:
            head = self.pods["qwen-0"]
            assert pod.group == head.uid
            assert not (head.deleting or head.over)
        self.made.append((self.now, name, pod.group))
        self.pods[name] = pod

    # what happens to it

    def change(self, rank: int, **traits: Any) -> None:
        name = f"qwen-{rank}"
        self.pods[name] = replace(self.pods[name], **traits)

    def serve(self) -> None:
        for pod in list(self.pods.values()):
            self.change(pod.rank, ready=True, engine=container(started=True))
        self.settle()

    def die(self, rank: int, **traits: Any) -> None:
        """Its engine ends: the sidecar still runs, and kubelet starts nothing again."""
        dead = container(running=False, exit_code=1, exit_reason="Error", **traits)
        self.change(rank, ready=False, engine=dead)

    def drained(self) -> bool:
        """What was asked to end has, where its kubelet lives; whether any was."""
        gone = [n for n, p in self.pods.items() if p.deleting and p.node not in self.lost_nodes]
        for name in gone:
            del self.pods[name]
        return bool(gone)

    def counts(self) -> dict[str, int]:
        known = self.replica.status.restarts
        return {entry.reason: entry.count for entry in known.by_reason} if known else {}

    def message(self) -> str:
        found = self.replica.status.condition(ConditionType.READY)
        assert found is not None
        return found.message

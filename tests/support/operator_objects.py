"""Replicas, pods and states for the operator's pure tests."""

from typing import Any

from rollout_operator.api.replica import Replica
from rollout_operator.plan import manifests
from rollout_operator.plan.observed import (
    ChildSeen,
    ContainerSeen,
    Ownership,
    PodSeen,
    Report,
    Seen,
)
from rollout_operator.plan.plan import PodDefaults
from rollout_pod.protocol import GateState, PodPhase, RankState, StateDocument, WeightsRef

NOW = 1_800_000_000.0
UID = "uid-1"
DEFAULTS = PodDefaults(image="pod:1")


def replica(
    *,
    status: dict[str, Any] | None = None,
    generation: int = 3,
    deleting: bool = False,
    **spec: Any,
) -> Replica:
    meta: dict[str, Any] = {
        "name": "qwen",
        "namespace": "ns",
        "uid": UID,
        "generation": generation,
    }
    if deleting:
        meta["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    return Replica.parse({"metadata": meta, "spec": {"model": "m", **spec}, "status": status or {}})


def container(**traits: Any) -> ContainerSeen:
    given: dict[str, Any] = {
        "running": True,
        "restarts": 0,
        "waiting": "",
        "waiting_message": "",
        "exit_code": None,
        "exit_reason": "",
        "exit_message": "",
        **traits,
    }
    return ContainerSeen(**given)


def pod(wanted: Replica | None = None, **traits: Any) -> PodSeen:
    spec = (wanted or replica()).spec
    assert spec is not None
    given: dict[str, Any] = {
        "name": "qwen-0",
        "uid": "pod-1",
        "owner": Ownership.OURS,
        "hash": manifests.pod_hash(spec),
        "created": NOW - 100,
        "phase": "Running",
        "ready": True,
        "deleting": False,
        "ip": "10.0.0.1",
        "node": "node-1",
        "unschedulable": "",
        "failure": "",
        "reason": "",
        "disruption": "",
        "disruption_message": "",
        "delete_by": NOW if traits.get("deleting") else 0.0,
        "engine": container(),
        "weights": container(),
        **traits,
    }
    return PodSeen(**given)


def state(version: str | None = "base", **traits: Any) -> StateDocument:
    committed = None
    if version is not None:
        source = None if version == "base" else {"path": f"/ckpt/{version}"}
        committed = WeightsRef.model_validate({"version": version, "source": source})
    given: dict[str, Any] = {
        "revision": 7,
        "boot_id": "boot-1",
        "phase": PodPhase.SERVING,
        "weight_version": version,
        "desired_version": version or "base",
        "owner": UID,
        "generation": 3,
        "gate": GateState.OPEN,
        "ready": version is not None,
        "unfinished": 0,
        "committed": committed,
        "ranks": (RankState(rank=0, host="qwen-0", weight_version=version),),
        **traits,
    }
    return StateDocument(**given)


def child(kind: str, name: str, owner: Ownership = Ownership.OURS, *, complete: bool = True):
    return ChildSeen(kind=kind, name=name, owner=owner, complete=complete)


def children(**traits: Any) -> dict[str, Any]:
    """Return everything but the pod, as it should be."""
    return {
        "secret": child("Secret", "qwen-admin"),
        "services": (child("Service", "qwen"), child("Service", "qwen-nodes")),
        **traits,
    }


def seen(pod_seen: PodSeen | None = None, said: StateDocument | None = None, **traits: Any) -> Seen:
    report = Report(state=said) if said is not None else None
    return Seen(**{**children(), "pod": pod_seen, "report": report, **traits})

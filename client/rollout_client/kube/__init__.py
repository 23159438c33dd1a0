"""Steer RolloutReplicas by patching them and waiting (extra ``kube``).

``replica("qwen").set_weight_version("step-7").wait(600)``; ``Kube`` is the same for asyncio.
"""

from rollout_client.kube.errors import (
    ApiError,
    KubeError,
    ReplicaError,
    ReplicaGone,
    Stalled,
    Superseded,
    UpdateFailed,
    WaitTimeout,
    WeightsUnavailable,
)
from rollout_client.kube.replicas import Change, Kube, Replica
from rollout_client.kube.selector import ReplicaSelector
from rollout_client.kube.sync import SyncKube, apply, replica

__all__ = [
    "ApiError",
    "Change",
    "Kube",
    "KubeError",
    "Replica",
    "ReplicaError",
    "ReplicaGone",
    "ReplicaSelector",
    "Stalled",
    "Superseded",
    "SyncKube",
    "UpdateFailed",
    "WaitTimeout",
    "WeightsUnavailable",
    "apply",
    "replica",
]

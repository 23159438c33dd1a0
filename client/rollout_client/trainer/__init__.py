"""For trainers: steer the replicas that generate, and give them each new version of the weights.

``ServerAdapter`` and, without an event loop, ``SyncServerAdapter``. Sending weights needs the extra
``trainer``, RolloutReplicas the extra ``kube``.
"""

from rollout_client.trainer.adapter import ServerAdapter
from rollout_client.trainer.errors import (
    AdapterError,
    Asleep,
    Late,
    OwnedByOperator,
    PeerFailed,
    Refused,
    ReplicaErrors,
    ReplicaGone,
    Superseded,
    Unreachable,
    UpdateFailed,
    WeightsUnavailable,
)
from rollout_client.trainer.results import ReplicaResult
from rollout_client.trainer.sync import SyncServerAdapter, SyncUpdate
from rollout_client.trainer.targets import PodTarget, ReplicaTarget, SelectorTarget, Target
from rollout_client.trainer.update import Update
from rollout_client.trainer.updates import Results
from rollout_client.trainer.weights import Keep, Names, Tensors, Weights

__all__ = [
    "AdapterError",
    "Asleep",
    "Keep",
    "Late",
    "Names",
    "OwnedByOperator",
    "PeerFailed",
    "PodTarget",
    "Refused",
    "ReplicaErrors",
    "ReplicaGone",
    "ReplicaResult",
    "ReplicaTarget",
    "Results",
    "SelectorTarget",
    "ServerAdapter",
    "Superseded",
    "SyncServerAdapter",
    "SyncUpdate",
    "Target",
    "Tensors",
    "Unreachable",
    "Update",
    "UpdateFailed",
    "Weights",
    "WeightsUnavailable",
]

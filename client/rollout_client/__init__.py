"""The client: rollouts that survive pauses, weight updates, lost connections and lost pods.

``ServerAdapter`` and ``SyncServerAdapter``, the trainer's side (``rollout_client.trainer``, extra
``trainer``), are imported when they are asked for.
"""

from typing import TYPE_CHECKING, Any

from rollout_client.client import RolloutClient
from rollout_client.endpoints import Endpoints, Service
from rollout_client.errors import (
    DeadlineExceeded,
    EngineFailed,
    GroupFailed,
    ProtocolError,
    RequestRefused,
    RetriesExhausted,
    RolloutCancelled,
    RolloutError,
)
from rollout_client.planning import Policy
from rollout_client.prompts import normalize_token_ids
from rollout_client.rollout import Rollout
from rollout_client.run import OnPartial
from rollout_client.sync import SyncRolloutClient

if TYPE_CHECKING:
    from rollout_client.trainer import ServerAdapter, SyncServerAdapter

__all__ = [
    "DeadlineExceeded",
    "Endpoints",
    "EngineFailed",
    "GroupFailed",
    "OnPartial",
    "Policy",
    "ProtocolError",
    "RequestRefused",
    "RetriesExhausted",
    "Rollout",
    "RolloutCancelled",
    "RolloutClient",
    "RolloutError",
    "ServerAdapter",
    "Service",
    "SyncRolloutClient",
    "SyncServerAdapter",
    "normalize_token_ids",
]


def __getattr__(name: str) -> Any:
    if name in ("ServerAdapter", "SyncServerAdapter"):
        from rollout_client import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

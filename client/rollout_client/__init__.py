"""The client: rollouts that survive pauses, weight updates, lost connections and lost pods."""

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
    "Service",
    "SyncRolloutClient",
    "normalize_token_ids",
]

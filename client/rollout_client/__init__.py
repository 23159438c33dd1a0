"""The client: rollouts that survive pauses, weight updates and lost connections."""

from rollout_client.client import OnPartial, RolloutClient
from rollout_client.errors import (
    DeadlineExceeded,
    EngineFailed,
    ProtocolError,
    RequestRefused,
    RolloutError,
)
from rollout_client.rollout import Rollout

__all__ = [
    "DeadlineExceeded",
    "EngineFailed",
    "OnPartial",
    "ProtocolError",
    "RequestRefused",
    "Rollout",
    "RolloutClient",
    "RolloutError",
]

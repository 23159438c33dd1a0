"""Under which name verl finds us."""

from typing import Any

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rollout_client.verl.settings import KEY

_PACKAGE = "rollout_client.verl"


def register() -> None:
    """Tell verl of ``rollout.name=rollout_replica``. May be called again."""
    RolloutReplicaRegistry.register(KEY, _replica_class)
    # There is no function for this one; verl imports the class when it is asked for.
    base._ROLLOUT_REGISTRY[KEY, "async"] = f"{_PACKAGE}.rollout.PodRollout"


def _replica_class() -> Any:
    from rollout_client.verl.replica import PodReplica

    return PodReplica

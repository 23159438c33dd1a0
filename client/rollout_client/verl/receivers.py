"""The process of a standalone replica that receives weights for it.

verl's checkpoint engines (``nccl``, ``nixl``, ...) send weights to workers beside the engines,
which hand them on. Beside ours means: in a container of the replica's pod that has joined the Ray
cluster and says by a custom resource whose pod it is.
"""

import asyncio
import os
from typing import Any

import ray

from rollout_client.trainer import ReplicaTarget
from rollout_client.verl.settings import WHERE, Settings, SettingsError, home_of

_SHARE = 0.001
"""Of the resource, which only says where."""


async def start_receivers(settings: Settings, init: Any, *, rank: int) -> list[Any]:
    """Start the receiver of verl's replica ``rank`` in its pod; none where the settings name none.

    One suffices, also for an engine of several ranks: it gets whole tensors, and sends them to all.

    Args:
        settings: ours.
        init: verl's worker class with its arguments.
        rank: verl's replica rank.

    Raises:
        SettingsError: no Ray node has the resource, or the receiver does not start there.
    """
    resource = settings.receiver(rank)
    if resource is None:
        return []
    if resource not in ray.cluster_resources():
        raise SettingsError(
            f"{WHERE}.receivers: no node of the Ray cluster has the resource {resource!r}; start "
            f"Ray in the replica's pod with --resources='{{\"{resource}\": 1}}'"
        )
    alone = {
        # what verl's workers read of their group: there is nobody else in it
        "WORLD_SIZE": "1", "RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    worker = init.cls.options(
        num_cpus=0,
        num_gpus=settings.receiver_gpus,
        resources={resource: _SHARE},
        runtime_env={"env_vars": alone},
    ).remote(*init.args, **init.kwargs)
    try:
        async with asyncio.timeout(settings.control_timeout_s):
            await worker.__ray_call__.remote(look_around)
    except TimeoutError:
        ray.kill(worker)
        raise SettingsError(
            f"{WHERE}.receivers: the receiver of verl's replica {rank} did not start in "
            f"{settings.control_timeout_s:g} s; does its node have {settings.receiver_gpus:g} "
            "free GPUs for Ray (receiver_gpus)?"
        ) from None
    return [worker]


def look_around(worker: Any) -> tuple[ReplicaTarget | None, str]:
    """The pod in which a worker runs, and its Ray node. Called in it."""
    return home_of(os.environ), ray.get_runtime_context().get_node_id()

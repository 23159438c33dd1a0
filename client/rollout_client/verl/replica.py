"""verl's ``RolloutReplica``: finds the replica, and puts a server before it."""

import asyncio
import logging
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rollout_client.trainer import ReplicaTarget
from rollout_client.verl.parsing import parse
from rollout_client.verl.receivers import look_around, start_receivers
from rollout_client.verl.server import PodServer
from rollout_client.verl.settings import KEY, WHERE, Place, Settings, SettingsError

logger = logging.getLogger(__name__)


class PodReplica(RolloutReplica):
    """One RolloutReplica (or one pod without an operator) as verl's replica ``replica_rank``.

    Nothing is launched: the operator has, or ``rollout-pod serve``. ``launch_servers`` makes one
    Ray actor without a GPU, ``PodServer``, that hands verl's calls on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what verl's class takes.

        Raises:
            SettingsError: ``rollout.custom.rollout_replica`` is wrong.
        """
        super().__init__(*args, **kwargs)
        self.settings: Settings = parse(self.config.custom)
        self.place: Place | None = None

    async def init_standalone(self) -> None:
        """Serve from pods that have their own GPUs: Ray is asked for none of them.

        Only the processes that receive weights need a place in the pods; see ``receivers``.
        """
        self.rollout_mode = RolloutMode.STANDALONE
        self.workers = await start_receivers(
            self.settings, self.get_ray_class_with_init_args(), rank=self.replica_rank
        )
        await self.launch_servers()

    async def init_colocated(self, resource_pool: Any) -> None:
        """A judge or a teacher: no weights are sent to it, and Ray is asked for nothing."""
        self.rollout_mode = RolloutMode.COLOCATED
        self.resource_pool = resource_pool
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Make the actor that verl's load balancer sends requests to.

        Raises:
            SettingsError: nothing says which replica this is.
        """
        home, node = await self._home()
        self.place = self.settings.place(self.replica_rank, home)
        options: dict[str, Any] = {}
        if node is not None:
            # near the push socket, and where the name of the Service is known
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        server = (
            ray.remote(PodServer)
            .options(
                name=self._server_name(),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                **options,
            )
            .remote(
                config=self.config,
                model_config=self.model_config,
                settings=self.settings,
                place=self.place,
                rollout_mode=self.rollout_mode,
                replica_rank=self.replica_rank,
            )
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.get_server_address.remote()
        logger.info("verl's replica %d is %s", self.replica_rank, self.place)

    def _server_name(self) -> str:
        kind = ""
        if self.is_reward_model:
            kind = "reward_"
        elif self.is_teacher_model:
            kind = "teacher_"
        return f"{KEY}_server_{kind}{self.replica_rank}_0{self.name_suffix}"

    async def _home(self) -> tuple[ReplicaTarget | None, str | None]:
        """The pod in which the workers of this replica run, and one of their Ray nodes."""
        if not self.workers:
            return None, None
        found = await asyncio.gather(*(w.__ray_call__.remote(look_around) for w in self.workers))
        names = {(home.namespace, home.name) if home else None for home, _ in found}
        if len(names) > 1:
            raise SettingsError(
                f"{WHERE}: the workers of verl's replica {self.replica_rank} run in pods of "
                f"several replicas ({', '.join(sorted(map(str, names)))}); give each pod's Ray "
                "node as many GPUs as a replica has"
            )
        home, node = found[0]
        return home, node

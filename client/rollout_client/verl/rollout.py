"""verl's ``BaseRollout``: what a trainer's worker does with the replica it trains for."""

import logging
import os
from typing import Any, Literal

from verl.workers.rollout.base import BaseRollout

from rollout_client.trainer import ServerAdapter
from rollout_client.verl.parsing import parse
from rollout_client.verl.settings import Settings, home_of
from rollout_client.verl.weights import Pairs, Stream, casting, read_types

logger = logging.getLogger(__name__)

NAMED_TENSORS = "named_tensors"


class PodRollout(BaseRollout):
    """Wakes a replica, gives it each new version and puts it to sleep.

    Every worker has one. The first worker of each replica steers it and sends it the weights; the
    others take part in gathering them, and do nothing else.

    Args:
        config: verl's ``RolloutConfig``.
        model_config: verl's ``HFModelConfig``.
        device_mesh: not used.
        replica_rank: verl's; -1: from ``$RANK``.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self._settings: Settings = parse(self.config.custom)
        world = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // world if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % world == 0
        self.sleep_level: Literal[1, 2] = self._settings.sleep_level
        """verl sets it to 1 where it sends adapters only."""
        self._adapter: ServerAdapter | None = None

    async def resume(self, tags: list[str]) -> None:
        """Take ``weights``, ``kv_cache`` or both back; returns when they are resident.

        Raises:
            AdapterError: they are not.
        """
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._steering().resume(tags)

    async def release(self) -> None:
        """Release weights and KV cache; returns when they are free.

        Raises:
            AdapterError: they are not.
        """
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._steering().release(self.sleep_level)

    async def update_weights(
        self,
        weights: Stream,
        wire_format: str = NAMED_TENSORS,
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send a version; returns when every rank of the engine has committed it.

        Tensors are sent in the types that the model's checkpoint has them in. Whatever happens,
        ``weights`` is read to its end, so that no other worker waits for this one.

        Args:
            weights: pairs of name and whole tensor, one after another.
            wire_format: ``named_tensors``, and no other.
            global_steps: the step of the version.
            peft_config: of an adapter; None.

        Raises:
            ValueError: what is to be sent cannot be sent.
            AdapterError: the version is not committed; the replica serves the one before, or
                nothing.
        """
        if wire_format != NAMED_TENSORS:
            raise ValueError(
                f"wire_format: {wire_format!r} cannot be sent to a pod, only {NAMED_TENSORS!r}; "
                "set actor_rollout_ref.rollout.checkpoint_engine.backend to another one than "
                "delta_sharded"
            )
        if peft_config is not None:
            raise ValueError(
                "peft_config: a LoRA adapter cannot be sent to a pod; set "
                "actor_rollout_ref.model.lora.merge=True, which sends whole weights"
            )
        pairs = Pairs(weights, timeout_s=self._settings.control_timeout_s)
        try:
            if self.is_leader_rank:
                await self._send(pairs, global_steps)
        finally:
            await pairs.drain()

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        if self._adapter is not None:
            await self._adapter.aclose()
            self._adapter = None

    async def _send(self, pairs: Pairs, global_steps: int | None) -> None:
        results = await self._steering().update_weights(
            pairs, global_steps=global_steps, version=self._settings.version_of(global_steps)
        )
        for result in results.values():
            logger.info("%s holds %s (%s)", result.target, result.weight_version, result.sent)

    def _steering(self) -> ServerAdapter:
        if self._adapter is None:
            place = self._settings.place(self.replica_rank, home_of(os.environ))
            types = read_types(self.model_config.local_path)
            self._adapter = ServerAdapter(
                place.target,
                cast=casting(types, default=self.config.dtype),
                keep=self._settings.keep,
                transport=self._settings.transport,
                timeout_s=self._settings.control_timeout_s,
                manager="verl",
            )
        return self._adapter

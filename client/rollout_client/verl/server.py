"""One replica as verl's load balancer knows it: a Ray actor that speaks to its pod."""

import asyncio
import logging
from typing import Any
from urllib.parse import urlsplit

from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens

from rollout_client import Policy, Rollout, RolloutCancelled, RolloutClient
from rollout_client.trainer import ServerAdapter
from rollout_client.verl.admission import Admission
from rollout_client.verl.outputs import Defaults, output_fields, translate
from rollout_client.verl.settings import Place, Settings

logger = logging.getLogger(__name__)

_PATIENT = Policy(failures=1_000_000)
"""A pod may be away for long: ``deadline_s`` decides."""


class PodServer:
    """Made by ``PodReplica`` as a Ray actor. All methods that verl calls on a server are here.

    Args:
        config: verl's ``RolloutConfig``.
        model_config: verl's ``HFModelConfig``.
        settings: ours.
        place: the replica.
        rollout_mode: verl's; a standalone replica never sleeps.
        replica_rank: verl's.
    """

    def __init__(
        self,
        *,
        config: Any,
        model_config: Any,
        settings: Settings,
        place: Place,
        rollout_mode: RolloutMode,
        replica_rank: int,
    ) -> None:
        self._config = omega_conf_to_dataclass(config)
        self._model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self._mode = rollout_mode
        self._settings = settings
        self._place = place
        self._defaults = Defaults(
            prompt_length=self._config.prompt_length,
            response_length=self._config.response_length,
            max_model_len=self._config.max_model_len,
            repetition_penalty=self._config.repetition_penalty,
            ignore_eos=self._config.ignore_eos,
            seed=self._config.seed + replica_rank if self._config.full_determinism else None,
            routed_experts=self._config.enable_rollout_routing_replay,
        )
        self._admission = Admission()
        self._client = RolloutClient(
            place.data_url,
            max_concurrency=settings.max_concurrency,
            park_s=settings.max_seconds_to_reject,
            policy=_PATIENT,
        )
        self._adapter = ServerAdapter(
            place.target, timeout_s=settings.control_timeout_s, manager="verl"
        )

    async def get_server_address(self) -> str:
        """Host and port of the data port, which serves the OpenAI routes, too."""
        return urlsplit(self._place.data_url).netloc

    async def get_rollout_config(self) -> Any:
        """The ``RolloutConfig``."""
        return self._config

    # --- generation

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Generate until the end, or until verl's ``abort_all_requests``: then ``stop_reason`` is
        ``aborted``, and verl's client goes on from there. Pauses, updates and lost pods that verl
        has not asked for are not seen here: the rollout goes on.

        Raises:
            ValueError: something cannot be asked of a pod.
            RolloutError: it did not finish for another reason than an abort.
        """
        for name, given in (
            ("video_data", video_data),
            ("audio_data", audio_data),
            ("mm_processor_kwargs", mm_processor_kwargs),
        ):
            if given:
                raise ValueError(
                    f"{name}: the rollout 'rollout_replica' takes images and no others"
                )
        prompt = normalize_token_ids(prompt_ids)
        asked = translate(
            sampling_params,
            prompt_len=len(prompt),
            defaults=self._defaults,
            images=image_data,
            priority=priority,
        )
        call = self._admission.call()
        if not await call.admitted():
            return TokenOutput(**output_fields(Rollout(request_id=request_id), asked))
        with call:
            try:
                rollout = await self._client.generate(
                    qwen2_5_vl_dedup_image_tokens(prompt, self._model.processor),
                    asked.sampling_params,
                    request_id,
                    deadline_s=self._settings.deadline_s,
                    on_partial=call.was_cut,
                    give_up=call.must_return,
                    fields=asked.fields,
                )
            except RolloutCancelled as cut:
                rollout = cut.partial
        return TokenOutput(**output_fields(rollout, asked))

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        """Pause the replica; returns when every request in flight has returned its partial.

        Later ones wait for ``resume_generation``, or are sent back at once with
        ``reject_request``. Caches of old weights are cleared by every update.
        """
        aborted = self._admission.close(rejecting=reject_request)
        await self._adapter.cancel()
        return {"aborted_count": aborted, "request_ids": []}

    async def resume_generation(self) -> None:
        """Go on after ``abort_all_requests``."""
        await self._adapter.resume_generation()
        self._admission.open()

    # --- memory

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take all memory back. A standalone replica has not given any away."""
        if self._mode is not RolloutMode.STANDALONE and self._config.free_cache_engine:
            await self._adapter.resume(tags or ["weights", "kv_cache"])

    async def sleep(self) -> None:
        """Release all memory. A standalone replica keeps it."""
        if self._mode is not RolloutMode.STANDALONE and self._config.free_cache_engine:
            # nobody sends weights to a colocated judge again
            is_hybrid = self._mode is RolloutMode.HYBRID
            await self._adapter.release(self._settings.sleep_level if is_hybrid else 1)

    async def release_kv_cache(self) -> None:
        """Release the KV cache alone, for as long as weights are sent."""
        if self._mode is not RolloutMode.COLOCATED and self._config.free_cache_engine:
            await self._adapter.release(1, tags=["kv_cache"])

    async def resume_kv_cache(self) -> None:
        """Take the KV cache back."""
        if self._mode is not RolloutMode.COLOCATED and self._config.free_cache_engine:
            await self._adapter.resume(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Clear all caches. Every update and every sleep do that by themselves."""
        await self._adapter.clear_kv_cache()

    # --- profiles

    async def start_profile(self, **_: Any) -> None:
        """Nothing: a pod is profiled by its own means."""
        logger.warning("rollout_replica: verl's profiler does not reach the engines")

    async def stop_profile(self) -> None:
        """Nothing, too."""

    async def shutdown(self) -> None:
        """Close all connections. The replica goes on."""
        await asyncio.gather(self._client.aclose(), self._adapter.aclose())

"""What a request needs besides tokens, looked up before it passes the gate."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_pod.engine import adapters
from rollout_pod.engine.base import InvalidField, Prepared
from rollout_pod.engine.media import Media


class Preparation:
    """Of one engine.

    Args:
        llm: vLLM's ``AsyncLLM``.
        loras: Its adapters, by name.
    """

    def __init__(self, llm: Any, loras: Mapping[str, Any]) -> None:
        self._config = llm.vllm_config
        self._loras = dict(loras)
        self._media = Media(llm)

    async def prepare(
        self,
        prompt_token_ids: Sequence[int],
        *,
        lora: str | None,
        media: Mapping[str, Sequence[str]] | None,
        routed_experts: bool,
    ) -> Prepared:
        """See ``Engine.prepare``."""
        enabled = self._config.lora_config is not None
        adapter = None if lora is None else adapters.find(self._loras, lora, enabled=enabled)
        if routed_experts and not returns_experts(self._config):
            raise InvalidField(
                "return_routed_experts",
                "the engine does not record them; a model with experts does, started with "
                "--enable-return-routed-experts",
            )
        prompt = await self._media.render(prompt_token_ids, media) if media else None
        length = len(prompt["prompt_token_ids"] if prompt else prompt_token_ids)
        return Prepared(length, prompt=prompt, lora=adapter, routed_experts=routed_experts)


def returns_experts(config: Any) -> bool:
    """Whether the engine was started to record which experts tokens go to."""
    auxiliary = getattr(config, "aux_output_config", None)
    if auxiliary is not None:
        return bool(auxiliary.enable_return_routed_experts)
    return bool(config.model_config.enable_return_routed_experts)  # before 0.32

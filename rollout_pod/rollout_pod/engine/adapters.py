"""LoRA adapters of the engine's arguments, by name."""

from collections.abc import Iterable
from typing import Any

from rollout_pod.engine.base import EngineStartError, InvalidField


def requests_of(modules: Iterable[Any] | None, *, enabled: bool) -> dict[str, Any]:
    """Make requests for ``--lora-modules``, numbered as vLLM's own server numbers them: an engine
    that is asked for an adapter by both holds it once.

    Raises:
        EngineStartError: adapters without ``--enable-lora``, or two of one name.
    """
    from vllm.lora.request import LoRARequest

    requests: dict[str, Any] = {}
    for number, module in enumerate(modules or (), start=1):
        if not enabled:
            raise EngineStartError("engineArgs: --lora-modules needs --enable-lora")
        if module.name in requests:
            raise EngineStartError(f"engineArgs: --lora-modules names {module.name} twice")
        requests[module.name] = LoRARequest(
            lora_name=module.name,
            lora_int_id=number,
            lora_path=module.path,
            is_3d_lora_weight=module.is_3d_lora_weight,
        )
    return requests


def find(requests: dict[str, Any], name: str, *, enabled: bool) -> Any:
    """The adapter of this name.

    Raises:
        InvalidField: there is none.
    """
    if name in requests:
        return requests[name]
    if not enabled:
        raise InvalidField(
            "lora", "the engine runs without LoRA; start it with --enable-lora --lora-modules"
        )
    known = ", ".join(sorted(requests)) or "none"
    raise InvalidField("lora", f"no adapter is called {name!r}; known: {known}")

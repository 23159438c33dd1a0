"""Whether a vLLM engine can sleep, and what that released. vLLM itself warns at most, and answers
as if it had slept.
"""

import os
from typing import Any

from rollout_pod.engine.base import SleepReport


def can_sleep() -> bool:
    """Whether an engine started here can release memory. CPU builds refuse the argument."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() and current_platform.is_sleep_mode_available()):
        return False
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if any("expandable_segments:True" in os.environ.get(name, "") for name in names):
        return False  # vLLM's allocator for sleeping does not go with it
    from vllm.device_allocator.cumem import cumem_available

    return bool(cumem_available)


def sleep_refusal(model_config: Any) -> str | None:
    """Why an engine of this ``ModelConfig`` cannot sleep; None where it can.

    On CPU it can: it rests, and says that no memory was released.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or model_config.enable_sleep_mode:
        return None
    return (
        "the engine was started without vLLM's sleep mode: remove --no-enable-sleep-mode from "
        "engineArgs and expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF, where they stand"
    )


def released(before: int | None, after: int | None) -> SleepReport:
    """What falling asleep released, by the free bytes of all devices; None of either is a CPU."""
    if before is None or after is None:
        return SleepReport(0, "vLLM releases no memory on CPU: the engine only rests")
    freed = max(0, after - before)  # others on the same device may have taken some of it already
    return SleepReport(freed, "" if freed else "the devices have no more free memory than before")

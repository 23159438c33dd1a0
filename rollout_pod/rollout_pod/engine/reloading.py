"""What vLLM cannot load a second time: refused before the first byte, with the reason; and what an
update leaves as it was.
"""

from typing import Any


def refusal(
    *,
    load_format: str,
    is_recorded: bool,
    eplb: bool,
    expert_filter: bool,
    lora: bool,
    lora_reloads: bool,
) -> str | None:
    """Why an engine takes no weight updates; None where it does.

    Args:
        load_format: ``--load-format``.
        is_recorded: Whether it is known what the boot loaded.
        eplb: ``--enable-eplb``.
        expert_filter: ``--enable-ep-weight-filter``, where it leaves out anything.
        lora: ``--enable-lora``.
        lora_reloads: Whether layers that adapters wrap can be loaded again (vLLM 0.32; not 0.26).
    """
    if eplb:
        return (
            "an engine with --enable-eplb takes no weight updates: its experts move between ranks, "
            "and which parameter holds which expert is not known; start it without"
        )
    if expert_filter:
        return (
            "an engine with --enable-ep-weight-filter takes no weight updates: at boot no rank saw "
            "the experts of the others, so what a whole checkpoint has is not known; start it "
            "without"
        )
    if lora and not lora_reloads:
        return (
            "an engine with --enable-lora takes no weight updates in this version of vLLM, which "
            "does not find the layers that adapters wrap; use vLLM 0.32 or newer, or no adapters"
        )
    if not is_recorded:
        return (
            f"an engine with --load-format {load_format} takes no weight updates: what it loaded "
            "at boot is not known; use the default format"
        )
    return None


def refusal_of(config: Any, *, is_recorded: bool) -> str | None:
    """The same, of a ``VllmConfig``."""
    from vllm.lora.layers.base import BaseLayerWithLoRA

    parallel = config.parallel_config
    return refusal(
        load_format=config.load_config.load_format,
        is_recorded=is_recorded,
        eplb=parallel.enable_eplb,
        expert_filter=(
            getattr(parallel, "enable_ep_weight_filter", False)  # older vLLM has no such
            and parallel.enable_expert_parallel
            and config.model_config.is_moe
        ),
        lora=config.lora_config is not None,
        lora_reloads=hasattr(BaseLayerWithLoRA, "load_weights"),
    )


_WITHOUT_DRAFT = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states"})
"""Methods of speculative decoding that have no model of their own."""


def stale_draft(config: Any) -> str:
    """What a ``VllmConfig``'s engine goes on guessing with after an update; empty where it guesses
    by the new weights, or not at all.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_DRAFT:
        return ""
    return (
        f"the draft model ({speculative.method}) keeps the weights it was started with: fewer of "
        "its guesses are accepted, and no token is another one for it"
    )

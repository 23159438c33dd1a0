"""Three defects of vLLM's weight reload on CPU, all silent: the update ends, the outputs are wrong.

On CPU the loaded weights are repacked for the kernels. A reload forgets to do it again

* for an output head that is tied to the embedding: no weights arrive under its own name, so its
  packed copy stays the old one;
* for the experts of a mixture: their kernel exists already, and the packing is a part of making it.

And where linear layers are quantised to int8, oneDNN's handler keeps the address of the scales that
it was made with: after a reload that is memory which was freed.
"""

from typing import Any

import torch

enabled = True
"""Off only in the tests that show what the repairs are for."""


def repack_output_heads(model: torch.nn.Module) -> None:
    """Pack every output head anew from the weight it has. After a load has finished."""
    if not enabled:
        return
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def patch_experts() -> None:
    """Make vLLM pack experts whenever it processes them, not the first time only. Idempotent."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    original = UnquantizedFusedMoEMethod._setup_kernel
    if getattr(original, "rollout_wrapped", False):
        return

    def setup_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = self.moe_kernel
        if kernel is None or not enabled:
            original(self, *args, **kwargs)
            return
        experts = kernel.fused_experts
        packed = False
        pack = experts.process_weights_after_loading

        def noting_pack(layer: torch.nn.Module) -> None:
            nonlocal packed
            packed = True
            pack(layer)

        # A vLLM that does it itself must not have it done twice.
        experts.process_weights_after_loading = noting_pack
        try:
            original(self, *args, **kwargs)
        finally:
            del experts.process_weights_after_loading
        if not packed:
            pack(kwargs["layer"] if "layer" in kwargs else args[0])

    setup_kernel.rollout_wrapped = True  # type: ignore[attr-defined]  # a mark on a function
    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


def patch_scaled_mm() -> None:
    """Keep the scales as long as the handler that reads them. Idempotent."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

    original = CPUInt8ScaledMMLinearKernel.process_weights_for_onednn
    if getattr(original, "rollout_wrapped", False):
        return

    def process(self: Any, layer: torch.nn.Module) -> None:
        original(self, layer)
        if enabled:
            _, scales, *_ = self.layer_param_names
            self.dnnl_handler.rollout_kept = getattr(layer, scales)

    process.rollout_wrapped = True  # type: ignore[attr-defined]  # a mark on a function
    CPUInt8ScaledMMLinearKernel.process_weights_for_onednn = process

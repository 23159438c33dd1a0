"""Loads checkpoint tensors into a running model by vLLM's own layer-wise reload.

A layer is rebuilt when all of its tensors are there, and the result is copied to where the kernels
expect it. vLLM neither notices a layer that got nothing (the old weights stay, a warning is
logged) nor cleans up after a load that broke off: both are done here.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rollout_pod.engine import cpu_repairs


class IncompleteLoadError(RuntimeError):
    """The model did not load all that it loaded at boot."""


class LayerwiseLoader:
    """The ``Loader`` of one worker.

    Args:
        model: The worker's model.
        vllm_config: The worker's.
        boot_parameters: What the model said it had loaded at boot, in its own names; None where it
            says nothing. An update must load all of it.
        on_cpu: Repair what vLLM's reload leaves out there.
    """

    def __init__(
        self,
        *,
        model: Any,
        vllm_config: Any,
        boot_parameters: frozenset[str] | None,
        on_cpu: bool,
    ) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._boot_parameters = boot_parameters
        self._on_cpu = on_cpu
        self._loaded: set[str] = set()
        self._device = vllm_config.device_config.device
        if on_cpu:
            cpu_repairs.patch_experts()

    def begin(self) -> None:
        """See ``Loader``."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._loaded = set()
        with self._context():
            initialize_layerwise_reload(self._model)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See ``Loader``."""
        with self._context():
            # Copies: vLLM keeps what it is given until the layer is complete.
            copies = ((name, t.to(device=self._device, copy=True)) for name, t in tensors)
            self._loaded.update(self._model.load_weights(copies) or ())

    def finish(self) -> None:
        """See ``Loader``.

        Raises:
            IncompleteLoadError: names parameters that got nothing.
        """
        if self._boot_parameters is not None:
            missing = sorted(self._boot_parameters - self._loaded)
            if missing:
                raise IncompleteLoadError(
                    f"{len(missing)} parameters were loaded at boot and not now: "
                    + ", ".join(missing[:10])
                )
        self._finalize()

    def flush(self) -> None:
        """See ``Loader``. What a broken load collected is dropped.

        Each layer is whole again, with old or new weights: a mix until the next load.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # Otherwise half a layer, or the tensor that failed, would be processed again.
                info.load_numel = 0
                info.loaded_weights = []
        self._finalize()

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._context():
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            if self._on_cpu:
                cpu_repairs.repack_output_heads(self._model)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            yield

"""Loads checkpoint tensors into a running model by vLLM's own layer-wise reload.

A layer is rebuilt when all of its tensors are there, and the result is copied to where the kernels
expect it. vLLM neither notices a layer that got nothing (the old weights stay, a warning is
logged) nor cleans up after a load that broke off: both are done here.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rollout_pod.engine import cpu_repairs


class IncompleteLoadError(RuntimeError):
    """The model did not load all that it loaded at boot."""


class _Part(torch.nn.Module):
    """Some layers of a model, for what walks over all of one."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self._layers = layers

    def modules(self, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
        """Only these: neither what is in them nor this itself."""
        return iter(self._layers)


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
        self._part: torch.nn.Module = model
        self._given: Callable[[str, torch.Tensor], None] | None = None
        self._device = vllm_config.device_config.device
        if on_cpu:
            cpu_repairs.patch_experts()
            cpu_repairs.patch_scaled_mm()

    def begin(
        self,
        layers: Sequence[torch.nn.Module] | None = None,
        given: Callable[[str, torch.Tensor], None] | None = None,
    ) -> None:
        """See ``Loader``.

        Args:
            layers: Load only these; what is not in them is not looked at. None loads all.
            given: Told of every tensor before the model gets it.
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._loaded = set()
        self._given = given
        self._part = self._model if layers is None else _Part(layers)
        with self._context():
            initialize_layerwise_reload(self._part)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See ``Loader``."""
        with self._context():
            self._loaded.update(self._model.load_weights(self._copies(tensors)) or ())

    def _copies(
        self, tensors: Sequence[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """VLLM keeps what it is given until the layer is complete."""
        for name, tensor in tensors:
            copy = tensor.to(device=self._device, copy=True)
            if self._given is not None:
                self._given(name, copy)
            yield name, copy

    def finish(self, elsewhere: frozenset[str] = frozenset()) -> None:
        """See ``Loader``.

        Args:
            elsewhere: Parameters that came another way.

        Raises:
            IncompleteLoadError: names parameters that got nothing.
        """
        if self._boot_parameters is not None:
            missing = sorted(self._boot_parameters - self._loaded - elsewhere)
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
        self._part = self._model
        self._finalize()

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._context():
            finalize_layerwise_reload(self._part, self._vllm_config.model_config)
            if self._on_cpu:
                cpu_repairs.repack_output_heads(self._model)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            yield

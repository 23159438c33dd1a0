"""What the boot load was given: the yardstick of every later update.

The model's own parameter names are fused, and loaders skip tensors, so the only thing that can be
compared with a manifest is what passed through the loader at boot. vLLM's default loader is
wrapped for that, in the worker's process, before the model is loaded.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rollout_pod.weights.loader import Expected, TensorSpec

_TAG = "_rollout_name"
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class BootRecord:
    """The tensors of one load of one model."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorSpec] = {}
        self.touched: set[str] = set()
        self.loaded_parameters: frozenset[str] | None = None
        """What the model said it loaded, in its own names; None where it says nothing."""
        self.complete = False

    def ignored(self) -> frozenset[str]:
        """Names that the model was given and never looked at."""
        return frozenset(self.tensors.keys() - self.touched)

    def watch(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the loader's tensors on and note them."""
        for name, tensor in weights:
            self.tensors[name] = spec_of(name, tensor)
            # On the tensor itself: a model may collect all tensors before it uses one.
            tensor.__dict__[_TAG] = name
            yield name, tensor


class _Touches(TorchFunctionMode):
    """Notes every tagged tensor that any function of torch is called with.

    A look at the shape counts too: better an ignored tensor that an update must bring than a used
    one that it may leave out.
    """

    def __init__(self, touched: set[str]) -> None:
        super().__init__()
        self._touched = touched

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            self._note(value)
        return func(*args, **kwargs)

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            name = value.__dict__.get(_TAG)
            if name is not None:
                self._touched.add(name)
        elif isinstance(value, list | tuple):
            for item in value:
                self._note(item)


_records: "weakref.WeakKeyDictionary[torch.nn.Module, BootRecord]" = weakref.WeakKeyDictionary()


def install() -> None:
    """Wrap vLLM's default loader. For the worker's process, before the model is loaded."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.load_weights
    if getattr(original, "rollout_wrapped", False):
        return

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        record = BootRecord()
        get_all_weights = self.get_all_weights
        model_load = model.load_weights

        def recording_load(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            loaded = model_load(weights)
            if loaded is not None:
                record.loaded_parameters = frozenset(loaded)
            return loaded

        # On the instances, so that nothing of it outlives this load.
        self.get_all_weights = lambda *args: record.watch(get_all_weights(*args))
        model.load_weights = recording_load
        try:
            with _Touches(record.touched):
                original(self, model, model_config)
        finally:
            del self.get_all_weights
            del model.load_weights
        record.complete = True
        _records[model] = record

    load_weights.rollout_wrapped = True  # type: ignore[attr-defined]  # a mark on a function
    DefaultModelLoader.load_weights = load_weights


def record_of(model: torch.nn.Module) -> BootRecord | None:
    """The record of this model's boot load; None if it was not loaded by the default loader."""
    return _records.get(model)


def expected(record: BootRecord, *, tied: bool) -> Expected:
    """What a manifest has to bring.

    Args:
        record: Of the boot load.
        tied: The output head is the input embedding. Whether the checkpoint carries it under both
            names or one, an update may bring it under both.
    """
    tensors = dict(record.tensors)
    optional = set(record.ignored())
    if tied:
        for name, spec in record.tensors.items():
            if name.endswith(_EMBEDDING):
                head = name.removesuffix(_EMBEDDING) + _HEAD
                alias = TensorSpec(head, spec.dtype, spec.shape, spec.nbytes)
                tensors.setdefault(head, alias)
                if head not in record.touched:
                    optional.add(head)
    return Expected(tensors, frozenset(optional))


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The wire's description of a tensor."""
    return TensorSpec(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        nbytes=tensor.numel() * tensor.element_size(),
    )

"""What a trainer may hand over as weights."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

    from rollout_pod.weights.spec import TensorSpec

    Tensor: TypeAlias = torch.Tensor
    Spec: TypeAlias = TensorSpec
else:  # whoever only steers replicas has no torch
    Tensor = Spec = Any

Tensors: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Weights: TypeAlias = Tensors | Callable[[], Tensors]
"""A state dict; pairs that come one after another (a generator); or a function that returns one of
these, and the same bytes whenever it is called. Tensors may be on the CPU or a GPU, and DTensors.
"""

Names: TypeAlias = Callable[[str], str | None] | Mapping[str, str]
"""The checkpoint's name of each of the trainer's tensors. A function returns None for a tensor that
is not sent; names that a mapping does not have stay as they are."""

Specs: TypeAlias = Iterable[Spec]
"""Name, type (torch's name of it, such as ``bfloat16``), shape and bytes of each tensor."""

Keep = Literal["reference", "copy", "nothing"]

"""What the receiver asks of the engine's worker it lives in."""

from collections.abc import Sequence
from typing import Protocol

import torch

from rollout_pod.weights.spec import Expected, TensorSpec

__all__ = ["Expected", "Loader", "TensorSpec"]


class Loader(Protocol):
    """Puts whole tensors into a model. All calls come from one thread, in this order:
    ``begin``, ``load`` any number of times, ``finish``; ``flush`` only after a failure.
    Any of them may raise: the model then counts as poisoned.
    """

    def begin(self) -> None:
        """Prepare the model to be loaded anew."""

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take whole tensors, in any order. Their memory is the receiver's and is used again
        when this returns: copy what has to outlive the call.
        """

    def finish(self) -> None:
        """All tensors were given: process what is processed once a load."""

    def flush(self) -> None:
        """Leave no half-loaded state of a failed load behind, so that ``begin`` starts clean."""

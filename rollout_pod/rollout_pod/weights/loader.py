"""What the receiver asks of the engine's worker it lives in."""

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch

from rollout_pod.weights.copies import Piece
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.spec import Expected, TensorSpec

__all__ = ["Expected", "Loader", "Path", "ReplayingLoader", "TensorSpec"]

Path = Literal["reference", "recorded", "mixed", "replayed", "staged", "switched"]
"""How a model was loaded: by the engine's own loaders; so, and noted where the bytes went; a part
by copies of what was noted, a part by the engine's loaders; all by copies; not yet, the version
waits beside it; by one copy of what waited."""


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


@runtime_checkable
class ReplayingLoader(Loader, Protocol):
    """A loader that knows, of some tensors, where each byte belongs, and copies it there.
    ``prepare`` comes before ``begin`` (after ``flush``), ``replay`` any number of times between
    ``begin`` and ``finish``.
    """

    def prepare(self, manifest: Manifest) -> frozenset[str]:
        """Names of tensors of the manifest that come by ``replay``, their aliases included; all
        others come by ``load``. If these are all, ``begin`` and ``finish`` change nothing.
        """

    def replay(
        self, key: Hashable, pieces: Callable[[], Sequence[Piece]], *, on_device: bool
    ) -> None:
        """Copy pieces, or queue it.

        Args:
            key: equal for equal pieces at equal addresses, now and later; None if they will not
                come again.
            pieces: called only if the key is new.
            on_device: whether the pieces lie in memory of this rank's GPU.
        """

    def wait(self) -> None:
        """Until everything queued is done; the pieces' memory may be used again then."""

    def summary(self) -> tuple[Path, str]:
        """How the last load went, and why not faster; the second is empty if it cannot be."""

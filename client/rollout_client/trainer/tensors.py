"""A trainer's tensors under the checkpoint's names: what they are, and each of them whole."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch

from rollout_client.trainer.weights import Names, Tensors
from rollout_pod.weights.fill import fits, spec_of
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.spec import TensorSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Cast = torch.dtype | Callable[[str, torch.dtype], torch.dtype]
Pairs = Iterator[tuple[str, torch.Tensor]]


class TensorsChanged(Exception):
    """They were written to while they were read, or since they were sent first."""


class Naming:
    """From the trainer's names and types to the checkpoint's. Pure.

    Args:
        names: see ``ServerAdapter``.
        cast: see ``ServerAdapter``.
    """

    def __init__(self, names: Names | None = None, cast: Cast | None = None) -> None:
        self._names = names
        self._cast = cast

    def name(self, theirs: str) -> str | None:
        """The checkpoint's name; None for a tensor that is not sent."""
        if self._names is None:
            return theirs
        if isinstance(self._names, Mapping):
            return self._names.get(theirs, theirs)
        return self._names(theirs)

    def dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type in which the tensor is sent; other than floating-point ones stay."""
        if self._cast is None or not dtype.is_floating_point:
            return dtype
        return self._cast if isinstance(self._cast, torch.dtype) else self._cast(name, dtype)

    def named(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A mapping under the checkpoint's names, with the very same tensors.

        Raises:
            ValueError: two of them get the same name.
        """
        found: dict[str, torch.Tensor] = {}
        origin: dict[str, str] = {}
        for theirs, tensor in tensors.items():
            name = self.name(theirs)
            if name is None:
                continue
            if name in found:
                raise ValueError(f"names: {origin[name]!r} and {theirs!r} both became {name!r}")
            found[name], origin[name] = tensor, theirs
        return found

    def spec(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        """What a manifest says of the tensor: by its metadata, of a DTensor the global ones."""
        dtype = self.dtype(name, tensor.dtype)
        return spec_of(name, torch.empty(tensor.shape, dtype=dtype, device="meta"))

    def manifest(
        self, version: str, tensors: Mapping[str, torch.Tensor], like: Manifest | None = None
    ) -> Manifest:
        """Of a mapping that has the checkpoint's names.

        Args:
            version: its name.
            tensors: under the checkpoint's names.
            like: one that is probably equal but for the version: it keeps what is known of it.
        """
        if (
            like is not None
            and self._cast is None
            and len(tensors) == len(like.tensors)
            and all(map(fits, like.tensors, tensors.keys(), tensors.values()))
        ):
            return like.renamed(version)
        return Manifest(version, tuple(self.spec(n, t) for n, t in tensors.items()))

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Gathered and of the type that is sent. A collective call for a DTensor."""
        # a thread has a present GPU of its own, and NCCL gathers on that one
        with on_device_of(tensor), torch.no_grad():
            tensor = gathered(tensor.detach())
            return tensor.to(self.dtype(name, tensor.dtype))

    def is_as_sent(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether ``whole`` has nothing to do."""
        return not is_dtensor(tensor) and self.dtype(name, tensor.dtype) == tensor.dtype

    def whole_pairs(self, tensors: Tensors) -> Pairs:
        """One after another, under the checkpoint's names."""
        if isinstance(tensors, Mapping):
            tensors = tensors.items()
        for theirs, tensor in tensors:
            name = self.name(theirs)
            if name is None:
                continue  # on every rank, so that nobody waits for its shards
            yield name, self.whole(name, tensor)

    def whole_pairs_of(self, guarded: "Guarded") -> Pairs:
        """The same of what has the checkpoint's names already; see ``Guarded.pairs``."""
        for name, tensor in guarded.pairs():
            yield name, self.whole(name, tensor)


Marks = Mapping[str, tuple[int, int]]
"""Of each tensor where it lies, and how often it was written to as torch counts."""


class Guarded(dict[str, torch.Tensor]):
    """A mapping that is read whole, or not at all: going through it raises at the end if a tensor
    was written to since this was made.

    Writes that torch does not count (through ``.data``, NumPy or other processes) are not seen.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.marks: Marks = {name: mark_of(tensor) for name, tensor in tensors.items()}

    def pairs(self) -> Pairs:
        """All of them.

        Raises:
            TensorsChanged: at the end, so that what was made of them is not used.
        """
        yield from self.items()
        refuse_changed(self.marks, {name: mark_of(tensor) for name, tensor in self.items()})


def refuse_changed(before: Marks, now: Marks) -> None:
    """Compare; a tensor that lies elsewhere by now is another one, and is not looked at.

    Raises:
        TensorsChanged: names the first one.
    """
    for name, (place, count) in now.items():
        if name in before and before[name][0] == place and before[name][1] != count:
            raise TensorsChanged(f"tensor {name!r} was written to since the version was sent")


def mark_of(tensor: torch.Tensor) -> tuple[int, int]:
    """See ``Marks``; 0 where torch does not count."""
    with torch.no_grad():
        local = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.data_ptr(), 0 if local.is_inference() else local._version


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whoever has one has loaded its module, which takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other ranks are needed to have it whole."""
    return is_dtensor(tensor) and tensor.device_mesh.size() > 1


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on this rank's device."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def present_gpu_index() -> int | None:
    """The calling thread's; None where no GPU is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's own gap
        return None
    return torch.cuda.current_device()


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """For calls that go to the thread's present GPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()

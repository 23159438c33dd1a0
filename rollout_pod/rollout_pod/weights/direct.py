"""The sender's own tensors as something that a rank can read: allocations, exported once."""

import secrets
from bisect import bisect_right
from collections.abc import Mapping

import torch

from rollout_pod.weights import wire
from rollout_pod.weights.device import Device, Exported, NotExportableError
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.manifest import Manifest

Tensors = Mapping[str, torch.Tensor]


class Exports:
    """What is known of a sender's tensors from one update to the next.

    Holds the tensors, so that their memory is not given to others behind our back; whoever moves
    them all the same (new ``data``, a model built anew) is found out by ``renew``.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._prefix = f"direct-{secrets.token_hex(8)}"
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._allocations: list[Exported] = []
        self.generation = 0
        self.manifest: Manifest | None = None
        self.message: wire.Direct | None = None
        self.digest = ""
        """Of ``message``."""

    @property
    def regions(self) -> list[tuple[str, bytes, int]]:
        """Name, handle, bytes."""
        return [
            (f"{self._prefix}-{self.generation}-{number}", found.handle, found.nbytes)
            for number, found in enumerate(self._allocations)
        ]

    def renew(self, version: str, tensors: Tensors) -> bool:
        """Look at all tensors; False if everything is where it was.

        Raises:
            NotExportableError: some tensor cannot be read from outside, with the reason.
        """
        if self.manifest is not None and self._unchanged(tensors):
            self.manifest = self.manifest.renamed(version)
            return False
        self.clear()
        values = list(tensors.values())
        specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
        for name, tensor in tensors.items():
            if tensor.numel() and not tensor.is_contiguous():
                raise NotExportableError(f"tensor {name!r} is not contiguous")
        addresses = [tensor.data_ptr() for tensor in values]
        with self._device.current():
            allocations = self._export(zip(tensors, addresses, values, strict=True))
        starts = [found.address for found in allocations]
        places = []
        for spec, address in zip(specs, addresses, strict=True):
            number = bisect_right(starts, address) - 1 if spec.nbytes else 0
            places.append((number, address - starts[number] if spec.nbytes else 0))
        self.generation += 1
        self._tensors, self._addresses, self._allocations = values, addresses, allocations
        self.manifest = Manifest(version, specs)
        names = tuple(name for name, _, _ in self.regions)
        self.message = wire.Direct(
            session="-", generation=self.generation, regions=names, places=tuple(places)
        )
        self.digest = self.message.digest
        return True

    def altered(self) -> str:
        """Name of a tensor that has another type or shape than when it was described. Slower than
        ``renew``, which sees addresses only: for while the bytes travel.
        """
        if self.manifest is None:
            return ""
        for spec, tensor in zip(self.manifest.tensors, self._tensors, strict=True):
            if tuple(tensor.shape) != spec.shape or not tensor.is_contiguous():
                return spec.name
        return ""

    def clear(self) -> None:
        """Let go of the tensors."""
        self._tensors, self._addresses, self._allocations = [], [], []
        self.manifest = self.message = None

    def _unchanged(self, tensors: Tensors) -> bool:
        values = list(tensors.values())
        if len(values) != len(self._tensors) or self.manifest is None:
            return False
        if [tensor.data_ptr() for tensor in values] != self._addresses:
            return False
        if any(a is not b for a, b in zip(values, self._tensors, strict=True)):
            # a mapping may make its tensors anew each time; that these are equal takes a look
            specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
            if specs != self.manifest.tensors:
                return False
            self._tensors = values
        with self._device.current():
            return all(
                self._device.identity(found.address) == found.identity
                for found in self._allocations
            )

    def _export(self, tensors: "zip[tuple[str, int, torch.Tensor]]") -> list[Exported]:
        found: list[Exported] = []
        last: Exported | None = None
        for name, address, tensor in sorted(tensors, key=lambda each: each[1]):
            size = tensor.numel() * tensor.element_size()
            if not size:
                continue
            if last is None or not last.address <= address < last.address + last.nbytes:
                try:
                    last = self._device.export(address)
                except NotExportableError as error:
                    raise NotExportableError(f"tensor {name!r}: {error}") from error
                found.append(last)
            if address + size > last.address + last.nbytes:
                raise NotExportableError(f"tensor {name!r} lies in more than one allocation")
        return found

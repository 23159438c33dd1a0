"""The sender's own tensors as something that a rank can read: allocations, exported once."""

import operator
import secrets
from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

import torch

from rollout_pod.weights import wire
from rollout_pod.weights.device import Device, Exported, NotExportableError
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.manifest import Manifest

Tensors = Mapping[str, torch.Tensor]

_SHAPE: Final = operator.attrgetter("shape")
_DTYPE: Final = operator.attrgetter("dtype")


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
        self._names: list[str] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []
        self._released: int | None = None
        self._unconfirmed = False
        self.regions: tuple[tuple[str, bytes, int], ...] = ()
        """Name, handle, bytes."""
        self.generation = 0
        self.manifest: Manifest | None = None
        self.message: wire.Direct | None = None
        self.digest = ""
        """Of ``message``."""

    def renew(self, version: str, tensors: Tensors) -> bool:
        """Look at all tensors; False if everything is where it was.

        Raises:
            NotExportableError: some tensor cannot be read from outside, with the reason.
        """
        if self.manifest is not None and self._unchanged(tensors):
            self.manifest = self.manifest.renamed(version)
            return False
        self.clear()
        released = self._device.released()
        values = list(tensors.values())
        if not all(map(self._device.owns, values)):
            raise NotExportableError("some tensors are not on the GPU")
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
        self._remember(list(tensors), values)
        self._released = released
        self.regions = tuple(
            (f"{self._prefix}-{self.generation}-{number}", found.handle, found.nbytes)
            for number, found in enumerate(allocations)
        )
        self.manifest = Manifest(version, specs)
        names = tuple(name for name, _, _ in self.regions)
        self.message = wire.Direct(
            session="-", generation=self.generation, regions=names, places=tuple(places)
        )
        self.digest = self.message.digest
        return True

    def altered(self) -> str:
        """What is not as it was described, in words; for while the bytes travel. It looks at types
        and shapes, of which ``renew`` sees nothing, and at allocations that ``renew`` left out.
        """
        values = self._tensors
        # one after the other: a list of so many shapes would set off the garbage collector
        same = (
            all(map(operator.eq, map(_SHAPE, values), self._shapes))
            and all(map(operator.is_, map(_DTYPE, values), self._dtypes))
            and all(map(torch.Tensor.is_contiguous, values))
        )
        if not same:
            found = zip(self._names, values, self._shapes, self._dtypes, strict=True)
            names = (
                name
                for name, tensor, shape, dtype in found
                if (tensor.shape, tensor.dtype) != (shape, dtype) or not tensor.is_contiguous()
            )
            return f"tensor {next(names, '')!r} was changed during the update"
        if self._unconfirmed and not self._same_allocations():
            self.clear()
            return "memory of the tensors was given back and taken anew; send once more"
        return ""

    def clear(self) -> None:
        """Let go of the tensors."""
        self._tensors, self._addresses, self._allocations = [], [], []
        self._names, self._shapes, self._dtypes, self.regions = [], [], [], ()
        self._unconfirmed = False
        self.manifest = self.message = None

    def _unchanged(self, tensors: Tensors) -> bool:
        values = list(tensors.values())
        if self.manifest is None or list(tensors) != self._names:
            return False
        if list(map(torch.Tensor.data_ptr, values)) != self._addresses:
            return False
        if not all(map(operator.is_, values, self._tensors)):
            # a mapping may make its tensors anew each time; that these are equal takes a look
            specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
            if specs != self.manifest.tensors:
                return False
            self._tensors = values
        # the driver takes a microsecond for each allocation, of which there can be thousands;
        # where torch has given none back since, they are looked at while the ranks copy
        released = self._device.released()
        if released is not None and released == self._released:
            self._unconfirmed = True
            return True
        self._unconfirmed = False
        self._released = released
        return self._same_allocations()

    def _same_allocations(self) -> bool:
        addresses = [found.address for found in self._allocations]
        now = self._device.identities(addresses)
        return now == [found.identity for found in self._allocations]

    def _remember(self, names: list[str], values: list[torch.Tensor]) -> None:
        self._names = names
        self._shapes = list(map(_SHAPE, values))
        self._dtypes = list(map(_DTYPE, values))

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

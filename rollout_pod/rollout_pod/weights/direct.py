"""The sender's own tensors as something that a rank can read: allocations, exported once."""

import operator
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

import torch

from rollout_pod.weights import wire
from rollout_pod.weights.device import Device, Exported, NotExportableError
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.manifest import Manifest

Tensors = Mapping[str, torch.Tensor]

LOOK_FIRST: Final = 512
"""So many tensors are looked at before any is read: enough to see that a model was made anew, in
which case its memory is exported anew as well."""
LOOK_GROWTH: Final = 4
"""How much more are looked at while those before are copied; a look is faster than a copy."""

_SHAPE: Final = operator.attrgetter("shape")
_DTYPE: Final = operator.attrgetter("dtype")


class MovedError(Exception):
    """Tensors were moved, as is seen when others are being read: the update fails."""


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
        self._careful = False
        """Whether all tensors are looked at before the first one is read."""
        self._looked = 0
        """How many were, in this update."""
        self._news: tuple[Iterator[str], Iterator[torch.Tensor]] = iter(()), iter(())
        """What of this update's names and tensors was not looked at yet."""
        self.regions: tuple[tuple[str, bytes, int], ...] = ()
        """Name, handle, bytes."""
        self.generation = 0
        self.manifest: Manifest | None = None
        self.message: wire.Direct | None = None
        self.digest = ""
        """Of ``message``."""

    def renew(self, version: str, tensors: Tensors) -> bool:
        """Look at the tensors; False if everything is where it was, as far as that was looked at:
        see ``parts``.

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
        self._looked = len(values)
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

    @property
    def first(self) -> wire.Direct | None:
        """What may be read first, as a message; None before ``renew``."""
        if self.message is None:
            return None
        return self.message.model_copy(update={"same": self.digest, "count": self._looked})

    def parts(self) -> Iterator[tuple[int, int]]:
        """Tensors that may be read now, as (first, how many): a part is looked at while the ranks
        copy the one before it. The first one is what ``renew`` has looked at.

        Raises:
            MovedError: a tensor is not where it was; the next ``renew`` finds out where it is.
        """
        first, stop, end = 0, self._looked, len(self._addresses)
        while True:
            yield first, stop - first
            if stop == end:
                return
            first, stop = stop, min(end, stop * LOOK_GROWTH)
            if not self._look(first, stop):
                self.clear()
                # whoever moves a few of many tensors may do so each time
                self._careful = True
                raise MovedError("some tensors have moved; send once more")

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
        self._news = iter(()), iter(())
        self.manifest = self.message = None

    def _unchanged(self, tensors: Tensors) -> bool:
        end = len(self._addresses)
        if len(tensors) != end:
            return False
        self._news = iter(tensors), iter(tensors.values())
        if not self._look(0, end if self._careful else min(end, LOOK_FIRST)):
            return False
        # the driver takes a microsecond for each allocation, of which there can be thousands;
        # where torch has given none back since, they are looked at while the ranks copy
        released = self._device.released()
        if released is not None and released == self._released:
            self._unconfirmed = True
            return True
        self._unconfirmed = False
        self._released = released
        return self._same_allocations()

    def _look(self, first: int, stop: int) -> bool:
        """Whether the next tensors are those that were described, at their addresses."""
        names = list(islice(self._news[0], stop - first))
        values = list(islice(self._news[1], stop - first))
        known = slice(first, stop)
        if self.manifest is None or names != self._names[known]:
            return False
        if list(map(torch.Tensor.data_ptr, values)) != self._addresses[known]:
            return False
        if not all(map(operator.is_, values, self._tensors[known])):
            # a mapping may make its tensors anew each time; that these are equal takes a look
            if tuple(map(spec_of, names, values)) != self.manifest.tensors[known]:
                return False
            self._tensors[known] = values
        self._looked = stop
        return True

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

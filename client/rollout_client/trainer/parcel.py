"""One version's tensors, on their way to several replicas, and again where it has to be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rollout_client.trainer.pump import Pump, present_gpu
from rollout_client.trainer.tensors import Guarded, Marks, Naming, is_sharded
from rollout_client.trainer.weights import Keep, Tensors
from rollout_pod.weights.manifest import Manifest


class HostCopy(dict[str, torch.Tensor]):
    """Tensors in host memory, filled as they go by."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one."""
        self[name] = tensor.detach().to("cpu", copy=True)


@dataclass
class Parcel:
    """What is sent of one version.

    Exactly one of ``whole`` and ``pump`` brings the tensors.
    """

    manifest: Manifest
    whole: Guarded | None = None
    """All of them at once, for any number of readers, any number of times."""
    pump: Pump | None = None
    """One after another, once."""
    naming: Naming = field(default_factory=Naming)
    copy: HostCopy | None = None
    """All of them in host memory; filled while they are sent."""
    marks: Marks | None = None
    """Of what was handed over, to see later whether it was written to."""
    is_asked_for: bool = False
    """At least one replica was asked to hold it."""
    gpu: int | None = None
    """Where tensors that come one after another lie; None: on the host."""

    @property
    def is_repeatable(self) -> bool:
        """Whether the same bytes can be read once more."""
        return self.whole is not None

    @property
    def device(self) -> int | None:
        """The GPU that the tensors are on; None for the host."""
        if self.whole is not None:
            return next((t.device.index for t in self.whole.values() if t.is_cuda), None)
        return self.gpu

    def tensors(self, reader: str, *, quietly: bool = False) -> Tensors:
        """What a sender takes: the tensors themselves where that is possible, so that ranks may
        read them in place.

        Args:
            reader: who asks.
            quietly: they may be written to meanwhile: read them one after another, and fail at the
                end if that happened, rather than ever commit a mix.
        """
        if self.pump is not None:
            return self.pump.pairs(reader)
        assert self.whole is not None  # noqa: S101 # one of the two
        # read in place is only what lies on a GPU
        is_direct = self.device is not None and not quietly
        if is_direct and all(self.naming.is_as_sent(*pair) for pair in self.whole.items()):
            return self.whole
        return self.naming.whole_pairs_of(self.whole)

    def leave(self, reader: str) -> None:
        """This reader takes no more."""
        if self.pump is not None:
            self.pump.leave(reader)


@dataclass(frozen=True)
class Packer:
    """Makes parcels as the adapter's settings say. Blocks; calls nobody but the trainer."""

    naming: Naming
    keep: Keep
    gathers: bool
    """Other ranks gather with this one, and each has to read all."""

    def pack(
        self,
        version: str,
        tensors: Tensors,
        readers: tuple[str, ...],
        *,
        manifest: Manifest | None = None,
        gpu: int | None = None,
        before_reading: Callable[[], None] = lambda: None,
    ) -> Parcel:
        """Look at the weights; nothing is gathered yet, unless pairs come without a manifest.

        Args:
            version: its name.
            tensors: see ``Weights``.
            readers: the replicas.
            manifest: of pairs, if it is known; for a mapping that of the last version.
            gpu: where what is gathered lies.
            before_reading: called if it has to read all of it now.

        Raises:
            ValueError: two tensors of one name, or DTensors without a group.
        """
        copy = HostCopy() if self.keep == "copy" else None
        if isinstance(tensors, Mapping):
            guarded = Guarded(self.naming.named(tensors))
            known = self.naming.manifest(version, guarded, manifest)
            if not self.gathers:
                self._refuse_sharded(guarded)
                if copy is None:
                    return Parcel(known, whole=guarded, naming=self.naming, marks=guarded.marks)
            pairs = lambda: self.naming.whole_pairs_of(guarded)  # noqa: E731 # one of two
            marks = guarded.marks
        else:
            if manifest is None:
                before_reading()
                return self._read(version, tensors, gpu)
            once, known, marks = tensors, manifest.renamed(version), None
            pairs = lambda: self.naming.whole_pairs(once)  # noqa: E731
        pump = Pump(
            pairs,
            readers,
            is_drained=self.gathers or copy is not None,
            keep=copy.add if copy is not None else None,
            gpu=gpu,
        )
        return Parcel(known, pump=pump, naming=self.naming, copy=copy, marks=marks, gpu=gpu)

    def _read(self, version: str, tensors: Tensors, gpu: int | None) -> Parcel:
        copy = HostCopy()
        with present_gpu(gpu):
            for name, tensor in self.naming.whole_pairs(tensors):
                if name in copy:
                    raise ValueError(f"tensor {name!r} came twice")
                copy.add(name, tensor)
        made = Naming().manifest(version, copy)
        return Parcel(made, whole=Guarded(copy), copy=copy)

    def _refuse_sharded(self, named: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in named.items():
            if is_sharded(tensor):
                raise ValueError(
                    f"tensor {name!r} is sharded over several ranks, and all of them are needed to "
                    'gather it: give the adapter their group, ServerAdapter(..., group="world"), '
                    "and call update_weights on each"
                )

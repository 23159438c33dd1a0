"""What an update of a trainer consists of, and in which mode it goes."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

import torch

from rollout_pod.weights import wire
from rollout_pod.weights.device import Device, NotExportableError
from rollout_pod.weights.direct import Exports
from rollout_pod.weights.fill import Filler, fits, spec_of
from rollout_pod.weights.hashes import hashed
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import TransferFailed

Mode = Literal["auto", "bucketed", "direct"]
Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

UNHASHED: Final = "hashes are compared in buckets only"


@dataclass
class Look:
    """What an update was found to be."""

    version: str
    tensors: Tensors
    manifest: Manifest | None
    transport: wire.Transport | None = None
    """For which it was found."""
    direct: Exports | None = None
    """If the ranks read the tensors in place; else ``why`` not."""
    why: str = ""
    shown: Manifest | None = None
    filler: Filler | None = None
    """That fills the first bucket."""

    @property
    def first(self) -> wire.Direct | None:
        """What may be read in place first; None where nothing may."""
        return self.direct.first if self.direct is not None else None


class Looker:
    """Knows what it found from one update to the next.

    Args:
        mode: that is asked for.
        hashes: whether the ranks are to compare bytes.
        device: the GPU; None if tensors are on the host.
    """

    def __init__(self, mode: Mode, *, hashes: bool, device: Device | None) -> None:
        self._mode = mode
        self._hashes = hashes
        self._exports = Exports(device) if device is not None else None
        self.manifest: Manifest | None = None
        """Of the last update."""

    def forget(self) -> None:
        """Let go of the tensors."""
        if self._exports is not None:
            self._exports.clear()

    def look(self, look: Look, link: Session, steps: dict[str, float]) -> Manifest:
        """Find out, once for a transport. The manifest is ``look.shown``.

        Raises:
            NotExportableError: mode ``direct`` was asked for and is not possible.
            TransferFailed: a manifest is missing, of another version, or (mode direct, which
                reads tensors without asking for them by name) of other tensors.
        """
        if look.shown is None or look.transport != link.transport:
            look.transport = link.transport
            if look.manifest is not None and look.manifest.version != look.version:
                raise TransferFailed(f"the manifest is of version {look.manifest.version!r}")
            with step(steps, "look"):
                wants = self._hashes or bool(look.manifest and look.manifest.hashes)
                look.direct, look.why = self._pick(look.version, look.tensors, link, wants)
                if look.direct is not None and look.direct.manifest is not None:
                    look.shown = self._aliased(look.direct.manifest, look.manifest)
                else:
                    look.shown = self._describe(look.version, look.tensors, look.manifest)
                self.manifest = look.shown
            if self._hashes and not look.shown.hashes:
                with step(steps, "hash"):
                    look.shown = self._hashed(look.shown, look.tensors)
        return look.shown

    def _pick(
        self, version: str, tensors: Tensors, link: Session, hashes: bool
    ) -> tuple[Exports | None, str]:
        """The exports, if the mode is direct; else None, and why."""
        why = ""
        if self._mode == "bucketed":
            return None, ""
        if hashes and self._mode == "direct":
            raise NotExportableError(f"mode direct does not work: {UNHASHED}")
        if hashes:
            return None, f"bucketed: {UNHASHED}"
        if link.transport != "cuda_ipc" or self._exports is None:
            why = "" if link.reason else "the tensors are not on a GPU"
        elif not isinstance(tensors, Mapping):
            why = "tensors that come one after another cannot be read in place"
        else:
            try:
                self._exports.renew(version, tensors)
            except NotExportableError as error:
                why = str(error)
            else:
                return self._exports, ""
        if self._mode == "direct":
            raise NotExportableError(f"mode direct does not work: {why or link.reason}")
        return None, f"bucketed: {why}" if why else ""

    def _aliased(self, found: Manifest, given: Manifest | None) -> Manifest:
        """What was found in place, with the other names that the caller gives; without a manifest
        those of the last one, where it is of the same tensors.

        Raises:
            TransferFailed: the caller's manifest is of other tensors.
        """
        if given is not None and given.tensors != found.tensors:
            pairs = zip_longest(given.tensors, found.tensors)
            want, got = next((want, got) for want, got in pairs if want != got)
            raise TransferFailed(f"the tensor is {got or 'missing'}, manifest: {want or 'none'}")
        known = self.manifest
        named = given or known
        if named is None or not named.aliases:
            return found
        if known is None or known.tensors != found.tensors:
            return found if given is None else Manifest(found.version, found.tensors, given.aliases)
        if known.aliases == named.aliases:
            return known.renamed(found.version)  # what was computed of it holds
        return Manifest(found.version, found.tensors, named.aliases)

    def _describe(self, version: str, tensors: Tensors, manifest: Manifest | None) -> Manifest:
        if manifest is not None:
            return manifest
        if isinstance(tensors, Mapping):
            known = self.manifest
            if (
                known is not None
                and len(tensors) == len(known.tensors)
                and all(map(fits, known.tensors, tensors.keys(), tensors.values()))
            ):
                return known.renamed(version)
            specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
            return Manifest(version, specs)
        if self.manifest is None:
            raise TransferFailed("tensors that come one after another need a manifest")
        return self.manifest.renamed(version)

    def _hashed(self, manifest: Manifest, tensors: Tensors) -> Manifest:
        if not isinstance(tensors, Mapping):
            raise TransferFailed(
                "hashes are sent before the bytes: tensors that come one after another need a "
                "manifest that has them (hashes.hashed)"
            )
        return hashed(manifest, tensors)


@contextlib.contextmanager
def step(steps: dict[str, float], name: str) -> Iterator[None]:
    """Note how long it takes."""
    started = time.monotonic()
    try:
        yield
    finally:
        steps[name] = time.monotonic() - started

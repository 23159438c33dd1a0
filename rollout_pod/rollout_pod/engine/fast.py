"""Loads a running model by the copies that an earlier load was seen to make.

The first update goes through vLLM's own loaders, watched; every later one through a kernel that
copies each byte to where it went then. Layers of which vLLM computes something keep its loaders.
"""

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from rollout_pod.engine.layerwise import LayerwiseLoader
from rollout_pod.engine.survey import Survey, survey
from rollout_pod.weights.copies import CopyPlan, Piece, place
from rollout_pod.weights.device import Device
from rollout_pod.weights.loader import Path
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.recording import Recorder
from rollout_pod.weights.replay import HostReplayer, KernelReplayer, Replayer, UploadReplayer
from rollout_pod.weights.shadow import Shadow, ShadowError

log = logging.getLogger(__name__)

_NOT_KNOWN_YET = (
    "it is not known yet where each byte of this model belongs: the first update goes the ordinary "
    "way"
)


class _Noting(list[Any]):
    """What vLLM collects of a layer; notes the names behind each entry."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def append(self, entry: Any) -> None:
        """Of a parameter's name and the bound arguments of its loader."""
        super().append(entry)
        for value in entry[1].arguments.values():
            if isinstance(value, torch.Tensor):
                self._note(value)


class FastLoader:
    """The ``ReplayingLoader`` of one worker.

    Args:
        model: The worker's.
        reference: Loads it by vLLM.
        device: The worker's GPU; None on CPU.
    """

    def __init__(
        self, *, model: torch.nn.Module, reference: LayerwiseLoader, device: Device | None
    ) -> None:
        self.enabled = True
        """Off, all goes by the reference: for tests that compare the two."""
        self.require_full_cover = False
        """The next load must write every byte: what the plan leaves out is lost (sleep level 2)."""
        self._model = model
        self._reference = reference
        where = f"cuda:{torch.cuda.current_device()}" if device is not None else "cpu"
        self._near: Replayer = KernelReplayer(where) if device is not None else HostReplayer()
        self._device = device
        self._far: Replayer = UploadReplayer(device) if device is not None else self._near
        self._survey: Survey | None = None
        self._for: frozenset[str] = frozenset()
        """Names that the survey is of."""
        self._prepared: dict[Hashable, Any] = {}
        self._kept = 0
        self._recorder: Recorder | None = None
        self._loaded_in: dict[torch.nn.Module, set[str]] = {}
        self._path: Path = "reference"
        self._note = ""
        # of the last manifest, as long as the next one is the same
        self._digest = ""
        self._names: tuple[str, ...] = ()
        self._all: frozenset[str] = frozenset()
        self._slow: frozenset[str] | None = None

    def prepare(self, manifest: Manifest) -> frozenset[str]:
        """See ``ReplayingLoader``."""
        if manifest.digest != self._digest:
            self._names = (
                *(tensor.name for tensor in manifest.tensors),
                *(alias for alias, _ in manifest.aliases),
            )
            self._all = frozenset(self._names)
            self._digest = manifest.digest
            self._slow = None
        names = self._all
        self._recorder = None
        self._note = ""
        known = self._survey if names is self._for or names == self._for else None
        if not self.enabled:
            self._path, self._note = "reference", "replaying is off"
        elif known is None or not known.in_place():
            self._path = "recorded"
            self._recorder = Recorder()
            self._survey = None
            self._prepared.clear()
            self._kept = 0
        elif self.require_full_cover and not known.plan.full:
            self._path = "reference"
            self._note = "the copies do not write every byte of the model, which has lost all"
        elif known.plan.copies:
            self._path = "mixed" if known.layers else "replayed"
            self._note = "; ".join(known.plan.reasons)
            if self._slow is None:
                self._slow = _slow(known, manifest, names)
            return manifest.names - self._slow if self._slow else manifest.names
        else:
            self._path = "reference"
            self._note = "; ".join(known.plan.reasons)
        return frozenset()

    def begin(self) -> None:
        """See ``Loader``."""
        if self._path == "replayed":
            return
        if self._path == "mixed" and self._survey is not None:
            self._reference.begin(self._survey.layers)
            return
        if self._recorder is None:
            self._reference.begin()
            return
        self._loaded_in = {}
        self._reference.begin(given=self._recorder.source)
        self._watch_layers(self._recorder)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See ``Loader``."""
        with self._recording():
            self._reference.load(tensors)

    def replay(
        self, key: Hashable, pieces: Callable[[], Sequence[Piece]], *, on_device: bool
    ) -> None:
        """See ``ReplayingLoader``."""
        if self._survey is None or self._path not in ("mixed", "replayed"):
            return
        replayer = self._near if on_device else self._far
        prepared = self._prepared.get(key) if key is not None else None
        if prepared is None:
            copies = place(self._survey.plan, pieces())
            prepared = replayer.prepare(copies)
            if key is not None:
                self._kept += len(copies)
                if len(self._prepared) > _KEPT_SETS or self._kept > _KEPT_COPIES:
                    self._prepared.clear()
                    self._kept = len(copies)
                self._prepared[key] = prepared
        replayer.run(prepared)

    def wait(self) -> None:
        """See ``ReplayingLoader``."""
        self._near.wait()
        self._far.wait()

    def finish(self) -> None:
        """See ``Loader``."""
        if self._path == "mixed" and self._survey is not None:
            self._reference.finish(self._survey.parameters)
        elif self._path != "replayed":
            with self._recording():
                self._reference.finish()
        self.require_full_cover = False  # not before all of it is there
        if self._recorder is not None:
            self._judge(self._recorder)
            if self._device is not None:
                torch.cuda.empty_cache()  # no later load needs as much

    def flush(self) -> None:
        """See ``Loader``."""
        self._reference.flush()

    def summary(self) -> tuple[Path, str]:
        """See ``ReplayingLoader``."""
        return self._path, self._note

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        with self._recorder or contextlib.nullcontext(), torch.no_grad():
            yield

    def replayers_aside(self) -> tuple[Replayer, Replayer]:
        """For copies on the device and from the host while the engine decodes."""
        if self._device is None:
            return self._near, self._far
        return self._near, UploadReplayer(self._device, at_a_time=ASIDE_BYTES)

    def refusal_aside(self) -> str:
        """Why no version can be copied to a place beside the model, whatever its names are; empty
        where one can. The model must not be loaded meanwhile.
        """
        known = self._survey
        if known is None and self._note:
            return self._note
        if not self.enabled or known is None or not known.in_place():
            return _NOT_KNOWN_YET
        if known.layers or not known.plan.copies:
            why = "; ".join(known.plan.reasons)
            return f"not all layers of this model are loaded by copies: {why}"
        return ""

    def plan_aside(self, manifest: Manifest) -> CopyPlan:
        """The plan by which all of a manifest is copied; for ``shadow.StagingLoader``. The model
        must not be loaded meanwhile.

        Raises:
            ShadowError: there is none, and why.
        """
        if why := self.refusal_aside():
            raise ShadowError(why)
        known = self._survey
        if known is None or manifest.names.union(a for a, _ in manifest.aliases) != self._for:
            raise ShadowError(_NOT_KNOWN_YET)
        return known.plan

    def switch(self, shadow: Shadow, version: str) -> Manifest:
        """Give the model what waits in ``shadow``.

        Raises:
            ShadowError: it cannot be; the model is untouched.
        """
        known = self._survey
        if known is None or not known.in_place():
            raise ShadowError("the model's parameters have moved since; stage it again")
        if self.require_full_cover and not known.plan.full:
            raise ShadowError("the copies do not write every byte of the model, which has lost all")
        manifest = shadow.switch(version, known.plan, self._near)
        self.require_full_cover = False
        return manifest

    def _watch_layers(self, recorder: Recorder) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights = _Noting(self._noter(layer, recorder))

    def _noter(self, layer: torch.nn.Module, recorder: Recorder) -> Callable[[torch.Tensor], None]:
        def note(tensor: torch.Tensor) -> None:
            self._loaded_in.setdefault(layer, set()).update(recorder.names_of(tensor))

        return note

    def _judge(self, recorder: Recorder) -> None:
        """A plan is a gift: whatever goes wrong with it, the load itself is complete."""
        try:
            found = survey(self._model, recorder, self._names, self._loaded_in)
        except Exception as error:
            log.exception("the load cannot be replayed")
            self._note = f"the load cannot be replayed: {type(error).__name__}: {error}"
            return
        finally:
            self._recorder = None
            self._loaded_in = {}
        self._survey, self._for, self._slow = found, self._all, None
        self._note = "; ".join(found.plan.reasons)
        log.info(
            "%d of %d tensors can be replayed%s", len(found.plan.copies), len(self._names),
            f" ({self._note})" if self._note else "",
        )  # fmt: skip


def _slow(known: Survey, manifest: Manifest, names: frozenset[str]) -> frozenset[str]:
    """Names that do not come by copies, and the other names of their tensors: a tensor comes one
    way under all of them. Where its own layer is a fast one, vLLM's loader writes it in place.
    """
    slow = {name for name in names if name not in known.plan.copies}
    slow |= {name for alias, name in manifest.aliases if alias in slow}
    slow |= {alias for alias, name in manifest.aliases if name in slow}
    return frozenset(slow)


ASIDE_BYTES = 16 << 20
"""Queued at a time while the engine decodes. On an H200 a model of 16 GB decodes 64 requests at
0.97 of its speed beside that, at 0.79 beside a queue without a bound, and at 0.88 beside pieces of
4 MB, after each of which Python's lock changes hands (docs/benchmarks.md)."""
_KEPT_SETS = 4096
"""Sets of copies that are kept ready, one for a bucket."""
_KEPT_COPIES = 1 << 18
"""In all of them: a trainer whose tensors move brings a new set for each update."""

"""A version that waits on the GPU: a load into a second place while the engine serves, and the
one copy that makes it the model's.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rollout_pod.weights.copies import CopyPlan, Piece, place
from rollout_pod.weights.loader import Path
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.replay import Prepared, Replayer
from rollout_pod.weights.shadow_plan import ShadowPlan, shadow_of


class ShadowError(Exception):
    """The version cannot wait here, or does not; the model is untouched."""


@dataclass
class Shadow:
    """The place, of one rank.

    Args:
        address: of its memory, a multiple of 256.
        nbytes: of it.
    """

    address: int
    nbytes: int
    held: Manifest | None = field(default=None, init=False)
    """What waits here, whole; set by the thread that stages, read by the one that switches."""
    source: CopyPlan | None = field(default=None, init=False)
    """The plan of the model that it was laid out by."""
    plan: ShadowPlan | None = field(default=None, init=False)
    _out: Prepared = field(default=None, init=False)

    def lay_out(self, source: CopyPlan) -> ShadowPlan:
        """Forget what waits here, and be as ``source`` needs it.

        Raises:
            ShadowError: there is not enough memory.
        """
        self.held = None
        if self.plan is None or source is not self.source:
            self.plan = self.source = self._out = None
            plan = shadow_of(source, self.address)
            if plan.nbytes > self.nbytes:
                raise ShadowError(
                    f"the version takes {plan.nbytes} bytes, {self.nbytes} were reserved for it"
                )
            self.plan, self.source = plan, source
        return self.plan

    def switch(self, version: str, source: CopyPlan, replayer: Replayer) -> Manifest:
        """Copy what waits here to the model. It goes on waiting, to be switched to again.

        Args:
            version: that is wanted.
            source: the plan of the model now.
            replayer: of copies on the device; its queue is waited for.

        Raises:
            ShadowError: something else waits here; the model is untouched.
        """
        held, plan = self.held, self.plan
        if held is None or plan is None or held.version != version:
            what = f"version {held.version!r}" if held is not None else "nothing"
            raise ShadowError(f"{what} waits on the device, not version {version!r}")
        if source is not self.source:
            raise ShadowError("the model has been loaded in another way since; stage it again")
        if self._out is None:
            self._out = replayer.prepare(plan.outward)
        replayer.run(self._out)
        replayer.wait()
        return held


class StagingLoader:
    """A ``ReplayingLoader`` that writes to a shadow. All calls come from the thread that stages.

    Args:
        shadow: where to.
        plan_of: the model's plan for all names of a manifest; raises ``ShadowError`` where there
            is none.
        near: makes copies on the device.
        far: makes copies from the host.
    """

    def __init__(
        self,
        shadow: Shadow,
        plan_of: Callable[[Manifest], CopyPlan],
        *,
        near: Replayer,
        far: Replayer,
    ) -> None:
        self._shadow = shadow
        self._plan_of = plan_of
        self._near = near
        self._far = far
        self._plan: ShadowPlan | None = None
        self._manifest: Manifest | None = None
        self._prepared: dict[Hashable, Any] = {}

    def prepare(self, manifest: Manifest) -> frozenset[str]:
        """See ``ReplayingLoader``; raises ``ShadowError``."""
        plan = self._shadow.lay_out(self._plan_of(manifest))
        if plan is not self._plan:
            self._prepared.clear()
        self._plan, self._manifest = plan, manifest
        return manifest.names

    def begin(self) -> None:
        """See ``Loader``."""

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See ``Loader``; never called: all names come by ``replay``."""
        raise ShadowError(f"tensor {tensors[0][0]!r} cannot be copied to where it waits")

    def replay(
        self, key: Hashable, pieces: Callable[[], Sequence[Piece]], *, on_device: bool
    ) -> None:
        """See ``ReplayingLoader``."""
        assert self._plan is not None  # noqa: S101 - prepare() was called
        replayer = self._near if on_device else self._far
        prepared = self._prepared.get(key) if key is not None else None
        if prepared is None:
            prepared = replayer.prepare(place(self._plan.inward, pieces()))
            if key is not None:
                if len(self._prepared) >= KEPT_SETS:
                    self._prepared.clear()
                self._prepared[key] = prepared
        replayer.run(prepared)

    def wait(self) -> None:
        """See ``ReplayingLoader``."""
        self._near.wait()
        self._far.wait()

    def finish(self) -> None:
        """See ``Loader``: it waits from now on."""
        self._shadow.held = self._manifest

    def flush(self) -> None:
        """See ``Loader``."""

    def summary(self) -> tuple[Path, str]:
        """See ``ReplayingLoader``."""
        return "staged", ""


KEPT_SETS = 4096
"""Sets of copies that are kept ready, one for a bucket."""

"""The replicas of one adapter, looked up when a call is made."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout_client.trainer.control import Control
from rollout_client.trainer.errors import Refused
from rollout_client.trainer.pod import PodControl
from rollout_client.trainer.targets import PodTarget, ReplicaTarget, SelectorTarget, Target

if TYPE_CHECKING:
    from rollout_client.kube import Kube
    from rollout_client.trainer.replica import ReplicaControl


class Fleet:
    """See ``ServerAdapter`` for the arguments.

    Raises:
        ValueError: no target, or one that is named twice.
    """

    def __init__(self, targets: Sequence[Target], *, manager: str, server: str | None) -> None:
        if not targets:
            raise ValueError("targets: name at least one, such as ReplicaTarget.here()")
        if len(set(targets)) != len(targets):
            raise ValueError("targets: one of them is named twice")
        self._targets = tuple(targets)
        self._manager, self._server = manager, server
        self._kube: Kube | None = None
        self._controls: dict[Target, Control] = {}

    async def controls(self) -> list[Control]:
        """All of them.

        Raises:
            AdapterError: the API server cannot be asked which there are, or a selector finds none.
        """
        found: dict[str, Control] = {}
        for target in self._targets:
            for control in await self._of(target):
                found.setdefault(control.name, control)
        return list(found.values())

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        for control in self._controls.values():
            await control.aclose()
        self._controls.clear()
        kube, self._kube = self._kube, None
        if kube is not None:
            await kube.aclose()

    async def _of(self, target: Target) -> list[Control]:
        if isinstance(target, SelectorTarget):
            return await self._selected(target)
        if target not in self._controls:
            if isinstance(target, PodTarget):
                self._controls[target] = PodControl(target)
            else:
                self._controls[target] = await self._replica(target)
        return [self._controls[target]]

    async def _replica(self, target: ReplicaTarget) -> "ReplicaControl":
        from rollout_client.trainer.replica import ReplicaControl  # the extra kube

        kube = await self._connected()
        return ReplicaControl(kube.replica(target.name, target.namespace), target.run_dir)

    async def _selected(self, target: SelectorTarget) -> list[Control]:
        from rollout_client.trainer.replica import translated

        kube = await self._connected()
        namespace = target.namespace or kube.api.namespace
        where = f"selector {target.selector!r}"
        listed = await translated(where, lambda: kube.api.list(namespace, selector=target.selector))
        names = [body["metadata"]["name"] for body in listed["items"]]
        if not names:
            raise Refused(f"{where} finds no RolloutReplica in namespace {namespace}", target=where)
        controls: list[Control] = []
        for name in names:
            controls += await self._of(ReplicaTarget(name=name, namespace=namespace))
        return controls

    async def _connected(self) -> "Kube":
        if self._kube is None:
            from rollout_client.kube import Kube
            from rollout_client.trainer.replica import translated

            self._kube = await translated(
                "the API server",
                lambda: Kube.connect(manager=self._manager, server=self._server),
            )
        return self._kube

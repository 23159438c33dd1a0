"""A RolloutReplica, steered by patching it (extra ``kube``)."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from rollout_client import kube
from rollout_client.trainer.control import Facts, asleep_text
from rollout_client.trainer.errors import (
    AdapterError,
    Asleep,
    Late,
    Refused,
    ReplicaGone,
    Superseded,
    Unreachable,
    UpdateFailed,
    WeightsUnavailable,
)
from rollout_client.trainer.push_socket import clear_caches
from rollout_client.trainer.wishes import Hold, Open, Pause, Release, TakeBack, Wish
from rollout_pod.protocol import StateDocument

T = TypeVar("T")

_FOREVER_S: Final = 86400.0
"""Whoever calls has a deadline of its own."""

_ERRORS: Final[Mapping[type[kube.KubeError], type[AdapterError]]] = {
    kube.Superseded: Superseded,
    kube.UpdateFailed: UpdateFailed,
    kube.WeightsUnavailable: WeightsUnavailable,
    kube.Stalled: Refused,
    kube.ReplicaGone: ReplicaGone,
    kube.WaitTimeout: Late,
}


class ReplicaControl:
    """See ``Control``.

    Args:
        replica: the object.
        run_dir: see ``ReplicaTarget``.
    """

    def __init__(self, replica: kube.Replica, run_dir: Path | None) -> None:
        self.name = f"{replica.namespace}/{replica.name}"
        self.run_dir = run_dir
        self.told = "its status was not seen"
        self._replica = replica

    async def aclose(self) -> None:
        """See ``Control``: the connections are everybody's."""

    async def facts(self) -> Facts:
        """See ``Control``."""
        body = await translated(self.name, self._replica.get)
        return facts_of(body.get("status") or {})

    async def check_update(self, wish: Hold) -> None:
        """See ``Control``."""
        body = await translated(self.name, self._replica.get)
        spec = body["spec"]
        if "weights" in ((spec.get("sleep") or {}).get("tags") or ()):
            raise Asleep(asleep_text(self.name), target=self.name)
        source = (spec.get("weights") or {}).get("source") or {}
        if wish.is_pushed and "push" not in source:
            raise Refused(
                f"{self.name}: spec.weights.source is {_named(source)}: set it to {{push: {{}}}} "
                "to have it take versions from a trainer, or hand over no weights",
                target=self.name,
            )
        if not wish.is_pushed and "push" in source:
            raise Refused(
                f"{self.name}: spec.weights.source is push: hand over the weights, or set a path "
                "or URL to have them fetched",
                target=self.name,
            )

    async def wish(self, wish: Wish) -> "ReplicaFollowing":
        """See ``Control``."""
        return ReplicaFollowing(self, await translated(self.name, lambda: self._patch(wish)))

    def has_forgotten(self, state: StateDocument) -> bool:
        """See ``Control``: its operator remembers."""
        return False

    async def clear_caches(self, timeout_s: float) -> Facts:
        """See ``Control``: no field of a RolloutReplica asks for it, its pod does."""
        if self.run_dir is None:
            raise Refused(
                f"{self.name}: only who shares its pod's run folder (run_dir) can ask for this; "
                "every update, and every release of the KV cache, clears all caches by itself",
                target=self.name,
            )
        await clear_caches(self.name, self.run_dir, timeout_s)
        return await self.facts()

    async def _patch(self, wish: Wish) -> kube.Change:
        match wish:
            case Pause():
                return await self._replica.pause()
            case Open():
                return await self._replica.resume()
            case Release(sleep):
                return await self._replica.sleep(sleep)
            case TakeBack(tags):
                return await self._replica.wake(tags)
            case Hold(version, step):
                return await self._replica.set_weight_version(version, step=step)


class ReplicaFollowing:
    """See ``Following``."""

    def __init__(self, control: ReplicaControl, change: kube.Change) -> None:
        self._control, self._change = control, change

    async def reached(self) -> Facts:
        """See ``Following``."""

        def tell(line: str, status: Mapping[str, Any]) -> None:
            self._control.told = line

        status = await translated(
            self._control.name, lambda: self._change.wait(_FOREVER_S, on_progress=tell)
        )
        return facts_of(status)


async def translated(name: str, call: Callable[[], Awaitable[T]]) -> T:
    """What the API server says as the adapter's errors.

    Raises:
        AdapterError: of the replica ``name``.
    """
    try:
        return await call()
    except kube.KubeError as error:
        # of two that fit, the first is the more special one
        fitting = [ours for theirs, ours in _ERRORS.items() if isinstance(error, theirs)]
        kind = fitting[0] if fitting else _of_api(error)
        raise kind(f"{name}: {error}", target=name) from error


def _named(source: Mapping[str, Any]) -> str:
    return ", ".join(key for key in source if key != "secretRef") or "not set"


def _of_api(error: kube.KubeError) -> type[AdapterError]:
    is_refusal = isinstance(error, kube.ApiError) and not error.is_passing
    return Refused if is_refusal else Unreachable


def facts_of(status: Mapping[str, Any]) -> Facts:
    """The few that every kind of target has."""
    return Facts(
        phase=str(status.get("phase") or ""), weight_version=status.get("weightVersion") or None
    )

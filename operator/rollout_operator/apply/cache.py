"""The newest object that a watch, a read or an own write has shown, by name."""

from collections.abc import Callable
from typing import Final

from rollout_operator.api.replica import slim_managed_fields
from rollout_operator.apply.kube import JsonObject, Kube
from rollout_pod.protocol import DESIRED_ANNOTATION

_REMEMBERED: Final = 4096
_BIG: Final = ("containers", "initContainers", "ephemeralContainers", "volumes", "tolerations")

Key = tuple[str, str]
"""Namespace and name."""


class Cache:
    """Objects of one kind. Late news never replaces newer news."""

    def __init__(self, *, slim: Callable[[JsonObject], None] = lambda _: None) -> None:
        self._objects: dict[Key, JsonObject] = {}
        self._slim = slim
        self._gone: dict[str, JsonObject] = {}
        """Metadata, by uid, of what was dropped last: a late list must not bring it back."""

    def get(self, key: Key) -> JsonObject | None:
        """Return the newest known object."""
        return self._objects.get(key)

    def keys(self) -> list[Key]:
        """Return the names of all known objects."""
        return list(self._objects)

    def put(self, raw: JsonObject) -> bool:
        """Remember ``raw`` unless something as new is known; tell whether it was news."""
        meta = raw["metadata"]
        key = (meta["namespace"], meta["name"])
        known = self._objects.get(key)
        last = known["metadata"] if known is not None else self._gone.get(meta["uid"])
        if last is not None and not _newer(meta, last):
            return False
        owners = slim_managed_fields(meta.pop("managedFields", None))
        if owners:
            meta["managedFields"] = owners
        self._slim(raw)
        self._objects[key] = raw
        return True

    def drop(self, key: Key, *, last: JsonObject | None = None) -> bool:
        """Forget the object (``last``: that incarnation, as it was in the end); was it known?"""
        known = self._objects.get(key)
        if known is None or (last and known["metadata"]["uid"] != last["metadata"]["uid"]):
            return False
        del self._objects[key]
        meta = (last or known)["metadata"]
        self._gone[meta["uid"]] = {"resourceVersion": meta.get("resourceVersion", "")}
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        return True


def slim_pod(raw: JsonObject) -> None:
    """Take off a pod what nobody reads: that is most of it."""
    for name in _BIG:
        (raw.get("spec") or {}).pop(name, None)
    (raw["metadata"].get("annotations") or {}).pop(DESIRED_ANNOTATION, None)


def _newer(meta: JsonObject, known: JsonObject) -> bool:
    # Kubernetes lets clients order the resource versions of one resource as numbers
    new, old = meta.get("resourceVersion", ""), known.get("resourceVersion", "")
    if new.isdecimal() and old.isdecimal():
        return int(new) > int(old)
    return bool(new != old)


async def reread(kube: Kube, cache: Cache, resource: str, key: Key) -> JsonObject | None:
    """Return an object from the API server itself, and remember what was found.

    Raises:
        KubeError: the API server did not answer: the cache stays as it was.
    """
    raw = await kube.get(resource, *key)
    known = cache.get(key)
    if known is not None and (raw is None or raw["metadata"]["uid"] != known["metadata"]["uid"]):
        cache.drop(key)
    if raw is not None:
        cache.put(raw)
    return raw

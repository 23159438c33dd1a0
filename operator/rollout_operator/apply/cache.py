"""The newest object that a watch, a read or an own write has shown, by name."""

from rollout_operator.api.replica import slim_managed_fields
from rollout_operator.apply.kube import JsonObject, Kube

Key = tuple[str, str]
"""Namespace and name."""


class Cache:
    """Objects of one kind. Late news never replaces newer news."""

    def __init__(self) -> None:
        self._objects: dict[Key, JsonObject] = {}

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
        if known is not None and not _newer(meta, known["metadata"]):
            return False
        owners = slim_managed_fields(meta.pop("managedFields", None))
        if owners:
            meta["managedFields"] = owners
        self._objects[key] = raw
        return True

    def drop(self, key: Key, *, uid: str | None = None) -> bool:
        """Forget the object (with ``uid``: only that incarnation); tell whether it was known."""
        known = self._objects.get(key)
        if known is None or (uid is not None and known["metadata"]["uid"] != uid):
            return False
        del self._objects[key]
        return True


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

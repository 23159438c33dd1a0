"""The newest object that a watch, a read or an own write has shown, by name."""

import json
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

from rollout_operator.api.replica import slim_managed_fields
from rollout_operator.apply.kube import JsonObject, Kube
from rollout_pod.protocol import DESIRED_ANNOTATION

_REMEMBERED: Final = 4096
_READ: Final = {
    "": ("metadata", "spec", "status"),
    "metadata": (
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "labels",
        "annotations",
        "ownerReferences",
        "creationTimestamp",
        "deletionTimestamp",
    ),
    "spec": ("nodeName", "restartPolicy"),
    "status": (
        "phase",
        "reason",
        "message",
        "podIP",
        "conditions",
        "containerStatuses",
        "initContainerStatuses",
    ),
}
"""What ``plan.observed.pod_seen``, the hub and the lists read of a pod, by part."""
_READ_OF_CONTAINER: Final = ("name", "state", "lastState", "restartCount", "started")

Key = tuple[str, str]
"""Namespace and name."""


class _Kept(NamedTuple):
    """An object as JSON, compressed: parsed, it would take fifty times as much."""

    uid: str
    version: str
    packed: bytes


class Cache:
    """Objects of one kind. Late news never replaces newer news."""

    def __init__(self, *, slim: Callable[[JsonObject], None] = lambda _: None) -> None:
        self._objects: dict[Key, _Kept] = {}
        self._slim = slim
        self._example = b""
        """The first object's text: what others have in common with it, they do not hold again."""
        self._gone: dict[str, str] = {}
        """By uid, the last version of what was dropped: a late list must not bring it back."""

    def get(self, key: Key) -> JsonObject | None:
        """Return the newest known object, as a copy of the caller's own."""
        kept = self._objects.get(key)
        if kept is None:
            return None
        raw: JsonObject = json.loads(self._unpacked(kept.packed))
        return raw

    def __contains__(self, key: Key) -> bool:
        return key in self._objects

    def keys(self) -> list[Key]:
        """Return the names of all known objects."""
        return list(self._objects)

    def put(self, raw: JsonObject, *, exists: bool = False) -> bool:
        """Remember ``raw`` unless something as new is known; tell whether it was news.

        ``exists``: it was read by name. An object that has left a watch's selector is dropped at
        the very version that a read of it shows; of one that was deleted no read shows that one.
        """
        meta = raw["metadata"]
        key, uid, version = _key(meta), meta["uid"], meta.get("resourceVersion", "")
        known = self._objects.get(key)
        last = known.version if known is not None else self._gone.get(uid)
        back = exists and known is None and version == last
        if last is not None and not _newer(version, last) and not back:
            return False
        owners = slim_managed_fields(meta.pop("managedFields", None))
        if owners:
            meta["managedFields"] = owners
        self._slim(raw)
        text = json.dumps(raw, separators=(",", ":")).encode()
        self._objects[key] = _Kept(uid, version, self._packed(text))
        return True

    def drop(self, key: Key, *, last: JsonObject | None = None) -> bool:
        """Forget the object (``last``: that incarnation, as it was in the end); was it known?"""
        known = self._objects.get(key)
        if known is None or (last and known.uid != last["metadata"]["uid"]):
            return False
        del self._objects[key]
        version = last["metadata"].get("resourceVersion", "") if last else known.version
        self._gone[known.uid] = version
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        return True

    def uid(self, key: Key) -> str:
        """Return the known object's uid; empty if none is known."""
        kept = self._objects.get(key)
        return kept.uid if kept else ""

    def _packed(self, text: bytes) -> bytes:
        # 10 microseconds, and 3 to unpack
        self._example = self._example or text
        packer = zlib.compressobj(level=1, zdict=self._example)
        return packer.compress(text) + packer.flush()

    def _unpacked(self, packed: bytes) -> bytes:
        return zlib.decompressobj(zdict=self._example).decompress(packed)


def slim_pod(raw: JsonObject) -> None:
    """Take off a pod what nobody reads: that is most of it."""
    for part, read in _READ.items():
        _only(raw.get(part) or {} if part else raw, read)
    (raw["metadata"].get("annotations") or {}).pop(DESIRED_ANNOTATION, None)
    status = raw.get("status") or {}
    for kind in ("containerStatuses", "initContainerStatuses"):
        for container in status.get(kind) or ():
            _only(container, _READ_OF_CONTAINER)


def _only(part: JsonObject, read: tuple[str, ...]) -> None:
    for name in part.keys() - read:
        del part[name]


def _key(meta: JsonObject) -> Key:
    return meta["namespace"], meta["name"]


def _newer(new: str, old: str) -> bool:
    # Kubernetes lets clients order the resource versions of one resource as numbers
    if new.isdecimal() and old.isdecimal():
        return int(new) > int(old)
    return new != old


async def reread(kube: Kube, cache: Cache, resource: str, key: Key) -> JsonObject | None:
    """Return an object from the API server itself, and remember what was found.

    Raises:
        KubeError: the API server did not answer: the cache stays as it was.
    """
    raw = await kube.get(resource, *key)
    if key in cache and (raw is None or raw["metadata"]["uid"] != cache.uid(key)):
        cache.drop(key)
    if raw is not None:
        cache.put(raw, exists=True)
    return raw

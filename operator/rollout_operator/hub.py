"""Turns watch events into wake-ups. Knows no Kopf, decides nothing."""

from collections.abc import Mapping
from typing import Any

from rollout_operator.api import names
from rollout_operator.apply.cache import Cache, Key
from rollout_operator.observe import Caches
from rollout_operator.workers import Workers

Event = Mapping[str, Any]


class Hub:
    """Feeds the caches and wakes the replica that an object belongs to."""

    def __init__(self, caches: Caches, workers: Workers) -> None:
        self._caches = caches
        self._workers = workers

    def all(self) -> None:
        """Wake every replica that the watches have shown: this operator may work from now on."""
        for key in self._caches.replicas.keys():  # noqa: SIM118 - a Cache is no mapping
            self._workers.wake(key)

    def replica(self, event: Event) -> None:
        """A RolloutReplica was listed, made, changed or removed."""
        key = _key(event["object"])
        # our own status writes are known already: no news
        if _news(self._caches.replicas, event) or not self._workers.knows(key):
            self._workers.wake(key)

    def pod(self, event: Event) -> None:
        """A pod with our label was listed, made, changed or removed."""
        self._child(self._caches.pods, event)

    def service(self, event: Event) -> None:
        """A Service with our label was listed, made, changed or removed."""
        self._child(self._caches.services, event)

    def _child(self, cache: Cache, event: Event) -> None:
        raw = event["object"]
        owner = _owner(raw)
        if owner is None:
            return
        # of a replica that is not ours nothing is kept: another operator serves it
        ours = owner in self._caches.replicas or _key(raw) in cache
        if ours and _news(cache, event) and self._workers.knows(owner):
            self._workers.wake(owner)


def _key(raw: Mapping[str, Any]) -> Key:
    return raw["metadata"]["namespace"], raw["metadata"]["name"]


def _owner(raw: Mapping[str, Any]) -> Key | None:
    name = (raw["metadata"].get("labels") or {}).get(names.REPLICA_LABEL)
    return (raw["metadata"]["namespace"], name) if name else None


def _news(cache: Cache, event: Event) -> bool:
    raw = event["object"]
    if event["type"] == "DELETED":
        return cache.drop(_key(raw), last=dict(raw))
    return cache.put(dict(raw))

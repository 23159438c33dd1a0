"""The same for programs without an event loop."""

import atexit
import threading
from collections.abc import Collection, Mapping
from typing import Any

from rollout_client.kube import replicas
from rollout_client.kube.api import Object
from rollout_client.sync import LoopThread, Synchronous
from rollout_pod.protocol import SleepSpec, SleepTag


class SyncChange:
    """See ``Change``."""

    def __init__(self, thread: LoopThread, change: replicas.Change) -> None:
        self._thread, self._change = thread, change

    def wait(
        self, timeout: float = 600.0, *, on_progress: replicas.OnProgress | None = None
    ) -> Object:
        """See ``Change.wait``."""
        return self._thread.run(self._change.wait(timeout, on_progress=on_progress))


class SyncReplica:
    """See ``Replica``."""

    def __init__(self, thread: LoopThread, replica: replicas.Replica) -> None:
        self._thread, self._replica = thread, replica

    def get(self) -> Object:
        """See ``Replica.get``."""
        return self._thread.run(self._replica.get())

    def pause(self) -> SyncChange:
        """See ``Replica.pause``."""
        return SyncChange(self._thread, self._thread.run(self._replica.pause()))

    def resume(self) -> SyncChange:
        """See ``Replica.resume``."""
        return SyncChange(self._thread, self._thread.run(self._replica.resume()))

    def set_weight_version(self, version: str | None, *, step: int | None = None) -> SyncChange:
        """See ``Replica.set_weight_version``."""
        change = self._thread.run(self._replica.set_weight_version(version, step=step))
        return SyncChange(self._thread, change)

    def sleep(self, sleep: SleepSpec) -> SyncChange:
        """See ``Replica.sleep``."""
        return SyncChange(self._thread, self._thread.run(self._replica.sleep(sleep)))

    def wake(self, tags: Collection[SleepTag] = tuple(SleepTag)) -> SyncChange:
        """See ``Replica.wake``."""
        return SyncChange(self._thread, self._thread.run(self._replica.wake(tags)))

    def delete(self) -> SyncChange:
        """See ``Replica.delete``."""
        return SyncChange(self._thread, self._thread.run(self._replica.delete()))


class SyncKube(Synchronous[replicas.Kube]):
    """See ``Kube``; takes the arguments of ``Kube.connect``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("rollout-kube", replicas.Kube.connect(**settings))

    @property
    def namespace(self) -> str:
        """Where none is named."""
        return self._client.api.namespace

    def replica(self, name: str, namespace: str | None = None) -> SyncReplica:
        """See ``Kube.replica``."""
        return SyncReplica(self._thread, self._client.replica(name, namespace))

    def list(self, namespace: str | None = None) -> list[Object]:
        """All replicas of a namespace."""
        found = self._thread.run(self._client.api.list(namespace or self.namespace))
        return list(found["items"])

    def apply(self, manifest: Mapping[str, Any]) -> SyncChange:
        """See ``Kube.apply``."""
        return SyncChange(self._thread, self._thread.run(self._client.apply(manifest)))


_lock = threading.Lock()
_shared: SyncKube | None = None


def _kube() -> SyncKube:
    global _shared
    with _lock:
        if _shared is None:
            _shared = SyncKube()
            atexit.register(_shared.close)
        return _shared


def replica(name: str, namespace: str | None = None) -> SyncReplica:
    """One replica, over a connection that all calls share; ``SyncKube`` for one of your own."""
    return _kube().replica(name, namespace)


def apply(manifest: Mapping[str, Any]) -> SyncChange:
    """See ``Kube.apply``."""
    return _kube().apply(manifest)

"""The agent's memory: at most two versions, the committed one and the next."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from rollout_pod.weights.checkpoint import Fingerprint
from rollout_pod.weights.segment import RoomError, Segment, remove_stale
from rollout_pod.weights.spec import TensorSpec


@dataclass(frozen=True)
class SlotKey:
    """What makes two slots hold the same bytes."""

    version: str
    path: str
    fingerprint: Fingerprint


@dataclass
class Slot:
    """One version in one segment."""

    key: SlotKey
    segment: Segment
    ready: bool = False
    """All bytes are there."""
    tensors: tuple[TensorSpec, ...] = ()
    """What it holds, in the order of the layout."""
    done: set[int] = field(default_factory=set)
    """Pieces that are there while not all are: a later read goes on from them."""


class Slots:
    """Not thread-safe: one stage at a time.

    Args:
        shm_dir: where segments are made.
        prefix: of their names; whatever bears it at the start is a dead agent's and is removed.
        host_memory: bytes that all segments together may take.
    """

    def __init__(self, shm_dir: Path, prefix: str, host_memory: int) -> None:
        self._shm_dir = shm_dir
        self._prefix = prefix
        self._host_memory = host_memory
        self._slots: list[Slot] = []
        self._committed: Slot | None = None
        self.stale = remove_stale(shm_dir, prefix)

    @property
    def committed(self) -> Slot | None:
        """The slot that the ranks hold now, as far as this process was told."""
        return self._committed

    @property
    def all(self) -> tuple[Slot, ...]:
        """All slots."""
        return tuple(self._slots)

    @property
    def used(self) -> int:
        """Bytes of all segments."""
        return sum(slot.segment.size for slot in self._slots)

    @property
    def probe(self) -> Segment | None:
        """Some segment that holds a version, if there is one."""
        return next((slot.segment for slot in self._slots if slot.ready), None)

    def obtain(self, key: SlotKey, nbytes: int) -> Slot:
        """The slot that holds ``key``, or a part of it, already, or an empty one of at least
        ``nbytes``. Whatever is neither this nor committed is given up; its memory is used again if
        it is large enough.

        Raises:
            RoomError: the limit or the file system does not allow it.
        """
        for slot in self._slots:
            if slot.key == key and (slot.ready or slot.done):
                return slot
        spare: Segment | None = None
        for slot in [slot for slot in self._slots if slot is not self._committed]:
            self._slots.remove(slot)
            if spare is None and slot.segment.size >= nbytes:
                spare = slot.segment
            else:
                slot.segment.close()
        if spare is None:
            self._check(key, nbytes)
            name = f"{self._prefix}{secrets.token_hex(8)}"
            spare = Segment.create(self._shm_dir, name, nbytes)
        slot = Slot(key, spare)
        self._slots.append(slot)
        return slot

    def held(self, version: str, path: str) -> Slot | None:
        """The committed slot if it holds this version."""
        slot = self._committed
        if slot is None or (slot.key.version, slot.key.path) != (version, path):
            return None
        return slot

    def commit(self, slot: Slot) -> None:
        """The ranks hold this one now."""
        if slot in self._slots:
            self._committed = slot

    def drop(self, slot: Slot) -> None:
        """Give up a slot, unless it is the committed one."""
        if slot is not self._committed and slot in self._slots:
            self._slots.remove(slot)
            slot.segment.close()

    def withdraw(self, slot: Slot) -> None:
        """Give up a slot that was never ready and into which a thread that hangs may still read."""
        if not slot.ready and slot in self._slots:
            self._slots.remove(slot)
            slot.segment.withdraw()

    def close(self) -> None:
        """Remove all segments."""
        for slot in self._slots:
            slot.segment.close()
        self._slots.clear()
        self._committed = None

    def _check(self, key: SlotKey, nbytes: int) -> None:
        if self.used + nbytes <= self._host_memory:
            return
        held = self._committed
        kept = f", {held.segment.size} hold {held.key.version!r} (committed)" if held else ""
        least = self.used + nbytes
        raise RoomError(
            f"version {key.version!r} needs {nbytes} bytes of shared memory: the limit is "
            f"{self._host_memory}{kept}; give the agent at least {least} (spec.weights.hostMemory, "
            "--host-memory): room for two versions",
            retryable=False,
        )

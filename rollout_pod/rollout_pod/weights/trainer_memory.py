"""A trainer's memory that the ranks read: the token, two buckets, counters; made when needed, kept
over many updates.
"""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rollout_pod.weights import wire
from rollout_pod.weights.device import Device, DeviceError
from rollout_pod.weights.direct import Exports
from rollout_pod.weights.fill import DeviceRing, Ring, SegmentRing
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.progress import OwnCounters
from rollout_pod.weights.sender import TOKEN_BYTES, Session

_PROBE_BYTES: Final = 256


class TrainerMemory:
    """Not thread-safe.

    Args:
        shm_dir: memory that is shared with the ranks.
        device: the GPU; None if tensors are on the host.
        bucket_bytes: the size of a bucket.
        world: how many ranks there are in all.
    """

    def __init__(self, shm_dir: Path, device: Device | None, bucket_bytes: int, world: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.ring: Ring | None = None
        """Of the last update that went through buckets."""
        self._shm_dir = shm_dir
        self._device = device
        self._world = world
        self._old: list[Ring] = []
        self._probe = self._probe_offset = 0
        self._probe_region: tuple[str, bytes, int] = ("", b"", 0)
        self._token = b""
        self._counters: OwnCounters | None = None
        self._uncountable = ""

    def token(self) -> tuple[wire.DeviceProbe, bytes] | None:
        """A token in the GPU's memory, and where it is; None without a GPU."""
        device = self._device
        if device is None:
            return None
        if not self._probe:
            # written once, before any other process knows of it: a write waits for the GPU
            token = secrets.token_bytes(TOKEN_BYTES)
            address = device.allocate(_PROBE_BYTES)
            try:
                found = device.export(address)
                device.write(address, token)
            except DeviceError:
                device.free(address)
                raise
            self._probe_region = (f"probe-{secrets.token_hex(8)}", found.handle, found.nbytes)
            self._probe, self._probe_offset = address, address - found.address
            self._token = token
        where = wire.DeviceProbe(
            gpu_uuid=device.uuid, handle=self._probe_region[1], offset=self._probe_offset
        )
        return where, self._token

    def map(
        self, link: Session, manifest: Manifest, direct: Exports | None, deadline: float
    ) -> str:
        """Have the memory of an update, and have it mapped, unless it is already. Returns why
        filling and copying are not as fast as they could be.

        Raises:
            RanksError: a rank cannot map it.
            RoomError: not enough shared memory for two buckets.
            DeviceError: not enough GPU memory for them.
        """
        counted: DeviceRing | None = None
        regions: list[tuple[str, bytes, int]] = []
        segments: list[str] = []
        if link.transport == "cuda_ipc":
            regions.append(self._probe_region)
        if direct is not None:
            self._drop_ring()
            regions += direct.regions
        else:
            ring = self._obtain_ring(link, manifest)
            if isinstance(ring, DeviceRing):
                regions.append((ring.name, ring.exported.handle, ring.exported.nbytes))
                counted = ring
            else:
                segments.append(ring.name)
        counters = self._count(link, regions) if counted is not None else None
        name = counters.name if counters is not None else None
        link.map(deadline - time.monotonic(), device=regions, segments=segments, counters=name)
        self._free_old()
        if counted is None:
            return link.unpinned
        why = link.uncounted if counters is not None else self._uncountable
        counted.counters = None if why else counters
        if counters is not None:
            counters.hide()
        return f"each side waits for its own copies: {why}" if why else ""

    def _count(
        self, link: Session, regions: Sequence[tuple[str, bytes, int]]
    ) -> OwnCounters | None:
        """A page of counters: the one that the ranks have, or a new one."""
        have = self._counters
        if have is not None and link.maps(device=regions, counters=have.name):
            return have
        self._drop_counters()
        if self._device is not None and not self._uncountable:
            try:
                self._counters = OwnCounters(self._shm_dir, link.prefix, self._device, self._world)
            except DeviceError as error:
                self._uncountable = str(error)
        return self._counters

    def _drop_counters(self) -> None:
        counters, self._counters = self._counters, None
        if self.ring is not None:
            self.ring.counters = None
        if counters is not None:
            if self._device is not None:
                self._device.synchronize()  # a count may be queued
            counters.close()

    def _obtain_ring(self, link: Session, manifest: Manifest) -> Ring:
        plan = manifest.plan(self.bucket_bytes)
        longest = max((bucket.length for bucket in plan.buckets), default=0)
        on_device = link.transport == "cuda_ipc"
        ring = self.ring
        if ring is not None and ring.size >= longest and isinstance(ring, DeviceRing) == on_device:
            return ring
        self._drop_ring()
        if on_device and self._device is not None:
            self.ring = DeviceRing(self._device, "ring-", longest)
        else:
            self.ring = SegmentRing(self._shm_dir, link.prefix, longest, self._device)
        return self.ring

    def _drop_ring(self) -> None:
        """Its memory is kept until no rank has it mapped."""
        if self.ring is not None:
            self._old.append(self.ring)
            self.ring = None

    def _free_old(self) -> None:
        while self._old:
            self._old.pop().close()

    def settle(self) -> None:
        """What queued copies read must not go before them: wait for their end."""
        if self.ring is not None:
            self.ring.wait()

    def close(self) -> None:
        """Give it all back; the ranks must have unmapped it. Idempotent."""
        self._drop_ring()
        self._free_old()
        self._drop_counters()
        if self._probe and self._device is not None:
            self._device.free(self._probe)
            self._probe = 0

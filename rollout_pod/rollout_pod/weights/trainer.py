"""A trainer's end of the weight protocol, kept over many updates.

What is made once (connections, handles, pinned memory, what the ranks know of manifest and
tensors) makes the second update as fast as its bytes can be moved.
"""

import asyncio
import contextlib
import functools
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch

from rollout_pod.weights import wire
from rollout_pod.weights.device import Device, DeviceError, NotExportableError
from rollout_pod.weights.direct import Exports, MovedError
from rollout_pod.weights.fill import (
    DeviceRing,
    Filler,
    Ring,
    SegmentRing,
    SourceChangedError,
    fits,
    spec_of,
)
from rollout_pod.weights.hashes import hashed
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.progress import OwnCounters
from rollout_pod.weights.push import stream
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.sender import TOKEN_BYTES, Meanwhile, RanksError, Session, TransferFailed

Transport = Literal["auto", "shared_memory", "cuda_ipc"]
Mode = Literal["auto", "bucketed", "direct"]
Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

UNHASHED: Final = "hashes are compared in buckets only"

_PROBE_BYTES: Final = 256


@dataclass(frozen=True)
class SentWeights:
    """An update that every rank has loaded.

    ``reason`` says why transport and mode are not the fastest ones; ``seconds`` by step.
    """

    session: str
    version: str
    transport: wire.Transport
    mode: Literal["bucketed", "direct"]
    reason: str
    bytes: int
    tensors: int
    seconds: Mapping[str, float]
    reports: tuple[LoadReport, ...] = field(repr=False)


class WeightSender:
    """Sends versions to the ranks of an engine, one after the other. One update at a time.

    Args:
        paths: the ranks' sockets; all of the engine's, by global rank, or those of ``ranks``.
        shm_dir: memory that is shared with the ranks.
        transport: ``auto`` picks; a named one that does not work is an error.
        mode: ``direct`` lets the ranks read the tensors where they are (a mapping of contiguous
            tensors on the ranks' GPU); ``bucketed`` passes them through two buckets; ``auto``
            picks. ``direct`` is an error where it is not possible.
        bucket_bytes: the size of a bucket; there are two.
        device: the GPU of the tensors; None if they are on the host.
        ranks: see ``sender.Session``.
        world: see ``sender.Session``.
        hashes: let the ranks compare every tensor's bytes with a hash that is sent before. Tensors
            must be a mapping, or come with a manifest that has hashes. Not with mode ``direct``.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        shm_dir: Path = Path("/dev/shm"),
        transport: Transport = "auto",
        mode: Mode = "auto",
        bucket_bytes: int = 256 << 20,
        device: Device | None = None,
        ranks: Sequence[int] | None = None,
        world: int = 0,
        hashes: bool = False,
    ) -> None:
        if hashes and mode == "direct":
            raise ValueError(f"mode direct: {UNHASHED}")
        if transport == "cuda_ipc" and device is None:
            raise ValueError("transport cuda_ipc: name the GPU that the tensors are on (device)")
        if mode == "direct" and transport == "shared_memory":
            raise ValueError("mode direct: shared memory is filled bucket by bucket; use cuda_ipc")
        self.cancel = threading.Event()
        """When set, whatever waits raises; for good."""
        self._paths = paths
        self._shm_dir = shm_dir
        self._transport = transport
        self._mode = mode
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._ranks = ranks
        self._world = world
        self._hashes = hashes
        self._session: Session | None = None
        self._ring: Ring | None = None
        self._exports = Exports(device) if device is not None else None
        self._old: list[Ring] = []
        self._probe = self._probe_offset = 0
        self._probe_region: tuple[str, bytes, int] = ("", b"", 0)
        self._manifest: Manifest | None = None
        self._counters: OwnCounters | None = None
        self._uncountable = ""

    def send(
        self,
        version: str,
        tensors: Tensors,
        *,
        manifest: Manifest | None = None,
        session: str | None = None,
        timeout_s: float = 600.0,
        on_accepted: Callable[[str], None] | None = None,
    ) -> SentWeights:
        """Send a version and wait until every rank has loaded it. Blocks.

        Args:
            version: its name.
            tensors: a mapping, or pairs that come one after another (a generator is never asked
                for a tensor before there is room for it). They must not change meanwhile.
            manifest: what ``tensors`` consist of; not needed for a mapping, nor where the last
                version consisted of the same.
            session: unique among all of these ranks; None makes one.
            timeout_s: for all of it.
            on_accepted: called with the session once every rank has accepted the manifest: from
                now on the engine may be paused and told to load it.

        Raises:
            SessionError: see its kinds; the ranks were told to give up.
            RoomError: not enough shared memory for two buckets.
            DeviceError: not enough GPU memory for two buckets, or mode ``direct`` cannot be.
        """
        name = session or uuid.uuid4().hex
        started = time.monotonic()
        deadline = started + timeout_s
        steps: dict[str, float] = {}
        if self._device is not None:
            with _step(steps, "drain"):
                self._device.drain()
        try:
            look = _Look(version, tensors, manifest)
            link = self._greet(name, deadline, steps, look)
            self._look(look, link, steps)
            direct, shown = look.direct, look.shown
            assert shown is not None  # noqa: S101 - _look() sets it
            reason = "; ".join(text for text in (link.reason, look.why) if text)
            with _step(steps, "manifest"):
                link.offer(shown, deadline - time.monotonic())
            with _step(steps, "map"):
                slower = self._map(link, shown, direct, deadline)
                reason = "; ".join(text for text in (reason, slower) if text)
            if on_accepted is not None:
                with _step(steps, "accepted"):
                    on_accepted(name)
            with _step(steps, "transfer"):
                if direct is not None:
                    reports = self._direct(link, direct, deadline, steps)
                else:
                    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
                    assert self._ring is not None  # noqa: S101 - _map made it
                    filler = look.filler
                    if filler is not None and filler.counters is not self._ring.counters:
                        filler = None  # another page: nobody would hear of it
                    reports = stream(
                        link, pairs, shown, self._ring, self._bucket_bytes, deadline, steps, filler
                    )
        except BaseException as error:
            self._hang_up(f"{type(error).__name__}: {error}")
            if self._ring is not None:
                self._ring.wait()  # what queued copies read must not go before them
            raise
        steps["total"] = time.monotonic() - started
        return SentWeights(
            session=name, version=version, transport=link.transport,
            mode="bucketed" if direct is None else "direct", reason=reason, bytes=shown.nbytes,
            tensors=len(shown.tensors), seconds=steps, reports=reports,
        )  # fmt: skip

    async def send_async(
        self,
        version: str,
        tensors: Tensors,
        *,
        manifest: Manifest | None = None,
        session: str | None = None,
        timeout_s: float = 600.0,
        on_accepted: Callable[[str], None] | None = None,
    ) -> SentWeights:
        """``send`` on a thread, where ``tensors`` and ``on_accepted`` are called too."""
        return await asyncio.to_thread(
            self.send, version, tensors, manifest=manifest, session=session,
            timeout_s=timeout_s, on_accepted=on_accepted,
        )  # fmt: skip

    def close(self) -> None:
        """Let the ranks unmap everything, then give all memory back. Idempotent."""
        link = self._session
        if link is not None:
            try:
                self._greet(uuid.uuid4().hex, time.monotonic() + 2.0, {})
                link.map(2.0)
            except (RanksError, DeviceError):
                pass  # they are gone, or unmap it when they see that we are
        self._hang_up("the sender was closed")
        self._drop_ring()
        self._free_old()
        self._drop_counters()
        if self._exports is not None:
            self._exports.clear()
        if self._probe and self._device is not None:
            self._device.free(self._probe)
            self._probe = 0

    # --- the steps ---

    def _greet(
        self, session: str, deadline: float, steps: dict[str, float], look: "_Look | None" = None
    ) -> Session:
        meanwhile: Meanwhile | None = None
        known = self._session
        if known is not None and look is not None and isinstance(look.tensors, Mapping):
            # most likely it is the same transport again
            meanwhile = functools.partial(self._meanwhile, look, known, steps)
        with _step(steps, "hello"):
            if self._session is None:
                self._session = Session(
                    session, self._paths, self._shm_dir, self.cancel, ranks=self._ranks,
                    world=self._world,
                )  # fmt: skip
            else:
                self._session.renew(session)
            ring = self._ring
            self._session.greet(
                deadline - time.monotonic(),
                ring.segment if isinstance(ring, SegmentRing) else None,
                device=self._token() if self._transport != "shared_memory" else None,
                fallback=self._transport == "auto",
                meanwhile=meanwhile,
            )
        return self._session

    def _token(self) -> tuple[wire.DeviceProbe, bytes] | None:
        device = self._device
        if device is None:
            return None
        token = secrets.token_bytes(TOKEN_BYTES)
        if not self._probe:
            self._probe = device.allocate(_PROBE_BYTES)
            found = device.export(self._probe)
            self._probe_region = (f"probe-{secrets.token_hex(8)}", found.handle, found.nbytes)
            self._probe_offset = self._probe - found.address
        device.write(self._probe, token)
        where = wire.DeviceProbe(
            gpu_uuid=device.uuid, handle=self._probe_region[1], offset=self._probe_offset
        )
        return where, token

    def _meanwhile(
        self,
        look: "_Look",
        link: Session,
        steps: dict[str, float],
        show: Callable[[Manifest], None],
    ) -> None:
        """What can be done before the ranks have answered. They read nothing of the ring: they have
        loaded all of the last update, or the connection would not be the same.
        """
        shown = self._look(look, link, steps)
        show(shown)
        ring = self._ring
        if look.direct or not isinstance(ring, DeviceRing) or ring.counters is None:
            return
        buckets = shown.plan(self._bucket_bytes).buckets
        if isinstance(look.tensors, Mapping) and all(b.length <= ring.size for b in buckets):
            look.filler = Filler(look.tensors.items(), shown, ring)
            try:
                look.filler.ahead(buckets)
            except SourceChangedError as error:
                raise TransferFailed(str(error)) from error

    def _look(self, look: "_Look", link: Session, steps: dict[str, float]) -> Manifest:
        """Find out, once for a transport, in which mode an update goes, and what it consists of."""
        if look.shown is None or look.transport != link.transport:
            look.transport = link.transport
            with _step(steps, "look"):
                wants = self._hashes or bool(look.manifest and look.manifest.hashes)
                look.direct, look.why = self._pick(look.version, look.tensors, link, wants)
                if look.direct is not None and look.direct.manifest is not None:
                    look.shown = look.direct.manifest
                else:
                    look.shown = self._describe(look.version, look.tensors, look.manifest)
                self._manifest = look.shown
            if self._hashes and not look.shown.hashes:
                with _step(steps, "hash"):
                    look.shown = self._hashed(look.shown, look.tensors)
        return look.shown

    def _pick(
        self, version: str, tensors: Tensors, link: Session, hashes: bool
    ) -> tuple[Exports | None, str]:
        """The exports, if the mode is direct; else None, and why."""
        why = ""
        if self._mode == "bucketed":
            return None, ""
        if hashes and self._mode == "direct":
            raise NotExportableError(f"mode direct does not work: {UNHASHED}")
        if hashes:
            return None, f"bucketed: {UNHASHED}"
        if link.transport != "cuda_ipc" or self._exports is None:
            why = "" if link.reason else "the tensors are not on a GPU"
        elif not isinstance(tensors, Mapping):
            why = "tensors that come one after another cannot be read in place"
        else:
            try:
                self._exports.renew(version, tensors)
            except NotExportableError as error:
                why = str(error)
            else:
                return self._exports, ""
        if self._mode == "direct":
            raise NotExportableError(f"mode direct does not work: {why or link.reason}")
        return None, f"bucketed: {why}" if why else ""

    def _describe(self, version: str, tensors: Tensors, manifest: Manifest | None) -> Manifest:
        if manifest is not None:
            if manifest.version != version:
                raise TransferFailed(f"the manifest is of version {manifest.version!r}")
            return manifest
        if isinstance(tensors, Mapping):
            known = self._manifest
            if (
                known is not None
                and len(tensors) == len(known.tensors)
                and all(map(fits, known.tensors, tensors.keys(), tensors.values()))
            ):
                return known.renamed(version)
            specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
            return Manifest(version, specs)
        if self._manifest is None:
            raise TransferFailed("tensors that come one after another need a manifest")
        return self._manifest.renamed(version)

    def _hashed(self, manifest: Manifest, tensors: Tensors) -> Manifest:
        if not isinstance(tensors, Mapping):
            raise TransferFailed(
                "hashes are sent before the bytes: tensors that come one after another need a "
                "manifest that has them (hashes.hashed)"
            )
        return hashed(manifest, tensors)

    def _map(
        self, link: Session, manifest: Manifest, direct: Exports | None, deadline: float
    ) -> str:
        """Have the memory of this update, and have it mapped, unless it is already. Returns why
        filling and copying do not overlap as they could.
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
            return ""
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
            world = self._world or len(self._paths)
            try:
                self._counters = OwnCounters(self._shm_dir, link.prefix, self._device, world)
            except DeviceError as error:
                self._uncountable = str(error)
        return self._counters

    def _drop_counters(self) -> None:
        counters, self._counters = self._counters, None
        if counters is not None:
            if self._device is not None:
                self._device.synchronize()  # a count may be queued
            counters.close()

    def _obtain_ring(self, link: Session, manifest: Manifest) -> Ring:
        plan = manifest.plan(self._bucket_bytes)
        longest = max((bucket.length for bucket in plan.buckets), default=0)
        on_device = link.transport == "cuda_ipc"
        ring = self._ring
        if ring is not None and ring.size >= longest and isinstance(ring, DeviceRing) == on_device:
            return ring
        self._drop_ring()
        if on_device and self._device is not None:
            self._ring = DeviceRing(self._device, "ring-", longest)
        else:
            self._ring = SegmentRing(self._shm_dir, link.prefix, longest, self._device)
        return self._ring

    def _drop_ring(self) -> None:
        """Its memory is kept until no rank has it mapped."""
        if self._ring is not None:
            self._old.append(self._ring)
            self._ring = None

    def _free_old(self) -> None:
        while self._old:
            self._old.pop().close()

    def _direct(
        self, link: Session, exports: Exports, deadline: float, steps: dict[str, float]
    ) -> tuple[LoadReport, ...]:
        message = exports.message
        assert message is not None  # noqa: S101 - renew() made it
        known = exports.digest in link.holds
        with _step(steps, "look again"):  # while the ranks copy
            try:
                for first, count in exports.parts():
                    news: dict[str, object] = {
                        "session": link.session, "first": first, "count": count,
                    }  # fmt: skip
                    if known:
                        news |= {"regions": (), "places": (), "same": exports.digest}
                    link.direct(message.model_copy(update=news))
                    known = True
            except MovedError as error:
                raise TransferFailed(str(error)) from error
            changed = exports.altered()
        if changed:
            raise TransferFailed(changed)
        return link.finish(deadline)

    def _hang_up(self, reason: str) -> None:
        link, self._session = self._session, None
        if link is not None:
            link.abort(reason)
            link.close()


@dataclass
class _Look:
    """What an update was found to be."""

    version: str
    tensors: Tensors
    manifest: Manifest | None
    transport: wire.Transport | None = None
    """For which it was found."""
    direct: Exports | None = None
    """If the ranks read the tensors in place; else ``why`` not."""
    why: str = ""
    shown: Manifest | None = None
    filler: Filler | None = None
    """That fills the first buckets."""


@contextlib.contextmanager
def _step(steps: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        steps[name] = time.monotonic() - started

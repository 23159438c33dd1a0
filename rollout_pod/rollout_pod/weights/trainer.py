"""A trainer's end of the weight protocol, kept over many updates.

What is made once (connections, handles, pinned memory, what the ranks know of manifest and
tensors) makes the second update as fast as its bytes can be moved.
"""

import functools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollout_pod.weights import wire
from rollout_pod.weights.device import Device, DeviceError
from rollout_pod.weights.direct import Exports, MovedError
from rollout_pod.weights.fill import (
    DeviceRing,
    Filler,
    SegmentRing,
    SourceChangedError,
)
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.on_thread import on_thread
from rollout_pod.weights.push import stream
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.segment import RoomError
from rollout_pod.weights.sender import Meanwhile, Session, Show
from rollout_pod.weights.session_errors import RanksError, TransferFailed
from rollout_pod.weights.trainer_look import UNHASHED, Look, Looker, Mode, Tensors, step
from rollout_pod.weights.trainer_memory import TrainerMemory

__all__ = ["Mode", "SentWeights", "Tensors", "Transport", "WeightSender"]

Transport = Literal["auto", "shared_memory", "cuda_ipc"]


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


@dataclass(frozen=True)
class Agreed:
    """What sender and ranks agreed on before the first byte; see ``SentWeights``."""

    transport: wire.Transport
    mode: Literal["bucketed", "direct"]
    reason: str
    bytes: int
    tensors: int


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
        """While set, whatever waits raises."""
        self.accepted: Agreed | None = None
        """Of the send that is on, once every rank has accepted its manifest."""
        self._paths = paths
        self._shm_dir = shm_dir
        self._transport = transport
        self._device = device
        self._ranks = ranks
        self._world = world
        self._session: Session | None = None
        self._guard = threading.Lock()
        self._sending: threading.Event | None = None
        """Stops the send that is on; None where none is. Behind ``_guard``, as is what it does to
        ``cancel``."""
        self._looker = Looker(mode, hashes=hashes, device=device)
        self._memory = TrainerMemory(shm_dir, device, bucket_bytes, world or len(paths))

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
            DeviceError: not enough GPU memory for two buckets, or mode ``direct`` or a named
                transport cannot be.
            RuntimeError: another ``send`` of this sender is on.
        """
        return self._alone(
            threading.Event(), version, tensors, manifest, session, timeout_s, on_accepted
        )

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
        """``send`` on a thread, where ``tensors`` and ``on_accepted`` are called too. Cancelled, it
        gives the session up before it returns.
        """
        stop = threading.Event()

        def give_up() -> None:
            with self._guard:
                stop.set()
                if self._sending is stop:
                    self.cancel.set()

        return await on_thread(
            lambda: self._alone(stop, version, tensors, manifest, session, timeout_s, on_accepted),
            give_up,
        )

    def close(self) -> None:
        """Let the ranks unmap everything, then give all memory back. Idempotent.

        Raises:
            RuntimeError: a ``send`` is on, which reads that memory: cancel it, and close when it
                has ended.
        """
        with self._guard:
            if self._sending is not None:
                raise RuntimeError("this sender is sending: cancel that, and wait for its end")
        link = self._session
        try:
            if link is not None:
                self._greet(uuid.uuid4().hex, time.monotonic() + 2.0, {})
                link.map(2.0)
        except (RanksError, DeviceError, RoomError, OSError):
            pass  # they are gone, or unmap it when they see that we are
        finally:
            self._hang_up("the sender was closed")
            self._memory.close()
            self._looker.forget()

    # --- the steps ---

    def _alone(
        self,
        stop: threading.Event,
        version: str,
        tensors: Tensors,
        manifest: Manifest | None,
        session: str | None,
        timeout_s: float,
        on_accepted: Callable[[str], None] | None,
    ) -> SentWeights:
        with self._guard:
            if self._sending is not None:  # its sockets are for one thread
                raise RuntimeError(
                    "this sender is sending already: wait for that update, or cancel it"
                )
            self._sending = stop
            if stop.is_set():  # before this thread began
                self.cancel.set()
        try:
            return self._send(version, tensors, manifest, session, timeout_s, on_accepted)
        finally:
            with self._guard:
                self._sending = None
                if stop.is_set():
                    self.cancel.clear()  # it was for this one

    def _send(
        self,
        version: str,
        tensors: Tensors,
        manifest: Manifest | None,
        session: str | None,
        timeout_s: float,
        on_accepted: Callable[[str], None] | None,
    ) -> SentWeights:
        name = session or uuid.uuid4().hex
        started = time.monotonic()
        deadline = started + timeout_s
        steps: dict[str, float] = {}
        if self._device is not None:
            with step(steps, "drain"):
                self._device.drain()
        try:
            look = Look(version, tensors, manifest)
            link = self._greet(name, deadline, steps, look)
            self._looker.look(look, link, steps)
            direct, shown = look.direct, look.shown
            assert shown is not None  # noqa: S101 - look() sets it
            reason = "; ".join(text for text in (link.reason, look.why) if text)
            with step(steps, "manifest"):
                link.offer(shown, deadline - time.monotonic(), look.first)
            with step(steps, "map"):
                slower = self._memory.map(link, shown, direct, deadline)
                reason = "; ".join(text for text in (reason, slower) if text)
            mode: Literal["bucketed", "direct"] = "bucketed" if direct is None else "direct"
            self.accepted = Agreed(link.transport, mode, reason, shown.nbytes, len(shown.tensors))
            if on_accepted is not None:
                with step(steps, "accepted"):
                    on_accepted(name)
            with step(steps, "transfer"):
                if direct is not None:
                    reports = self._direct(link, direct, deadline, steps)
                else:
                    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
                    ring = self._memory.ring
                    assert ring is not None  # noqa: S101 - map() made it
                    filler = look.filler
                    if filler is not None and filler.counters is not ring.counters:
                        filler = None  # another page: nobody would hear of it
                    reports = stream(
                        link, pairs, shown, ring, self._memory.bucket_bytes, deadline, steps, filler
                    )
        except BaseException as error:
            self._hang_up(f"{type(error).__name__}: {error}")
            self._memory.settle()
            raise
        steps["total"] = time.monotonic() - started
        return SentWeights(
            session=name, version=version, transport=link.transport, mode=mode, reason=reason,
            bytes=shown.nbytes, tensors=len(shown.tensors), seconds=steps, reports=reports,
        )  # fmt: skip

    def _greet(
        self, session: str, deadline: float, steps: dict[str, float], look: Look | None = None
    ) -> Session:
        meanwhile: Meanwhile | None = None
        known = self._session
        if known is not None and look is not None and isinstance(look.tensors, Mapping):
            # most likely it is the same transport again
            meanwhile = functools.partial(self._meanwhile, look, known, steps)
        with step(steps, "hello"):
            if self._session is None:
                self._session = Session(
                    session, self._paths, self._shm_dir, self.cancel, ranks=self._ranks,
                    world=self._world,
                )  # fmt: skip
            else:
                self._session.renew(session)
            ring = self._memory.ring
            device, why = self._token()
            self._session.greet(
                deadline - time.monotonic(),
                ring.segment if isinstance(ring, SegmentRing) else None,
                device=device,
                fallback=self._transport == "auto",
                reason=why,
                meanwhile=meanwhile,
            )
        return self._session

    def _token(self) -> tuple[tuple[wire.DeviceProbe, bytes] | None, str]:
        """What CUDA IPC is asked for with; None where it is not, and why not where it might be."""
        if self._transport == "shared_memory":
            return None, ""
        try:
            return self._memory.token(), ""
        except DeviceError as error:
            if self._transport != "auto":
                raise
            return None, f"the sender's GPU shares no memory: {error}"

    def _meanwhile(
        self,
        look: Look,
        link: Session,
        steps: dict[str, float],
        show: Show,
    ) -> None:
        """What can be done before the ranks have answered. They read nothing of the ring: they have
        loaded all of the last update, or the connection would not be the same.
        """
        shown = self._looker.look(look, link, steps)
        show(shown, look.first)
        ring = self._memory.ring
        if look.direct or not isinstance(ring, DeviceRing) or ring.counters is None:
            return
        buckets = shown.plan(self._memory.bucket_bytes).buckets
        if isinstance(look.tensors, Mapping) and all(b.length <= ring.size for b in buckets):
            look.filler = Filler(look.tensors.items(), shown, ring)
            try:
                look.filler.ahead(buckets)
            except SourceChangedError as error:
                raise TransferFailed(str(error)) from error

    def _direct(
        self, link: Session, exports: Exports, deadline: float, steps: dict[str, float]
    ) -> tuple[LoadReport, ...]:
        message = exports.message
        assert message is not None  # noqa: S101 - renew() made it
        known = exports.digest in link.holds
        with step(steps, "look again"):  # while the ranks copy
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

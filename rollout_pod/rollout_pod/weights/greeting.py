"""What a rank knows beyond one session: its sender's memory, manifests and places."""

from collections import OrderedDict
from typing import Final, TypeVar

from rollout_pod.weights import wire
from rollout_pod.weights.buckets import BucketError
from rollout_pod.weights.device import DeviceError
from rollout_pod.weights.incoming import Incoming
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.memory import Memories
from rollout_pod.weights.segment import AttachError, attach

REMEMBERED: Final = 4
"""Manifests, and sets of places, that are kept."""

T = TypeVar("T")


class Greeter:
    """Of the talking thread only."""

    def __init__(self, *, rank: int, world: int, host: str, memories: Memories) -> None:
        self._rank = rank
        self._world = world
        self._host = host
        self._memories = memories
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._places: OrderedDict[str, wire.Direct] = OrderedDict()
        self._mapped: tuple[str, ...] = ()
        self.owner: bytes | None = None
        """The connection whose memory is mapped."""

    def refusal(self, hello: wire.Hello) -> wire.Refused | None:
        """Why a greeting is refused, whatever else goes on; None if it is not. Changes nothing."""
        if (hello.rank, hello.world) != (self._rank, self._world):
            text = (
                f"this is rank {self._rank} of {self._world}, the sender addresses rank "
                f"{hello.rank} of {hello.world}; it must address all ranks, in order"
            )
            return wire.Refused(session=hello.session, code="rank", message=text)
        problem = self._probe(hello)
        if problem:
            text = f"transport {hello.transport} does not work: {problem}"
            return wire.Refused(session=hello.session, code="transport", message=text)
        return None

    def welcome(self, peer: bytes, hello: wire.Hello) -> wire.Message:
        """Answer a greeting that is not refused; the memory of a sender before this one is
        unmapped, so no session of that one may be loading.
        """
        if self.owner is not None and self.owner != peer and not self.forget():
            text = "another sender's load is on; try again when it has ended"
            return wire.Refused(session=hello.session, code="busy", message=text)
        device = self._memories.device
        return wire.Welcome(
            session=hello.session, rank=self._rank, world=self._world, host=self._host,
            transport=hello.transport, gpu_uuid=device.uuid if device else "",
            holds=(*self._manifests, *self._places, *self._mapped),
        )  # fmt: skip

    def _probe(self, hello: wire.Hello) -> str:
        """Why the sender's memory cannot be seen; empty if it can."""
        if hello.transport == "shared_memory":
            if hello.probe is None:
                return "hello names no segment"
            try:
                found = attach(self._memories.shm_dir, hello.probe)
            except AttachError as error:
                return str(error)
            shared = found.map[: len(hello.token)] == hello.token
            found.close()
            where = f"{self._memories.shm_dir}/{hello.probe}"
            return "" if shared else f"{where} is not the sender's"
        if hello.device is None:
            return "hello names no memory of a GPU"
        device = self._memories.device
        if device is None:
            return f"rank {self._rank} has no GPU"
        if device.uuid != hello.device.gpu_uuid:
            return f"the sender is on {hello.device.gpu_uuid}, rank {self._rank} on {device.uuid}"
        try:
            seen = self._memories.probe(hello.device.handle, hello.device.offset, len(hello.token))
        except DeviceError as error:
            return (
                f"the sender's memory cannot be opened ({error}); two containers need one process "
                "namespace (shareProcessNamespace: true)"
            )
        return "" if seen == hello.token else "the memory that was opened is not the sender's"

    def map(self, session: Incoming, message: wire.Memory) -> wire.Message:
        """Map a sender's memory, and unmap what it does not name any more."""
        if session.phase not in ("greeted", "accepted"):
            text = f"memory: the session is {session.phase}"
            return wire.Refused(session=message.session, code="order", message=text)
        self.owner = session.peer
        if self._mapped != (message.digest,):
            self._places.clear()  # they are places in what was mapped before
        self._mapped = ()
        regions = {name: (handle, nbytes) for name, handle, nbytes in message.device}
        try:
            unpinned = self._memories.map(regions, set(message.segments))
            uncounted = self._memories.count(message.counters, self._rank)
        except (AttachError, DeviceError) as error:
            self._places.clear()
            return wire.Mapped(session=message.session, error=str(error) or repr(error))
        self._mapped = (message.digest,)
        return wire.Mapped(session=message.session, uncounted=uncounted, unpinned=unpinned)

    def places(self, message: wire.Direct) -> wire.Direct:
        """With its places, if it is sent in short.

        Raises:
            BucketError: those are not known here.
        """
        if not message.same:
            whole = message.model_copy(update={"same": message.digest})
            _remember(self._places, whole.same, whole)
            return whole
        known = self._places.get(message.same)
        if known is None:
            raise BucketError(f"direct: places {message.same!r} are not known here")
        return known.model_copy(update={"first": message.first, "count": message.count})

    def held_places(self, offer: wire.Offer) -> wire.Direct | None:
        """The places that come with a manifest; None if there are none, or they are not known."""
        known = self._places.get(offer.places)
        if known is None:
            return None
        return known.model_copy(update={"session": offer.session, "first": 0, "count": offer.count})

    def held(self, offer: wire.Offer) -> Manifest | None:
        """The manifest of an offer; None if it is sent in short and not known here."""
        if not offer.same:
            return offer.manifest()
        known = self._manifests.get(offer.same)
        return known.renamed(offer.version) if known is not None else None

    def hold(self, manifest: Manifest) -> None:
        """It was accepted: it may come in short from now on."""
        _remember(self._manifests, manifest.digest, manifest)

    def forget(self) -> bool:
        """The sender is gone, or replaced: unmap its memory. False if a load uses it now."""
        if not self._memories.forget():
            return False
        self._places.clear()
        self._mapped = ()
        self.owner = None
        return True


def _remember(known: "OrderedDict[str, T]", key: str, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > REMEMBERED:
        known.popitem(last=False)

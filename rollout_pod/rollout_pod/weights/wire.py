"""The control messages between a sender and the ranks, as msgpack maps.

Every message carries ``v``, the protocol version. Types are checked strictly and unknown fields
are refused: what differs between versions is what ``v`` is for.
"""

from collections.abc import Collection
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rollout_pod.weights.buckets import Bucket, Entry
from rollout_pod.weights.device import HANDLE_BYTES
from rollout_pod.weights.manifest import Manifest, digest_of
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.spec import TensorSpec

PROTOCOL: Final = 4

T = TypeVar("T")


class WireError(ValueError):
    """Bytes that are no message of this protocol version."""


class Message(BaseModel):
    """Base of all messages; ``kind`` tells them apart."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
SessionId = Annotated[str, Field(min_length=1, max_length=128)]
Version = Annotated[str, Field(min_length=1, max_length=253)]
SegmentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")]
Name = Annotated[str, Field(min_length=1, max_length=4096)]
Text = Annotated[str, Field(max_length=1 << 16)]
Transport = Literal["shared_memory", "cuda_ipc"]
Handle = Annotated[bytes, Field(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
Digest = Annotated[str, Field(max_length=64)]
Hash = Annotated[bytes, Field(min_length=8, max_length=8)]


class DeviceProbe(Message):
    """Where ``token`` lies in the sender's GPU memory: ``offset`` bytes into an allocation."""

    gpu_uuid: Text
    handle: Handle
    offset: Count


class Hello(Message):
    """Sender: who I think you are, how many ranks there are, and how bytes shall travel.

    Whoever reads ``token`` where it was put shares the memory: at the start of the segment
    ``probe``, or where ``device`` says.
    """

    kind: Literal["hello"] = "hello"
    session: SessionId
    rank: Count
    world: Count
    transport: Transport
    token: bytes
    probe: SegmentName | None = None
    device: DeviceProbe | None = None


class Welcome(Message):
    """Rank: the session is mine now; an older one that was not loading is over."""

    kind: Literal["welcome"] = "welcome"
    session: SessionId
    rank: Count
    world: Count
    host: Text
    transport: Transport
    gpu_uuid: Text = ""
    """Empty if the rank has no GPU."""
    holds: tuple[Digest, ...] = ()
    """Digests of manifests, of places, and of mapped memory, which need not be sent again."""


class Offer(Message):
    """Sender: the manifest. Tensors are ``(name, dtype, shape, nbytes)``."""

    kind: Literal["manifest"] = "manifest"
    session: SessionId
    version: Version
    tensors: tuple[tuple[Name, Name, tuple[Count, ...], Count], ...] = ()
    aliases: tuple[tuple[Name, Name], ...] = ()
    same: Digest = ""
    """Instead of both: the digest of a manifest that the rank holds."""
    hashes: tuple[Hash, ...] = ()
    """Of each tensor, if its bytes are to be compared; also beside ``same``."""
    places: Digest = ""
    """As a first ``Direct`` with ``same`` and ``count``; taken if the rank holds these places."""
    count: Count = 0

    @classmethod
    def of(
        cls,
        session: str,
        manifest: Manifest,
        *,
        held: Collection[str] = (),
        first: "Direct | None" = None,
    ) -> Self:
        """The manifest on the wire, in short if it is among those ``held``; with ``first``, if its
        places are among them, too.
        """
        if manifest.digest in held:
            places, count = "", 0
            if first is not None and first.count is not None and first.digest in held:
                places, count = first.digest, first.count
            return cls(
                session=session, version=manifest.version, same=manifest.digest,
                hashes=manifest.hashes, places=places, count=count,
            )  # fmt: skip
        return cls(
            session=session,
            version=manifest.version,
            tensors=tuple((t.name, t.dtype, t.shape, t.nbytes) for t in manifest.tensors),
            aliases=manifest.aliases,
            hashes=manifest.hashes,
        )

    def manifest(self) -> Manifest:
        """The manifest off the wire."""
        specs = tuple(TensorSpec(*tensor) for tensor in self.tensors)
        return Manifest(self.version, specs, self.aliases)


class Accepted(Message):
    """Rank: the manifest fits. ``placed``: and the places that came with it were taken."""

    kind: Literal["accepted"] = "accepted"
    session: SessionId
    placed: bool = False


class Rejected(Message):
    """Rank: why the manifest does not fit."""

    kind: Literal["rejected"] = "rejected"
    session: SessionId
    problems: tuple[Text, ...]


class Memory(Message):
    """Sender: map these; whatever of mine is not among them, unmap. For later updates too.

    Device memory is ``(name, handle, nbytes)``; shared memory goes by its segments' names, of which
    ``counters`` is a page as in ``progress``.
    """

    kind: Literal["memory"] = "memory"
    session: SessionId
    device: tuple[tuple[SegmentName, Handle, Count], ...] = ()
    segments: tuple[SegmentName, ...] = ()
    counters: SegmentName | None = None

    @property
    def digest(self) -> str:
        """Of all that is to be mapped."""
        return digest_of((self.device, self.segments, self.counters))


class Mapped(Message):
    """Rank: done; or why not. What only makes it slower: ``uncounted``, why it cannot count, and
    ``unpinned``, why segments are not pinned.
    """

    kind: Literal["mapped"] = "mapped"
    session: SessionId
    error: Text = ""
    uncounted: Text = ""
    unpinned: Text = ""


class Direct(Message):
    """Sender, instead of buckets: tensor i of the manifest lies ``places[i][1]`` bytes into
    ``regions[places[i][0]]``, and stays as it is until the report. ``generation`` counts how
    often the sender's tensors have moved. There may be several, each for the next tensors.
    """

    kind: Literal["direct"] = "direct"
    session: SessionId
    generation: Count
    regions: tuple[SegmentName, ...] = ()
    places: tuple[tuple[Count, Count], ...] = ()
    same: Digest = ""
    """Instead of both: the digest of places that the rank holds."""
    first: Count = 0
    """Of the manifest's tensors that may be read now; those before were in earlier messages."""
    count: Count | None = None
    """How many of them; None for all the rest."""

    @property
    def digest(self) -> str:
        """Of what is said about places; it stands for them in later updates."""
        if self.same:
            return self.same
        return digest_of((self.generation, self.regions, self.places))


class BucketReady(Message):
    """Sender: a bucket lies at ``base`` of ``segment``, as soon as the sender's counter has come to
    ``filled``. Entries as in ``buckets.Entry``.
    """

    kind: Literal["bucket"] = "bucket"
    session: SessionId
    seq: Count
    segment: SegmentName
    base: Count
    length: Count
    entries: tuple[tuple[Count, Count, Count, Count], ...]
    filled: Count = 0

    @classmethod
    def of(cls, session: str, bucket: Bucket, segment: str, base: int, filled: int = 0) -> Self:
        """The bucket on the wire."""
        return cls(
            session=session, seq=bucket.seq, segment=segment, base=base, length=bucket.length,
            entries=bucket.entries, filled=filled,
        )  # fmt: skip

    def pieces(self) -> tuple[Entry, ...]:
        """The entries off the wire."""
        return tuple(Entry(*entry) for entry in self.entries)


class Ack(Message):
    """Rank: the bucket is loaded, its memory may be used again as soon as the rank's counter has
    come to ``copied``; or why it could not be.
    """

    kind: Literal["ack"] = "ack"
    session: SessionId
    seq: Count
    ok: bool
    error: Text = ""
    copied: Count = 0


class Finish(Message):
    """Sender: that was all; what it should add up to."""

    kind: Literal["finish"] = "finish"
    session: SessionId
    buckets: Count
    tensors: Count
    bytes: Count


class Abort(Message):
    """Sender: the session is over, whatever it has reached."""

    kind: Literal["abort"] = "abort"
    session: SessionId
    reason: Text


class Report(Message):
    """Rank: the end of a load, good or bad."""

    kind: Literal["report"] = "report"
    session: SessionId
    rank: Count
    host: Text
    ok: bool
    version: Version
    tensors: Count
    bytes: Count
    seconds: Seconds
    error: Text
    touched: bool
    path: Literal["", "reference", "recorded", "mixed", "replayed", "staged", "switched"]
    note: Text
    steps: tuple[tuple[Name, Seconds], ...]
    transport: Literal["", "shared_memory", "cuda_ipc"] = ""
    mode: Literal["", "bucketed", "direct"] = ""

    @classmethod
    def of(cls, session: str, report: LoadReport) -> Self:
        """The report on the wire."""
        told = {name: value for name, value in report.as_dict().items() if name in cls.model_fields}
        return cls(session=session, **told)

    def report(self) -> LoadReport:
        """The report off the wire."""
        return LoadReport.from_dict(self.model_dump())


class Refused(Message):
    """Rank: this message does not count. ``session`` is the one it spoke of, if it had one."""

    kind: Literal["refused"] = "refused"
    session: Annotated[str, Field(max_length=128)]
    code: Literal[
        "busy", "stale", "order", "protocol", "rank", "transport", "not_ready", "internal"
    ]
    message: Text


class Ping(Message):
    """Rank, while it loads: finds out whether the sender is still there. No answer."""

    kind: Literal["ping"] = "ping"
    session: SessionId


ToRank = Hello | Offer | Memory | Direct | BucketReady | Finish | Abort
ToSender = Welcome | Accepted | Rejected | Mapped | Ack | Report | Refused | Ping

_TO_RANK: TypeAdapter[ToRank] = TypeAdapter(Annotated[ToRank, Field(discriminator="kind")])
_TO_SENDER: TypeAdapter[ToSender] = TypeAdapter(Annotated[ToSender, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """A message as bytes."""
    packed: bytes = msgpack.packb({"v": PROTOCOL, **message.model_dump()})
    return packed


def decode(raw: bytes, adapter: TypeAdapter[T]) -> T:
    """Bytes as a message of one direction.

    Raises:
        WireError: another protocol version, no msgpack, an unknown kind, a wrong field.
    """
    document = unpack(raw)
    version = document.pop("v", None)
    if version != PROTOCOL:
        raise WireError(f"the peer speaks protocol {version!r}, this side {PROTOCOL}")
    try:
        return adapter.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "message"
        raise WireError(f"{field}: {first['msg']}") from None


def unpack(raw: bytes) -> dict[str, Any]:
    """A msgpack map whose arrays are tuples.

    Raises:
        WireError: it is none.
    """
    try:
        document = msgpack.unpackb(raw, use_list=False, raw=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"no msgpack: {error}") from None
    if not isinstance(document, dict):
        raise WireError("no msgpack map")
    return document


def decode_to_rank(raw: bytes) -> ToRank:
    """What a rank receives; see ``decode``."""
    return decode(raw, _TO_RANK)


def decode_to_sender(raw: bytes) -> ToSender:
    """What a sender receives; see ``decode``."""
    return decode(raw, _TO_SENDER)

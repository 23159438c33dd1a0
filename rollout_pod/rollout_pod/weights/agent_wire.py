"""The control messages between the pod's supervisor and the agent.

``id`` is chosen by the client and comes back with every answer, so that a late answer to an
earlier request is never taken for another's.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from rollout_pod.weights.wire import Count, Message, Name, Report, Seconds, SessionId, Text, Version
from rollout_pod.weights.wire import decode as _decode

Timeout = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]

Digest = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
"""A SHA-256, or nothing; see ``contents``."""


class Stage(Message):
    """Client: get this version ready and show its manifest to the ranks."""

    kind: Literal["stage"] = "stage"
    id: Count
    session: SessionId
    version: Version
    path: Name
    ranks: tuple[Name, ...] = Field(min_length=1)
    bucket_bytes: Annotated[int, Field(ge=256, le=1 << 40)]
    timeout: Timeout


class Send(Message):
    """Client: the ranks are loading, send the bytes."""

    kind: Literal["send"] = "send"
    id: Count
    session: SessionId
    timeout: Timeout


class Committed(Message):
    """Client: the ranks hold this session's version now; keep it, let the one before go."""

    kind: Literal["committed"] = "committed"
    id: Count
    session: SessionId


class Discard(Message):
    """Client: end this session; an uncommitted version's memory is given back."""

    kind: Literal["discard"] = "discard"
    id: Count
    session: SessionId


class Status(Message):
    """Client: what do you hold?"""

    kind: Literal["status"] = "status"
    id: Count


class Progress(Message):
    """Agent: bytes read so far, while a ``stage`` runs."""

    kind: Literal["progress"] = "progress"
    id: Count
    bytes: Count
    total: Count


class StagedReply(Message):
    """Agent: all bytes are in shared memory, and every rank accepted the manifest."""

    kind: Literal["staged"] = "staged"
    id: Count
    bytes: Count
    tensors: Count
    seconds: Seconds
    transport: Literal["shared_memory"]
    sample: Digest = ""
    sums: Digest = ""


class SentReply(Message):
    """Agent: every rank loaded everything."""

    kind: Literal["sent"] = "sent"
    id: Count
    bytes: Count
    seconds: Seconds
    ranks: tuple[Report, ...]


class Done(Message):
    """Agent: so be it."""

    kind: Literal["done"] = "done"
    id: Count


class HeldSlot(Message):
    """A version in the agent's memory; ``bytes`` are those of its segment."""

    kind: Literal["slot"] = "slot"
    version: Version
    path: Name
    bytes: Count
    ready: bool
    committed: bool


class StatusReply(Message):
    """Agent: what it holds."""

    kind: Literal["status"] = "status"
    id: Count
    boot: Text
    session: Annotated[str, Field(max_length=128)]
    """The latest, empty if none."""
    used: Count
    host_memory: Count
    slots: tuple[HeldSlot, ...]


class Failed(Message):
    """Agent: why not."""

    kind: Literal["error"] = "error"
    id: Count
    error: Literal[
        "source", "manifest", "room", "ranks", "transfer", "session", "timeout", "protocol",
        "internal",
    ]  # fmt: skip
    message: Text
    retryable: bool
    ranks: tuple[Report, ...] = ()


ToAgent = Stage | Send | Committed | Discard | Status
Reply = StagedReply | SentReply | Done | StatusReply | Failed
ToClient = Progress | Reply

_TO_AGENT: TypeAdapter[ToAgent] = TypeAdapter(Annotated[ToAgent, Field(discriminator="kind")])
_TO_CLIENT: TypeAdapter[ToClient] = TypeAdapter(Annotated[ToClient, Field(discriminator="kind")])


def decode_to_agent(raw: bytes) -> ToAgent:
    """What the agent receives; see ``wire.decode``."""
    return _decode(raw, _TO_AGENT)


def decode_to_client(raw: bytes) -> ToClient:
    """What the client receives; see ``wire.decode``."""
    return _decode(raw, _TO_CLIENT)

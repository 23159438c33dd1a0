"""What the pods of one replica say to each other, where its engine spans several."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Group = Annotated[str, Field(min_length=1, max_length=128)]
_Text = Annotated[str, Field(min_length=1, max_length=4096)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeBeat(_Part):
    """A node tells the head that it is there. Each is an answer's worth of orders."""

    group: Group
    """The incarnation of the replica that it belongs to: the uid of the head's pod."""
    rank: Annotated[int, Field(ge=1, le=1024)]
    """Of the node: 1 and up."""
    boot_id: Annotated[str, Field(min_length=1, max_length=128)]
    """Of the node's process."""
    url: Annotated[str, Field(min_length=1, max_length=512)]
    """Its admin port, for the head."""
    draining: bool = False
    """It was asked to end: the head has to drain."""


class NodeOrders(_Part):
    """What the head answers."""

    boot_id: str
    """Of the head's process: another one is another engine."""
    host: str
    """Where the head's ranks are met, whatever a name server said of it."""
    port: int
    go: bool
    """All nodes are there: start the ranks."""
    up: bool
    """The engine has started."""
    draining: bool
    """The head ends, and the node with it: no failure."""
    dead: bool = False
    """The engine is dead or of no use any more: the head ends, and the node with it."""


class NodeStage(_Part):
    """The head: get a version ready for the ranks of this node."""

    group: Group
    session: _Text
    version: _Text
    path: _Text
    ranks: Annotated[int, Field(ge=1, le=1024)]
    """On this node."""
    bucket_bytes: Annotated[int, Field(ge=256, le=1 << 40)]
    timeout_s: Annotated[float, Field(gt=0, le=86400)]


class NodeStaged(_Part):
    """It is at hand, and the node's ranks accepted its manifest."""

    bytes: int
    tensors: int
    seconds: float
    transport: str
    sample: Annotated[str, Field(max_length=64)] = ""
    """A digest of the tensors' names, types and shapes, and of some bytes of each."""
    sums: Annotated[str, Field(max_length=64)] = ""
    """A digest of the hashes of its files; empty where they are not known."""


class NodeSend(_Part):
    """The head: the ranks are loading, send the bytes."""

    group: Group
    session: _Text
    timeout_s: Annotated[float, Field(gt=0, le=86400)]


class NodeSent(_Part):
    """The node's ranks have all of it."""

    bytes: int
    seconds: float


class NodeSession(_Part):
    """The head: of a session that is over."""

    group: Group
    session: _Text


class NodeDone(_Part):
    """So be it."""

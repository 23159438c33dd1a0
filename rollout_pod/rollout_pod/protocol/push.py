"""Push mode: what a trainer and a pod say to each other over the pod's unix socket.

``<run_dir>/push.sock``, HTTP and JSON; whoever may open the socket may push. The bytes themselves
travel by the weight protocol, over the ranks' own sockets.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_pod.protocol.desired import Transport
from rollout_pod.protocol.state import StateDocument, UpdatePhase

PUSH_SOCKET: Final = "push.sock"
"""In the run folder."""

PUSH_POLL_MAX_S: Final = 60.0
"""The longest that a request is held open, in seconds."""

SESSION_PATTERN: Final = r"^[\w.-]+$"

SessionName = Annotated[str, Field(min_length=1, max_length=128, pattern=SESSION_PATTERN)]

OVER: Final = frozenset(
    {
        UpdatePhase.COMMITTED, UpdatePhase.FAILED, UpdatePhase.REJECTED, UpdatePhase.SUPERSEDED,
        UpdatePhase.GIVEN_UP,
    }
)  # fmt: skip
"""Phases in which a session ends."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PushTarget(_Document):
    """Where a sender finds the ranks, and what they wait for."""

    boot_id: str
    """Names this start of the pod; an offer has to repeat it."""
    world: int
    """How many ranks hold the model together, over all data-parallel engines."""
    sockets: tuple[str, ...]
    """Of all ranks, absolute, ordered by global rank (data-parallel index x world + rank)."""
    shm_dir: str
    """The memory that sender and ranks share, as the pod sees it."""
    bucket_bytes: int
    transport: Transport
    """What the document asks for; ``auto`` leaves it to the sender."""
    desired_version: str | None
    needs: str | None
    """The version that the pod waits for; None while it waits for none."""
    weight_version: str | None
    update_timeout_s: float
    gpu_uuids: tuple[str | None, ...]
    """Of every rank; None for one without a GPU."""


class PushOffer(_Document):
    """A session whose manifest every rank has accepted: the pod may switch to it now."""

    session: SessionName
    boot_id: Annotated[str, Field(min_length=1, max_length=64)]
    """Of the target that the sender read."""
    version: Annotated[str, Field(min_length=1, max_length=253)]
    bytes: Annotated[int, Field(ge=0)]
    """Of all tensors."""
    tensors: Annotated[int, Field(ge=0)]
    transport: Literal["shared_memory", "cuda_ipc"]
    mode: Literal["bucketed", "direct"]
    reason: Annotated[str, Field(max_length=4000)] = ""
    """Why transport and mode are not the fastest ones; empty if they are."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Global numbers of those that this sender serves; None: all. Of the others' the pod asks the
    ranks themselves."""


class PushGiveUp(_Document):
    """Why a sender ends its session."""

    reason: Annotated[str, Field(max_length=4000)] = ""


class PushStatus(_Document):
    """How far a session came."""

    session: str
    version: str
    phase: UpdatePhase
    over: bool
    """Nothing of it changes any more."""
    message: str = ""
    """What went wrong; empty where nothing did."""
    state: StateDocument
    """Of this moment."""

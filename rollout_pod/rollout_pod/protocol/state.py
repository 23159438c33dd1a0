"""The state document: all that a pod tells about itself, in one JSON object."""

from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict

from rollout_pod.protocol.desired import SleepTag, WeightsRef


class PodPhase(StrEnum):
    """Phases of a pod. Only ``SERVING`` hands requests to the engine."""

    LOADING = "Loading"
    """The engine is starting."""
    STALE = "Stale"
    """The engine is up; no version is committed."""
    UPDATING = "Updating"
    """The gate is closed for an update (a prefetch shows only in ``update.phase``)."""
    PAUSING = "Pausing"
    """The gate is closed for a pause; requests in flight are being returned."""
    PAUSED = "Paused"
    """The engine holds no request, and every caller has its partial."""
    SERVING = "Serving"
    SLEEPING = "Sleeping"
    """The gate is closed, and memory of the engine is released (``sleep`` says what of it)."""
    POISONED = "Poisoned"
    """An update failed after its first byte: nothing is served until a complete one commits."""
    DRAINING = "Draining"
    FAILED = "Failed"
    """The engine is dead or did not start."""


AT_REST: Final = frozenset({
    PodPhase.PAUSED, PodPhase.SLEEPING, PodPhase.POISONED, PodPhase.STALE
})  # fmt: skip
"""Where the gate is closed, too, the engine holds no request, and every caller has its partial."""


class GateState(StrEnum):
    """Whether requests are handed to the engine."""

    OPEN = "open"
    CLOSED = "closed"


class UpdatePhase(StrEnum):
    """How far the newest update came."""

    PREFETCHING = "Prefetching"
    """The weights agent fetches the version, or the ranks check its manifest; serving goes on."""
    WAITING = "Waiting"
    """The prefetch failed and is tried again later; serving goes on."""
    AWAITING_PUSH = "AwaitingPush"
    """No sender has offered the version yet (``needs`` names it); serving goes on."""
    STAGED = "Staged"
    """Every rank accepted the manifest."""
    CANCELLING = "Cancelling"
    TRANSFERRING = "Transferring"
    COMMITTING = "Committing"
    COMMITTED = "Committed"
    FAILED = "Failed"
    """Failed after the gate had closed; tried again."""
    SUPERSEDED = "Superseded"
    """Nobody wanted it any more before it was begun."""
    REJECTED = "Rejected"
    """Failed too often; the fallback is served until ``weights`` changes."""
    GIVEN_UP = "GivenUp"
    """Its sender gave up before anything was loaded; only of a push session."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class UpdateSeconds(_Document):
    """Seconds spent in the steps of an update; None where a step did not happen (yet)."""

    prefetch: float | None = None
    cancel: float | None = None
    transfer: float | None = None
    commit: float | None = None
    paused: float | None = None
    """From gate closed to gate open again."""


class FetchProgress(_Document):
    """How far the fetching of a version has come."""

    bytes: int
    total: int
    """0 until the headers are known."""


class UpdateState(_Document):
    """The newest update."""

    target: str
    phase: UpdatePhase
    attempt: int = 0
    """Transfers of this version that were started, this one included."""
    bytes: int = 0
    seconds: UpdateSeconds = UpdateSeconds()
    steps: dict[str, float] = {}
    """Seconds within ``seconds.transfer``, as the slowest rank reports them; their names are the
    weight protocol's."""
    transport: str | None = None
    """``cuda_ipc`` or ``shared_memory``: agreed with the ranks, then as they report it."""
    mode: str | None = None
    """``direct`` or ``bucketed``; the same. ``staged``: it waited on the device."""
    session: str | None = None
    """Of the sender that pushes it; None where the weights agent fetches."""
    message: str = ""
    """What went wrong last and what to do about it; empty when nothing did."""
    note: str = ""
    """Why transport and mode are not the fastest ones, in the sender's words."""
    started_at: float | None = None
    """Unix time in seconds."""
    finished_at: float | None = None
    progress: FetchProgress | None = None
    """While the version is fetched; makes no revision."""


class RankState(_Document):
    """What one rank of the engine says of itself."""

    rank: int
    host: str
    weight_version: str | None
    path: str = ""
    """How its last load went: ``replayed`` (all by recorded copies), ``mixed``, ``recorded`` or
    ``reference`` (by the engine's own loaders), ``switched`` (by one copy of what waited on the
    device); empty before the first."""
    note: str = ""
    """Why not faster, where it will stay so; and what keeps older weights (a draft model)."""


class SleepState(_Document):
    """How the engine sleeps, and whether that released any memory."""

    level: int
    tags: tuple[SleepTag, ...]
    """What sleeps. Empty where the engine refuses to: ``message`` says why, and it serves on."""
    released: bool
    """Whether memory was really released. Never on CPU."""
    bytes: int = 0
    """Of device memory that are released now, over all ranks, as measured."""
    message: str = ""


class EngineInfo(_Document):
    """What runs inside the pod."""

    name: str
    version: str
    logprobs_mode: str
    generation_config: str
    max_model_len: int
    world_size: int


class StateDocument(_Document):
    """What a pod is. A new ``revision`` is made by every change that somebody may wait for."""

    revision: int
    boot_id: str
    phase: PodPhase
    weight_version: str | None
    """The committed version; None where there is none."""
    weight_step: int | None = None
    desired_version: str | None
    """The version that ``desired.weights`` names; None before the first document."""
    owner: str | None
    generation: int | None
    """Of the newest desired document."""
    gate: GateState
    ready: bool
    """What ``/readyz`` answers."""
    unfinished: int
    """Requests in the engine; makes no revision."""
    resident: tuple[SleepTag, ...] = tuple(SleepTag)
    """The parts of the engine's memory that are not released."""
    sleep: SleepState | None = None
    """None where nothing sleeps and nothing is asked to."""
    committed: WeightsRef | None = None
    """The committed version with its source; None where there is none."""
    needs: str | None = None
    """The version that a trainer has to push: the pod waits for it, and for nothing else."""
    rejected: WeightsRef | None = None
    """The version that failed too often."""
    rejected_message: str | None = None
    """What it failed with last."""
    update: UpdateState | None = None
    ranks: tuple[RankState, ...] = ()
    last_error: str | None = None
    engine: EngineInfo | None = None


class ReadyFacts(_Document):
    """What ``GET /readyz`` on the data port answers with 200: enough to route by."""

    status: str = "ok"
    boot_id: str | None = None
    weight_version: str | None = None
    weight_step: int | None = None

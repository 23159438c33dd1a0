"""What a pod knows of itself: frozen values that the plan reads and the supervisor replaces."""

from dataclasses import dataclass, replace
from enum import StrEnum

from rollout_pod.protocol import (
    BASE_VERSION,
    CancelReason,
    DesiredDocument,
    EngineInfo,
    PodPhase,
    SleepSpec,
    SleepState,
    SleepTag,
    UpdateState,
    WeightsRef,
)

BASE = WeightsRef(version=BASE_VERSION)
"""The model's own checkpoint, as the engine loads it when it boots."""


class EngineStatus(StrEnum):
    """The life of the engine. It has one: a dead engine needs a new process."""

    NEW = "new"
    UP = "up"
    DEAD = "dead"


class StageStatus(StrEnum):
    """How far the preparation of a version came. Serving goes on meanwhile."""

    AWAITING = "awaiting"
    """A trainer has to offer it."""
    RUNNING = "running"
    READY = "ready"
    """The bytes are at hand and every rank accepted the manifest."""
    FAILED = "failed"


@dataclass(frozen=True)
class Rank:
    """What is known of one rank, and how its last load went."""

    rank: int
    """Global."""
    host: str = ""
    path: str = ""
    note: str = ""


@dataclass(frozen=True)
class Stage:
    """The preparation of one version."""

    ref: WeightsRef
    session: str
    """Empty while it is awaited."""
    status: StageStatus
    retry_at: float = 0.0
    """On the supervisor's clock, in seconds; of a failed stage."""
    message: str = ""
    on_device: bool = False
    """Every rank has all of it beside its model: no sender is needed any more."""


@dataclass(frozen=True)
class PodState:
    """All that ``next_step`` may look at. Versions are whole references."""

    engine: EngineStatus = EngineStatus.NEW
    gate_open: bool = False
    closed_for: CancelReason | None = None
    """Why the gate is closed; None before it was first opened."""
    idle: bool = False
    """The engine is paused, and every caller has its partial but for those ``kept``."""
    kept: bool = False
    """The idle engine still holds requests, which go on when it does."""
    loaded: WeightsRef | None = None
    """What the ranks hold, verified; None while a load goes on or after one failed."""
    transferred: bool = False
    """``loaded`` came by a transfer (else by the boot load)."""
    caches_clear: bool = True
    """No cache holds anything computed under other weights than ``loaded``."""
    committed: WeightsRef | None = None
    """What may be served. Changes by one assignment, in ``Commit``."""
    last_committed: WeightsRef | None = None
    """Survives a restart of the process: the pod's own fallback."""
    sleep: SleepState | None = None
    """How the engine sleeps; None while all of its memory is resident."""
    sleep_refusal: str | None = None
    """Why this engine cannot sleep; None where it can."""
    resizing: bool = False
    """Memory is being released or taken back: calls of the engine wait behind that."""
    poisoned: bool = False
    transferring: bool = False
    stage: Stage | None = None
    stage_failures: tuple[tuple[WeightsRef, int, float], ...] = ()
    """(version, failures in a row, retry at) for each version whose preparation failed last."""
    load_failures: tuple[tuple[WeightsRef, int], ...] = ()
    """(version, failures after the gate had closed) since ``weights`` last changed."""
    rejected: WeightsRef | None = None
    rejected_message: str | None = None
    """Why, as long as something is rejected."""
    draining: bool = False
    drained: bool = False
    update: UpdateState | None = None
    last_error: str | None = None
    info: EngineInfo | None = None
    ranks: tuple[Rank, ...] = ()
    """Ordered by rank."""

    @property
    def asleep(self) -> frozenset[SleepTag]:
        """What of the engine's memory sleeps."""
        return frozenset(self.sleep.tags) if self.sleep else frozenset()

    @property
    def weights_asleep(self) -> bool:
        """Nothing can be loaded, and nothing can be served soon."""
        return SleepTag.WEIGHTS in self.asleep

    def load_failures_of(self, ref: WeightsRef) -> int:
        """How often ``ref`` failed after the gate had closed."""
        return next((n for r, n in self.load_failures if r == ref), 0)

    def with_load_failure(self, ref: WeightsRef) -> "PodState":
        """One failure of ``ref`` more."""
        others = tuple((r, n) for r, n in self.load_failures if r != ref)
        return replace(self, load_failures=(*others, (ref, self.load_failures_of(ref) + 1)))

    def rejects(self, ref: WeightsRef) -> bool:
        """It was rejected, and would have to be loaded: what the engine holds since its start was
        loaded as well as anything.
        """
        return self.rejected == ref and self.loaded != ref

    def stage_failure_of(self, ref: WeightsRef) -> tuple[int, float]:
        """(failures in a row, retry at) of preparing ``ref``; (0, 0.0) if it did not fail."""
        return next(((n, at) for r, n, at in self.stage_failures if r == ref), (0, 0.0))

    def with_stage_failure(self, ref: WeightsRef, *, retry_at: float) -> "PodState":
        """One more failed preparation of ``ref``, to be tried again at ``retry_at``."""
        count, _ = self.stage_failure_of(ref)
        others = tuple(f for f in self.stage_failures if f[0] != ref)
        return replace(self, stage_failures=(*others, (ref, count + 1, retry_at)))

    def without_stage_failure(self, ref: WeightsRef) -> "PodState":
        """The preparation of ``ref`` went well."""
        return replace(self, stage_failures=tuple(f for f in self.stage_failures if f[0] != ref))


def wanted_weights(desired: DesiredDocument) -> WeightsRef:
    """The version that the document asks for."""
    return desired.weights or BASE


def fallback_weights(desired: DesiredDocument, state: PodState) -> WeightsRef | None:
    """What may be served when the wanted version cannot: the pod's own record wins."""
    return state.last_committed or desired.fallback


def wanted_sleep(desired: DesiredDocument, state: PodState) -> SleepSpec | None:
    """How the engine has to sleep; None for one that cannot: it serves on."""
    return None if state.sleep_refusal else desired.sleep


def is_ready(state: PodState) -> bool:
    """What ``/readyz`` answers.

    Pauses and updates do not change it: ``committed`` keeps the old version until the new one
    is committed, and is taken away by a failure, or with the weights by a sleep of level 2.
    """
    return (
        state.engine is EngineStatus.UP
        and state.committed is not None
        and not state.poisoned
        and not state.draining
        and not state.weights_asleep
    )


def phase_of(state: PodState) -> PodPhase:
    """The one word for all of it."""
    if state.engine is EngineStatus.DEAD:
        return PodPhase.FAILED
    if state.draining:
        return PodPhase.DRAINING
    if state.engine is EngineStatus.NEW:
        return PodPhase.LOADING
    if state.transferring:
        return PodPhase.UPDATING
    if state.weights_asleep:
        return PodPhase.SLEEPING
    if state.poisoned:
        return PodPhase.POISONED
    if state.asleep and state.closed_for is CancelReason.SLEEPING:
        return PodPhase.SLEEPING
    if state.committed is None:
        return PodPhase.STALE
    if not state.gate_open and state.closed_for is CancelReason.UPDATING:
        return PodPhase.UPDATING
    if state.gate_open:
        return PodPhase.SERVING
    return PodPhase.PAUSED if state.idle else PodPhase.PAUSING

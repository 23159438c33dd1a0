"""What may be asked of a replica: how it changes a desired document, and when it is so. Pure."""

from dataclasses import dataclass

from rollout_client.verdict import Failed, Failure, Reached, Verdict, Waiting
from rollout_pod.protocol import (
    AT_REST,
    BASE_VERSION,
    DesiredDocument,
    GateState,
    PodPhase,
    PushSource,
    SleepSpec,
    SleepTag,
    StateDocument,
    UpdatePhase,
    WeightsRef,
    WeightsSource,
)


@dataclass(frozen=True)
class Pause:
    """Every request in flight returns its partial, and no new one is begun."""

    def __str__(self) -> str:
        return "paused"


@dataclass(frozen=True)
class Open:
    """Generation goes on."""

    def __str__(self) -> str:
        return "generating"


@dataclass(frozen=True)
class Release:
    """Exactly this of the engine's memory is released."""

    sleep: SleepSpec

    def __str__(self) -> str:
        return f"asleep ({', '.join(self.sleep.tags)})"


@dataclass(frozen=True)
class TakeBack:
    """These parts of the engine's memory are resident."""

    tags: frozenset[SleepTag]

    def __str__(self) -> str:
        return f"awake ({', '.join(t for t in SleepTag if t in self.tags)})"


@dataclass(frozen=True)
class Hold:
    """Every rank holds this version."""

    version: str
    step: int | None = None
    source: WeightsSource | None = None
    """None for ``base``, and where the replica's owner knows it."""

    @property
    def is_pushed(self) -> bool:
        """A trainer sends it."""
        return self.source is not None and self.source.push is not None

    def __str__(self) -> str:
        return f"on {self.version}"


Wish = Pause | Open | Release | TakeBack | Hold


def changed(wish: Wish, document: DesiredDocument) -> DesiredDocument:
    """The document with the wish in it; equal where it is there already."""
    match wish:
        case Pause():
            return document.model_copy(update={"paused": True})
        case Open():
            return document.model_copy(update={"paused": False})
        case Release(sleep):
            return document.model_copy(update={"sleep": sleep})
        case TakeBack(tags):
            left = document.sleep.without(tags) if document.sleep else None
            return document.model_copy(update={"sleep": left})
        case Hold(version, step, source):
            ref = WeightsRef(version=version, step=step, source=source)
            return document.model_copy(update={"weights": ref})


def overruled(wish: Wish, document: DesiredDocument) -> str | None:
    """What another writer asks for instead; None where the wish still holds."""
    if changed(wish, document) == document:
        return None
    match wish:
        case Hold():
            now = f"the version {document.weights.version if document.weights else 'base'}"
        case Pause() | Open():
            now = f"paused: {str(document.paused).lower()}"
        case Release() | TakeBack():
            now = f"sleep: {document.sleep.model_dump_json() if document.sleep else 'null'}"
    return (
        f"another writer asked for {now} before the pod was {wish} (generation "
        f"{document.generation}); the last writer wins"
    )


def judge(wish: Wish, state: StateDocument) -> Verdict:
    """Whether a pod that has taken the wish has become it."""
    if state.phase is PodPhase.FAILED:
        return Waiting(progress=f"Failed: {state.last_error or 'the engine is dead'}")
    match wish:
        case Pause():
            reached = state.gate is GateState.CLOSED and state.phase in AT_REST
        case Open():
            reached = state.gate is GateState.OPEN
        case Release(sleep):
            if state.sleep is not None and not state.sleep.tags:
                why = f"the engine does not sleep: {state.sleep.message}"
                return Failed(kind=Failure.STALLED, message=why)
            reached = state.sleep is not None and _is_deep_enough(sleep, state)
        case TakeBack(tags):
            reached = tags <= set(state.resident)
        case Hold():
            return _judge_weights(wish, state)
    return Reached() if reached else Waiting(progress=progress(state))


def _is_deep_enough(asked: SleepSpec, state: StateDocument) -> bool:
    slept = state.sleep
    if slept is None or set(slept.tags) != set(asked.tags):
        return False
    return SleepTag.WEIGHTS not in asked.tags or slept.level >= asked.level


def _judge_weights(wish: Hold, state: StateDocument) -> Verdict:
    everywhere = all(rank.weight_version == wish.version for rank in state.ranks)
    if state.weight_version == wish.version and state.weight_step == wish.step and everywhere:
        return Reached()
    if state.rejected is not None and state.rejected.version == wish.version:
        held = f"{state.weight_version} is held" if state.weight_version else "nothing is served"
        why = f"{wish.version} was rejected: {state.rejected_message or 'no reason given'}; {held}"
        return Failed(kind=Failure.UPDATE_FAILED, message=why)
    update = state.update
    is_ours = update is not None and update.target == wish.version
    if update is not None and is_ours and update.phase is UpdatePhase.WAITING and update.message:
        why = f"{wish.version}: {update.message}; it is tried again"
        return Failed(kind=Failure.WEIGHTS_UNAVAILABLE, message=why)
    return Waiting(progress=progress(state))


def progress(state: StateDocument) -> str:
    """One line for people: the phase, the version, and how far the update is."""
    parts = [state.phase.value, f"holds {state.weight_version or 'nothing'}"]
    update = state.update
    if update is not None and update.phase not in (UpdatePhase.COMMITTED, UpdatePhase.SUPERSEDED):
        told = f": {update.message}" if update.message else ""
        parts.append(f"{update.phase.value.lower()} {update.target}{told}")
    return "; ".join(parts)


def version_of(
    version: str | None, step: int | None, source: WeightsSource | None, *, pushes: bool
) -> Hold:
    """What an update asks for. Pure.

    Raises:
        ValueError: it has no name, or a source that it cannot have.
    """
    if version is None:
        if step is None:
            raise ValueError("version: give one, or global_steps to make one of")
        version = f"step-{step}"
    if version == BASE_VERSION:
        if pushes or source is not None:
            raise ValueError(f"version: {version} is the model's own checkpoint; choose another")
        return Hold(version)
    if pushes and source is not None:
        raise ValueError("source: the weights are handed over; leave out one of the two")
    return Hold(version, step, WeightsSource(push=PushSource()) if pushes else source)

"""What must hold whatever happens to a pod, judged by what its engine really did.

The six invariants of docs/invariants.md: (1) what serves is committed on every rank, with clean
caches; (2) ``/readyz``; (3) paused means at rest, every caller answered; (4) no token of an unknown
or another version than its span names, none lost; (5) an incomplete load is never resumed from;
(6) liveness is about the engine.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rollout_pod.admission import Admission, Draining, GateStayedClosed, NotReady
from rollout_pod.engine.base import EngineDeadError, EngineDelta, EngineInternalError
from rollout_pod.engine.front_end import Passage
from rollout_pod.protocol import (
    BASE_VERSION,
    DesiredDocument,
    GenerateResponse,
    SleepTag,
    WeightsRef,
)
from rollout_pod.supervisor.supervisor import PodFailed, Supervisor
from tests.support.attack import StartOpenAI, StartRequest
from tests.support.attacked_fakes import GARBAGE, AttackedEngine
from tests.support.virtual_time import VirtualLoop

GRACE_TURNS = 20
"""In which the supervisor may notice what happened."""
GRACE_S = 0.5
LEFT_S = 0.5
"""In which a request ends whose caller has left; whole ones take longer."""
HUNG_S = 140.0
"""In which a hung engine has to be found: a heartbeat, or the deadline of a call or a load."""


@dataclass
class Caller:
    """One caller: what it sent, and what came back."""

    request_id: str
    number: int
    prompt: list[int]
    operation: StartRequest | StartOpenAI
    engine: AttackedEngine
    since: float
    before: list[int] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    left_at: float | None = None
    ended_at: float = 0.0
    task: "asyncio.Task[None]" = field(init=False)
    engine_ids: list[str] = field(default_factory=list)
    is_admitted: bool = False
    streamed: list[tuple[int, WeightsRef]] = field(default_factory=list)
    answer: GenerateResponse | None = None
    deleted: GenerateResponse | None = None
    tokens: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """By token: the version that its span names."""

    async def until_gone(self) -> None:
        await self.gone.wait()

    def on_admit(self, _: Admission) -> None:
        self.is_admitted = True

    def on_delta(self, delta: EngineDelta, weights: WeightsRef) -> None:
        self.streamed += [(token, weights) for token in delta.token_ids]

    def passed(self, passage: Passage) -> None:
        """One pass of an OpenAI call."""
        covered = spread(passage.spans, len(passage.output.token_ids))
        self.tokens += passage.output.token_ids
        self.labels += covered

    def truth(self) -> list[tuple[int, str]]:
        """What the engine sampled for it, and from what."""
        ids = self.engine_ids or [
            i for i in self.engine.ledger if i.startswith(f"{self.request_id}#")
        ]
        return [pair for i in ids for pair in self.engine.ledger.get(i, ())]

    def is_registered(self, boot: Any) -> bool:
        """Whether the pod has come to know its request."""
        return any(self.request_id in each._requests for each in boot.generations)

    @property
    def is_continuable(self) -> bool:
        return self.answer is not None and self.answer.is_cancel and bool(self.tokens)


def spread(spans: Iterable[Any], count: int) -> list[str]:
    """By token, the version of its span; the spans cover all of them, in order."""
    labels: list[str] = []
    for span in spans:
        assert span.start == len(labels) and span.end > span.start, f"spans with a gap: {spans}"
        labels += [span.version] * (span.end - span.start)
    assert len(labels) == count, f"{len(labels)} of {count} tokens are covered"
    return labels


class Oracle:
    """Looks after every turn of the loop, and closely after every operation."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._broken: list[str] = []
        self._callers: list[Caller] = []
        self._own: set[asyncio.Task[None]] = set()
        self._steps: dict[str, set[int | None]] = {}
        self.desired: DesiredDocument | None = None
        self._before: DesiredDocument | None = None
        self._last_committed: str | None = None
        self.draining = False
        self._supervisor: Supervisor | None = None

    # -- what happens

    def booted(self, supervisor: Supervisor, engine: AttackedEngine) -> None:
        """A container started."""
        assert supervisor.board.desired == self.desired, "the document did not survive"
        self._supervisor, self._engine = supervisor, engine
        self._seen: object = None
        self._phase = ""
        self._committed: str | None = None
        self._begun: set[str] = set()
        self._odd_since: dict[str, tuple[int, float]] = {}
        mode = self.desired.interruption.mode if self.desired else None
        self._modes = {mode} if mode else set()
        self._paused_at: int | None = None
        self.draining = False

    def lost_its_files(self) -> None:
        """The pod was made anew elsewhere."""
        self._last_committed = None

    def accepted(self, document: DesiredDocument) -> None:
        """The pod took it."""
        current = self.desired
        assert current is None or document.generation >= current.generation
        self._before, self.desired = current, document
        self._modes.add(document.interruption.mode)
        for found in (document.weights, document.fallback):
            if found:
                self._steps.setdefault(found.version, set()).add(found.step)

    def watch(self, caller: Caller) -> None:
        """Its answer is to be judged."""
        self._callers.append(caller)
        caller.task.add_done_callback(lambda _: setattr(caller, "ended_at", self._loop.now))

    def own(self, task: "asyncio.Task[None]") -> None:
        """A task of the driver's: an error in it is found."""
        self._own.add(task)

    async def join(self) -> None:
        """Wait for the driver's tasks."""
        await asyncio.gather(*self._own)
        self._own.clear()

    def breaks(self, what: str) -> None:
        """The engine was asked for what must never be."""
        self._broken.append(what)

    def exits(self, task: "asyncio.Task[None]") -> None:
        """The supervisor returns: everybody has an answer, if the engine could still give one."""
        engine = self._engine
        is_lame = engine.dead or engine.doomed or engine.hangs
        if not (task.cancelled() or task.exception() or is_lame) and engine.running:
            self.breaks("it ended with requests in its engine")

    def ended(self, error: BaseException | None) -> None:
        """The process ended by itself."""
        if error is None:
            assert self.draining, "it ended without a reason"
            assert self._supervisor and not self._supervisor.gate.is_open
            return
        assert isinstance(error, PodFailed), f"the supervisor failed: {error!r}"
        assert self._supervisor
        assert not self._supervisor.gate.is_open, "failed behind an open gate"
        assert not self._supervisor.is_ready or "failed" in str(error)

    # -- looking

    def look(self) -> None:
        """Cheap: in every turn."""
        supervisor, engine = self._supervisor, self._engine
        assert not self._broken, self._broken
        assert supervisor
        gate = supervisor.gate
        if engine.is_published and engine.published != self._committed:
            self._judge_commit(engine.published)
        if gate.is_open:
            self._judge_open(gate.weights)
        if supervisor.board.state is not self._seen:
            self._seen = supervisor.board.state
            self._judge_document()
        self._judge_ready(supervisor.is_ready)
        error = supervisor.liveness_error()
        lost = engine.dead or engine.doomed or engine.hangs or engine.is_unclear
        if error and not (lost or engine.start_error):
            raise AssertionError(f"a living engine is called dead: {error}")
        if engine.dead and engine.calls and not error and supervisor.is_started:
            raise AssertionError("a dead engine is called alive")

    def look_closely(self) -> None:
        """After an operation."""
        self.look()
        assert self._supervisor
        self._judge_document()
        now = self._loop.now
        hung = self._engine.hung_at
        if hung is not None and not self._engine.dead and self._supervisor.is_started:
            failed = self._supervisor.liveness_error() is not None
            assert failed or now - hung < HUNG_S, "a hung engine was not found"
        for task in [t for t in self._own if t.done()]:
            self._own.discard(task)
            task.result()
        for caller in list(self._callers):
            if caller.task.done():
                self._callers.remove(caller)
                self._judge_answer(caller)
            elif not caller.is_admitted and isinstance(caller.operation, StartRequest):
                late = now - caller.since - caller.operation.timeout_s
                assert late < 1 or self._engine.hangs, f"parked too long: {caller}"

    def loads(self, version: str) -> None:
        """The ranks begin to load it: a load that was begun may be committed."""
        if self._is_allowed(version):
            self._begun.add(version)
        else:
            self._broken.append(f"{version} is loaded, and nobody asked for it")

    def _judge_commit(self, version: str | None) -> None:
        """Only what was asked for, or the fallback: now, or when its load was begun."""
        assert version in self._begun or self._is_allowed(version), f"{version} was committed"
        self._committed = self._last_committed = version
        self._begun.clear()

    def _is_allowed(self, version: str | None) -> bool:
        allowed = {self._last_committed}
        for document in (self.desired, self._before):
            if document:
                allowed.add(document.weights.version if document.weights else BASE_VERSION)
        if self._last_committed is None and self.desired and self.desired.fallback:
            allowed.add(self.desired.fallback.version)
        return version in allowed

    def _judge_open(self, weights: WeightsRef | None) -> None:
        engine = self._engine
        assert weights is not None, "open without a version"
        self._modes = {self.desired.interruption.mode} if self.desired else set()
        self._paused_at = None
        if engine.dead:
            return  # seen in the supervisor's next turn; nobody gets a token any more
        assert not engine.asleep, f"open while {engine.asleep} sleep"
        assert engine.is_complete, "open over an incomplete load"
        assert engine.rank_holds == [weights.version] * len(engine.rank_holds), (
            f"open for {weights.version}, but the ranks hold {engine.rank_holds}"
        )
        assert engine.is_published and engine.published == weights.version, "open before published"
        assert engine.is_cleared and engine.cache_of in (None, weights.version), "a stale cache"
        assert not engine.paused or engine.hangs, "open over a paused engine"
        assert engine.last_pause is None or engine.hangs, "open over a pause"

    def _judge_document(self) -> None:
        assert self._supervisor
        engine, state = self._engine, self._supervisor.board.document()
        if state.phase != self._phase:
            self._phase = state.phase
            self._paused_at = self._loop.turns if state.phase == "Paused" else None
        if state.weight_version is not None:
            held = [state.weight_version] * len(engine.rank_holds)
            assert engine.rank_holds == held and engine.is_published, f"says {state.weight_version}"
            assert all(rank.weight_version == state.weight_version for rank in state.ranks)
        assert (state.gate == "open") == self._supervisor.gate.is_open, "says another gate"
        assert state.ready == self._supervisor.is_ready or engine.dead, "says another readiness"
        if state.phase == "Serving":
            assert state.gate == "open" and state.weight_version == self._committed
        if state.phase == "Paused" and "keep" not in self._modes and not engine.dead:
            assert engine.last_pause == "abort" or engine.hangs
            assert engine.running == 0, f"{engine.running} run in a paused engine"
            assert self._supervisor.gate.unfinished == 0, "paused with unfinished requests"
            if self._paused_at is not None and self._loop.turns - self._paused_at > GRACE_TURNS:
                waiting = [
                    c for c in self._callers
                    if c.is_admitted and not c.task.done() and c.engine is engine
                ]  # fmt: skip
                assert not waiting, f"paused, and without their partials: {waiting}"

    def _judge_ready(self, ready: bool) -> None:
        engine = self._engine
        incomplete = not engine.is_complete and not engine.is_loading
        if incomplete:
            self._committed = None
        if self.draining or engine.dead:
            assert not ready, "ready, but it drains or is dead"
        self._bounded("ready without a version", ready and self._committed is None)
        gate = self._supervisor.gate if self._supervisor else None
        unserved = self._committed is None and not (engine.is_loading or engine.dead)
        published = gate is not None and gate.weights is not None
        self._bounded("callers are not told that it is not ready", unserved and published)
        asleep = SleepTag.WEIGHTS in engine.asleep
        self._bounded("ready, but its weights sleep", ready and asleep)
        healthy = not (engine.dead or engine.doomed or engine.hangs or self.draining)
        usable = engine.is_complete and not asleep and not engine.is_unclear
        must = healthy and engine.is_published and usable and self._committed is not None
        self._bounded("not ready, but a version is committed", must and not ready)

    def _bounded(self, what: str, is_so: bool) -> None:
        """It may be so for a moment only."""
        if not is_so:
            self._odd_since.pop(what, None)
            return
        turns, at = self._odd_since.setdefault(what, (self._loop.turns, self._loop.now))
        is_long = self._loop.turns - turns > GRACE_TURNS or self._loop.now - at > GRACE_S
        assert not is_long, what

    def _judge_answer(self, caller: Caller) -> None:
        engine = caller.engine
        truth = caller.truth()
        if caller.left_at is not None and engine.hung_at is None:
            assert caller.ended_at - caller.left_at < LEFT_S, f"went on for nobody: {caller}"
        if caller.task.cancelled():
            assert caller.left_at is not None or engine.dead, "a caller was dropped"
            return
        error = caller.task.exception()
        if error is not None:
            self._judge_error(caller, error)
            return
        if caller.answer is not None:
            answer = caller.answer
            caller.tokens = answer.token_ids
            caller.labels = spread(answer.weight_versions, len(answer.token_ids))
            assert answer.is_cancel == (answer.finish_reason == "abort")
            assert answer.is_cancel == (answer.cancel_reason is not None)
            assert len(answer.log_probs) == len(answer.token_ids)
            for span in answer.weight_versions:
                asked = self._steps.get(span.version, set()) | {None}
                assert span.step in asked, f"a step that nobody gave: {span}"
            if answer.finish_reason == "length":
                assert len(answer.token_ids) == caller.operation.tokens, "another length"
            if answer.cancel_reason == "refused":
                assert not truth and not caller.is_admitted, "refused, but the engine saw it"
            if caller.deleted is not None:
                assert caller.deleted.token_ids == answer.token_ids, "DELETE got another partial"
            if isinstance(caller.operation, StartRequest) and caller.operation.stream:
                assert [t for t, _ in caller.streamed] == answer.token_ids, "streamed others"
                assert [w.version for _, w in caller.streamed] == caller.labels, "labelled others"
        self._judge_tokens(caller.tokens, caller.labels, truth)

    def _judge_tokens(self, tokens: list[int], labels: list[str], truth: Any) -> None:
        assert tokens == [token for token, _ in truth], "tokens were lost, or invented"
        real = [version for _, version in truth]
        assert GARBAGE not in real, "sampled from weights that nobody knows"
        assert labels == real, f"spans say {labels}, sampled by {real}"

    def _judge_error(self, caller: Caller, error: BaseException) -> None:
        engine = caller.engine
        if isinstance(error, EngineDeadError | EngineInternalError):
            assert engine.dead or engine.hangs or engine.doomed, f"no reason for {error!r}"
        elif isinstance(error, GateStayedClosed):
            waited = self._loop.now - caller.since
            patience = caller.operation.timeout_s
            assert caller.left_at is not None or waited >= patience, "sent away too early"
        else:
            assert isinstance(error, NotReady | Draining), f"a caller got {error!r}"
            has_begun = isinstance(caller.operation, StartOpenAI) and bool(caller.tokens)
            is_lost = has_begun and isinstance(error, NotReady) and not engine.dead
            assert not is_lost, "half an answer was thrown away, though a version came"
        labels = [w.version for _, w in caller.streamed] or caller.labels
        tokens = [t for t, _ in caller.streamed] or caller.tokens
        if tokens:  # what it received before is good all the same
            truth = caller.truth()[: len(tokens)]
            self._judge_tokens(tokens, labels, truth)

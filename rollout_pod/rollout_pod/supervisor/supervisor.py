"""The loop: plan one step, do it, plan again. And the door at which desired documents come in."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import structlog

from rollout_pod.engine.base import (
    Engine,
    EngineDeadError,
    EngineError,
    EngineStartError,
    InvalidField,
)
from rollout_pod.gate import Gate
from rollout_pod.metrics import PodMetrics
from rollout_pod.protocol import (
    CachesCleared,
    DesiredDocument,
    InterruptionMode,
    PodPhase,
    ReadyFacts,
    StateDocument,
)
from rollout_pod.supervisor import plan
from rollout_pod.supervisor.acts import Acts
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.caches import CacheClearing
from rollout_pod.supervisor.faults import Faults
from rollout_pod.supervisor.heartbeat import PERIOD_S, Heartbeat
from rollout_pod.supervisor.plan import next_step
from rollout_pod.supervisor.ports import WeightsAgent
from rollout_pod.supervisor.pushing import Pushing
from rollout_pod.supervisor.sleeping import Sleeping
from rollout_pod.supervisor.staging import Staging
from rollout_pod.supervisor.state import EngineStatus, PodState, is_ready, phase_of
from rollout_pod.supervisor.store import Store, StoreError, record_of
from rollout_pod.supervisor.transfer import Transfer

log = structlog.get_logger(__name__)

_HEALTH_PERIOD_S = 1.0
"""How often a dead engine is looked for while there is nothing to do."""


class Fenced(Exception):
    """The document is of another owner, or older than the one in force."""


class PreconditionFailed(Exception):
    """``If-Match`` names a state that is no longer the present one."""


class PodFailed(Exception):
    """The process has to end; the message says why: mostly the engine's last error line."""


@dataclass
class Supervisor:
    """Brings one engine to what the desired document says, by itself."""

    engine: Engine
    agent: WeightsAgent
    store: Store
    metrics: PodMetrics = field(default_factory=PodMetrics)
    default_desired: DesiredDocument | None = None
    """In force until the first document comes, where no operator sends one."""
    drain_timeout_s: float = 30.0
    heartbeat_timeout_s: float = 120.0
    """How long the engine's loop may take for one step."""
    heartbeat_s: float = PERIOD_S
    gate: Gate = field(default=None)  # type: ignore[assignment]  # made from the engine, if none
    """What requests pass on their way into the engine."""
    stages_on_device: bool = False
    """Whether the engine was started with memory for the next version on its device."""
    gather: Callable[[], Awaitable[None]] | None = None
    """Of an engine that spans nodes: awaited before it starts, until they are all there; raises
    ``EngineStartError``.
    """

    def __post_init__(self) -> None:
        self.gate = self.gate or Gate(self.engine)
        self.board = Board(unfinished=lambda: self.gate.unfinished)
        self._wake = asyncio.Event()
        self._staging = Staging(
            self.board, self.engine, self.agent, self._wake.set, self.stages_on_device
        )
        self._faults = Faults(self.board, self.gate, self.store, self.metrics, self._staging)
        self._transfer = Transfer(self.board, self.engine, self.agent, self._faults)
        self._acts = Acts(
            self.board, self.engine, self.gate, self.store, self.metrics,
            self._staging, self._faults, self._wake,
        )  # fmt: skip
        self._sleeping = Sleeping(self.board, self.engine, self.gate)
        self._caches = CacheClearing(self.board, self.engine)
        self.pushes = Pushing(self.board, self.engine, self._staging, self._faults)
        self.metrics.watch(
            gate_open=lambda: self.gate.is_open,
            gate_changed=lambda: self.gate.changed_at,
            unfinished=lambda: self.gate.unfinished,
            parked=lambda: self.gate.parked,
            fetched=self._fetched,
        )
        record = self.store.read_record()
        self.board.desired = self.store.read_desired() or self.default_desired
        self.board.change(
            last_committed=record.last_committed,
            rejected=record.rejected,
            rejected_message=record.rejected_message,
            load_failures=record.load_failures,
        )
        self._note_generation()

    def _fetched(self) -> tuple[int, int]:
        update = self.board.state.update
        progress = update.progress if update else None
        return (progress.bytes, progress.total) if progress else (0, 0)

    # -- what is asked for

    def put_desired(
        self, document: DesiredDocument, *, if_match: str | None = None
    ) -> StateDocument:
        """Take a desired document into force.

        Raises:
            InvalidField: a trainer is to push to several nodes.
            Fenced: another owner, or a lower generation than the one in force.
            PreconditionFailed: ``if_match`` (``<boot_id>:<revision>``) is not the present state.
            StoreError: the document cannot be kept; the one before stays in force.
        """
        if self.gather is not None and document.weights and document.weights.is_pushed:
            raise InvalidField(
                "weights.source.push",
                "a trainer shares memory with one node only: with several, give path or url",
            )
        current = self.board.desired
        present = self.board.document()
        if if_match is not None and if_match != f"{present.boot_id}:{present.revision}":
            raise PreconditionFailed(f"the state is {present.boot_id}:{present.revision}")
        if current is not None:
            if document.owner != current.owner:
                raise Fenced(f"this pod is owned by {current.owner}, not by {document.owner}")
            if document.generation < current.generation:
                raise Fenced(f"generation {document.generation} is older than {current.generation}")
        if document != current:
            state = self.board.state
            if current is None or document.weights != current.weights:
                state = _without_failures(state)
                self.store.write_desired(document, record_of(state))
            else:
                self.store.write_desired(document)
            # nothing fails from here on: a document that was refused must not be in force
            self.board.desired = document
            self._note_generation()
            self.board.set(state)
            self._wake.set()
        return self.board.document()

    def begin_drain(self) -> None:
        """Begin the end of this pod; ``run`` returns when it is drained."""
        self.board.change(draining=True)
        self.gate.drain()
        self._wake.set()

    def look(self) -> None:
        """Look at the engine now: something was done to it from outside."""
        self._wake.set()

    async def clear_caches(self, *, timeout_s: float) -> CachesCleared:
        """Clear every cache of the engine, beside whatever it does. See ``CacheClearing``."""
        return await self._caches.clear(timeout_s=timeout_s)

    @property
    def is_ready(self) -> bool:
        """What ``/readyz`` answers."""
        return is_ready(self.board.state) and self.engine.dead_error() is None

    elsewhere: None = None
    """The data port of this process is the only one."""

    async def metrics_text(self) -> bytes:
        """The pod's own metrics and its engine's, in Prometheus' text format."""
        # the engine has hundreds of them: not on the loop's thread
        return self.metrics.text() + await asyncio.to_thread(self.engine.metrics_text)

    def facts(self) -> ReadyFacts:
        """What ``/readyz`` says while it answers 200."""
        state = self.board.document()
        return ReadyFacts(
            boot_id=state.boot_id,
            weight_version=state.weight_version,
            weight_step=state.weight_step,
        )

    @property
    def phase(self) -> PodPhase:
        """What ``/readyz`` says while it does not."""
        return phase_of(self.board.state)

    @property
    def max_model_len(self) -> int:
        """Tokens that the model has room for; 0 before the engine has started."""
        info = self.board.state.info
        return info.max_model_len if info else 0

    @property
    def is_started(self) -> bool:
        """What ``/startupz`` answers."""
        return self.board.state.engine is not EngineStatus.NEW

    def liveness_error(self) -> str | None:
        """Why ``/healthz`` fails; None while the engine lives, or is still to start."""
        state = self.board.state
        if state.engine is EngineStatus.DEAD:
            return state.last_error or "the engine is dead"
        return self.engine.dead_error() if state.engine is EngineStatus.UP else None

    # -- the loop

    async def run(self) -> None:
        """Run until drained.

        Raises:
            PodFailed: the engine did not start, died, or cannot be repaired in place; or the run
                folder cannot be written.
        """
        heartbeat = asyncio.create_task(
            Heartbeat(
                self.board, self.engine, self._hung, self.heartbeat_timeout_s, self.heartbeat_s
            ).run(),
            name="heartbeat",
        )
        try:
            while not self.board.state.drained:
                await self._turn()
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)
            await self._staging.give_up()
            self.board.close()

    async def _turn(self) -> None:
        self._wake.clear()
        error = self.engine.dead_error() if self.board.state.engine is EngineStatus.UP else None
        if error:
            self._faults.fail_engine(error)
        now = time.monotonic()
        step = next_step(self.board.desired, self.board.state, now)
        if isinstance(step, plan.Wait):
            await self._wait(step.until, now)
            return
        log.debug("step", step=type(step).__name__)
        try:
            await self._do(step)
        except (EngineDeadError, EngineError, StoreError) as error:
            # one that cannot pause, resume or take a name cannot be steered; and what is not
            # recorded must not be served: a restart would not know of it
            self._faults.fail_engine(str(error))

    async def _do(self, step: plan.Step) -> None:
        acts = self._acts
        match step:
            case plan.Load():
                await self._load()
            case plan.Prefetch(ref):
                await self._staging.prefetch(ref)
            case plan.AwaitPush(ref):
                await self._staging.await_push(ref)
            case plan.CloseGate(reason):
                acts.close_gate(reason)
            case plan.Cancel(mode):
                await acts.cancel(mode)
            case plan.Transfer(ref, session, flush, on_device):
                await self._transfer.load(ref, session, flush=flush, on_device=on_device)
            case plan.ClearCaches():
                await acts.clear_caches()
            case plan.Commit(ref):
                await acts.commit(ref)
            case plan.Relabel(label):
                acts.relabel(label)
            case plan.GiveUp():
                await self._staging.forget()
            case plan.OpenGate():
                await acts.open_gate()
            case plan.Sleep(level):
                await self._sleeping.sleep(level)
            case plan.Wake(tags):
                await self._sleeping.wake(tags)
            case plan.Drain():
                await acts.drain(timeout_s=self.drain_timeout_s)
            case plan.Restart(reason):
                raise PodFailed(reason)
            case plan.Wait():
                raise AssertionError("waiting is done by the caller")

    async def _load(self) -> None:
        """Start the engine; a drain or its death that comes meanwhile ends the start."""
        start = asyncio.create_task(self._start(), name="engine start")
        try:
            while not start.done():
                wake = asyncio.create_task(self._wake.wait())
                try:
                    await asyncio.wait({start, wake}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    wake.cancel()
                    await asyncio.gather(wake, return_exceptions=True)
                self._wake.clear()
                if self.board.state.draining and not start.done():
                    self.board.change(drained=True)
                    return
                if not start.done() and (death := self.engine.dead_error()):
                    raise EngineStartError(death)
            await start
        except EngineStartError as error:
            self._faults.fail_engine(str(error))
            raise PodFailed(str(error)) from error
        finally:
            start.cancel()  # where nobody waits for it any more
            await asyncio.gather(start, return_exceptions=True)

    async def _start(self) -> None:
        if self.gather is not None:
            await self.gather()
        await self._acts.load()

    async def _wait(self, until: float | None, now: float) -> None:
        """Until something changes, ``until`` comes, or the engine is due to be looked at."""
        timeout_s = _HEALTH_PERIOD_S if until is None else min(_HEALTH_PERIOD_S, until - now)
        with suppress(TimeoutError):
            # not ``wait_for``: on 3.11 it swallows a cancel that comes with the wake
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._wake.wait()

    def _hung(self, error: str) -> None:
        self._faults.fail_engine(error)
        self._wake.set()

    def _note_generation(self) -> None:
        if self.board.desired:
            self.gate.generation = self.board.desired.generation
            self.gate.keeps = self.board.desired.interruption.mode is InterruptionMode.KEEP


def _without_failures(state: PodState) -> PodState:
    """``weights`` changed: everything may be tried again."""
    return replace(state, rejected=None, rejected_message=None, load_failures=(), stage_failures=())

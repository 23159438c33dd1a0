"""A pod around the attacked fakes: does operations, one after the other, in virtual time."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from rollout_pod.admission import Draining, DuplicateRequest, NotReady
from rollout_pod.engine.base import EngineDeadError, EngineRequest
from rollout_pod.front_ends.channel import CallFailed, ChannelClosed
from rollout_pod.front_ends.shared_gate import SharedGate
from rollout_pod.gate import Gate
from rollout_pod.generation import Generation
from rollout_pod.openai_call import GatedCall
from rollout_pod.protocol import (
    DesiredDocument,
    GenerateRequest,
    PushOffer,
    StateDocument,
    UpdatePhase,
)
from rollout_pod.protocol.push import OVER
from rollout_pod.supervisor.pushing import NoRanks, PushRefused, UnknownSession
from rollout_pod.supervisor.store import Store
from rollout_pod.supervisor.supervisor import Fenced, PodFailed, PreconditionFailed, Supervisor
from tests.support.attack import (
    AgentFault,
    CancelOne,
    Disconnect,
    Drain,
    DuplicateDocument,
    EngineFault,
    Let,
    OfferAgain,
    OfferPush,
    Operation,
    OtherOwner,
    PutDocument,
    Restart,
    StaleDocument,
    StalePrecondition,
    StartOpenAI,
    StartRequest,
)  # fmt: skip
from tests.support.attack import (
    DuplicateRequest as UseIdAgain,
)
from tests.support.attack_oracle import Caller, Oracle
from tests.support.attacked_fakes import AttackedAgent, AttackedEngine
from tests.support.front_ends import Attached, front_ends_of
from tests.support.virtual_time import NothingLeft, VirtualLoop, clock_of

SETTLE_S = 900.0
"""Within this, whatever was, a pod without faults is what was asked for."""


@dataclass
class Boot:
    """One life of the container."""

    engine: AttackedEngine
    supervisor: Supervisor
    generations: list[Generation]
    """Of the one process, or of each front end."""
    gates: list[Gate]
    """Likewise."""
    task: asyncio.Task[None]
    front_ends: list[Attached]

    def of(self, number: int) -> int:
        """Which of them the caller ``number`` reached."""
        return number % len(self.generations)


class AttackedPod:
    """Does operations and lets the oracle look after every turn of the loop.

    Raises ``AssertionError`` at the first thing that must not be.
    """

    def __init__(self, *, front_ends: int = 0) -> None:
        self._front_ends = front_ends
        self._stack = ExitStack()
        self.loop = VirtualLoop()
        self._stack.callback(self.loop.close)
        self._stack.enter_context(clock_of(self.loop))
        self._log = structlog.get_config()
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
        self._stack.callback(lambda: structlog.configure(**self._log))
        self._root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="attack-"))
        self._stack.callback(shutil.rmtree, self._root)
        self._ids = itertools.count()
        self.agent = AttackedAgent()
        self.oracle = Oracle(self.loop)
        self.callers: list[Caller] = []
        self.offered: PushOffer | None = None
        self._folder = self._root / "0"
        self.boots = 0
        self.boot = self._run(self._start())
        self.loop.on_turn = self.oracle.look

    # -- operations

    def apply(self, operation: Operation) -> None:
        """Do it, and restart the container where it ended."""
        self._run(self._apply(operation))
        self._mind()
        self.oracle.look_closely()

    async def _apply(self, operation: Operation) -> None:
        match operation:
            case PutDocument() as put:
                current = self.oracle.desired
                generation = (current.generation if current else 0) + put.newer_by
                self._put(put.document(generation))
            case DuplicateDocument():
                if self.oracle.desired:
                    revision = self.state.revision
                    self._put(self.oracle.desired)
                    assert self.state.revision == revision, "an equal document is a no-op"
            case StaleDocument(behind):
                current = self.oracle.desired
                if current and current.generation >= behind:
                    self._refused(current, generation=current.generation - behind)
            case OtherOwner():
                current = self.oracle.desired
                if current:
                    self._refused(current, owner="somebody", generation=current.generation + 1)
            case StalePrecondition():
                current = self.oracle.desired
                if current:
                    self._refused(current, if_match=f"{self.state.boot_id}:0")
            case StartRequest() | StartOpenAI():
                self._call(operation)
            case UseIdAgain(n):
                caller = self._caller(n)
                if caller:
                    await self._use_again(caller)
            case Disconnect(n, harshly):
                caller = self._caller(n)
                if caller:
                    caller.left_at = self.loop.now
                    caller.gone.set()
                    if harshly:
                        caller.task.cancel()
            case CancelOne(n):
                caller = self._caller(n)
                if caller:
                    self._spawn_delete(caller)
            case EngineFault("dies"):
                self.boot.engine.kill("it died")
            case EngineFault("hangs"):
                self.boot.engine.hang()
            case EngineFault(kind, times):
                self.boot.engine.armed[kind] += times
            case AgentFault("loses its sessions"):
                self.agent.staged.clear()
            case AgentFault(kind, times):
                self.agent.armed[kind] += times
            case OfferPush() as offer:
                self._offer(offer)
            case OfferAgain(changed):
                self._offer_again(changed=changed)
            case Drain():
                self.oracle.draining = True
                self.boot.supervisor.begin_drain()
            case Restart(fresh):
                await self._restart(fresh=fresh)
            case Let(turns, seconds):
                for _ in range(turns):
                    await asyncio.sleep(0)
                if seconds:
                    await asyncio.sleep(seconds)

    # -- ends

    def settle(self, put: PutDocument, *, last: AgentFault | None = None) -> StateDocument:
        """Faults are over but for the ``last`` one, and this is asked for: it has to become so."""
        if self.boot.engine.hangs:  # it would be found, but only after loads that hang as well
            self.apply(Restart())
        self.boot.engine.armed.clear()
        self.agent.armed.clear()
        self.agent.send_script.clear()
        if last:
            self.apply(last)
        self.apply(put)
        end = self.loop.now + SETTLE_S
        while not self._is_settled(put):
            assert self.loop.now < end, f"not settled on {put}: {self.state}"
            if self.state.needs:  # a trainer that looks for it
                self.apply(OfferPush())
            self.apply(Let(seconds=0.5))
        self.apply(Let(seconds=15))
        assert self._is_settled(put), f"it did not stay so: {self.state}"
        return self.state

    def _is_settled(self, put: PutDocument) -> bool:
        state = self.state
        asked = (put.version, "Paused" if put.paused else "Serving", True)
        return (state.weight_version, state.phase, state.ready) == asked

    def close(self) -> None:
        """Nothing of it is left, neither in the registries nor of tasks."""
        try:
            open_callers = [c for c in self.callers if not c.task.done()]
            assert not open_callers, f"never answered: {open_callers}"
            self.boot.supervisor.begin_drain()
            self.oracle.draining = True
            self._run(self._end_boot())
            gate = self.boot.supervisor.gate
            assert (gate.unfinished, gate.parked, self.boot.engine.running) == (0, 0, 0)
            for generation in self.boot.generations:
                assert not generation._requests, "a request is still in the registry"
            for mine in self.boot.gates:
                assert (mine.unfinished, mine.parked) == (0, 0)
            assert all(c.task.done() for c in self.callers), "a caller was never answered"
            left = asyncio.all_tasks(self.loop)
            assert not left, f"tasks are left: {left}"
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Free everything without a look."""
        if self.loop.is_closed():
            return
        self.loop.on_turn = lambda: None
        self.boot.engine.kill("abandoned")
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        try:
            self._run(asyncio.wait(left, timeout=7200) if left else asyncio.sleep(0))
        except NothingLeft:
            pass  # what was broken stays so; the first error is the one to show
        finally:
            self._stack.close()

    # -- what is asked of the pod

    @property
    def state(self) -> StateDocument:
        """What the admin port says."""
        return self.boot.supervisor.board.document()

    def _put(self, document: DesiredDocument) -> None:
        self.boot.supervisor.put_desired(document)
        self.oracle.accepted(document)

    def _refused(
        self, current: DesiredDocument, *, if_match: str | None = None, **changes: Any
    ) -> None:
        """A document that would change everything must change nothing."""
        other = current.model_copy(
            update={"paused": not current.paused, "weights": None, **changes}
        )
        before = self.state
        try:
            self.boot.supervisor.put_desired(other, if_match=if_match)
        except (Fenced, PreconditionFailed):
            assert self.state == before, "a refused document changed something"
        else:
            raise AssertionError(f"taken into force: {other}")

    def _caller(self, n: int) -> Caller | None:
        alive = [c for c in self.callers if not c.task.done() and c.left_at is None]
        return alive[-1 - n] if n < len(alive) else None

    def _call(self, operation: StartRequest | StartOpenAI) -> None:
        number = next(self._ids)
        caller = Caller(
            f"r{number}", number, [7, number], operation, self.boot.engine, self.loop.now
        )
        if isinstance(operation, StartRequest) and operation.continues:
            cut = next((c for c in reversed(self.callers) if c.is_continuable), None)
            if cut:
                caller.prompt = cut.prompt
                caller.before = [*cut.before, *cut.tokens]
        run = self._openai if isinstance(operation, StartOpenAI) else self._native
        caller.task = self.loop.create_task(run(caller), name=f"caller {caller.request_id}")
        self.callers.append(caller)
        self.oracle.watch(caller)

    async def _native(self, caller: Caller) -> None:
        operation = caller.operation
        assert isinstance(operation, StartRequest)
        request = GenerateRequest.model_validate(
            {
                "request_id": caller.request_id,
                "prompt_token_ids": caller.prompt,
                "generated_token_ids": caller.before,
                "sampling_params": {"max_tokens": operation.tokens + len(caller.before)},
                "on_pause": "wait" if operation.waits else "return",
                "timeout_s": operation.timeout_s,
            }
        )
        boot = self.boot
        caller.answer = await boot.generations[boot.of(caller.number)].generate(
            request,
            gone=caller.until_gone,
            on_admit=caller.on_admit,
            on_delta=caller.on_delta if operation.stream else None,
        )

    async def _openai(self, caller: Caller) -> None:
        """As the engine's own server does it: pass by pass, until it does not go on."""
        assert isinstance(caller.operation, StartOpenAI)
        call = GatedCall(
            self.boot.gates[self.boot.of(caller.number)], returns_partials=False,
            timeout_s=caller.operation.timeout_s, on_answered=lambda *_: None,
        )  # fmt: skip
        left = caller.operation.tokens
        while True:

            def make(engine_id: str, left: int = left) -> EngineRequest:
                caller.engine_ids.append(engine_id)
                return EngineRequest(engine_id, [*caller.prompt, *caller.tokens], params=left)

            passage = await call.pass_gate(make, caller.gone)
            caller.passed(passage)
            left = caller.operation.tokens - len(caller.tokens)
            if not passage.goes_on or not left:
                return

    async def _use_again(self, caller: Caller) -> None:
        if isinstance(caller.operation, StartOpenAI) or not caller.is_registered(self.boot):
            return
        request = GenerateRequest.model_validate(
            {"request_id": caller.request_id, "prompt_token_ids": [1]}
        )
        try:
            # by the next front end, where there are several
            await self.boot.generations[self.boot.of(caller.number + 1)].generate(request)
        except DuplicateRequest:
            return
        except (NotReady, Draining):
            return
        raise AssertionError("an id that is alive was used again")

    def _spawn_delete(self, caller: Caller) -> None:
        boot = self.boot

        async def delete() -> None:
            try:
                answer = await boot.generations[boot.of(caller.number + 1)].cancel(
                    caller.request_id
                )
                if answer is None and boot.front_ends:
                    other = boot.front_ends[boot.of(caller.number + 1)].front_end
                    answer = await other.cancel(caller.request_id)
            except (EngineDeadError, ChannelClosed, CallFailed):
                return
            if answer is not None:
                caller.deleted = answer

        self.oracle.own(self.loop.create_task(delete(), name=f"delete {caller.request_id}"))

    # -- a trainer

    def _offer(self, operation: OfferPush) -> None:
        state = self.state
        version = operation.version or state.needs or state.desired_version or "base"
        self.offered = PushOffer(
            session=f"push-{next(self._ids)}",
            boot_id="before" if operation.old_boot else state.boot_id,
            version=version, bytes=1, tensors=1, transport="shared_memory", mode="bucketed",
        )  # fmt: skip
        self._take(self.offered, operation)

    def _take(self, offer: PushOffer, operation: OfferPush) -> None:
        """It is taken if, and only if, it is what the pod needs."""
        state = self.state
        is_taken = self._is_taken(offer)
        may = state.needs == offer.version and offer.boot_id == state.boot_id
        assert is_taken == may or self.boot.supervisor.board.state.transferring, state
        if is_taken:
            work = self._trainer(self.boot, offer.session, operation)
            self.oracle.own(self.loop.create_task(work, name=offer.session))

    def _is_taken(self, offer: PushOffer) -> bool:
        before = self.state
        try:
            self.boot.supervisor.pushes.offer(offer)
        except (PushRefused, NoRanks):
            assert self.state.revision == before.revision, "a refused offer changed something"
            return False
        return True

    async def _trainer(self, boot: Boot, session: str, operation: OfferPush) -> None:
        await asyncio.sleep(operation.after_s)
        fate = operation.fate
        if fate == "vanishes":
            return
        if fate == "gives up":
            with suppress(UnknownSession):
                boot.supervisor.pushes.give_up(session, "told to")
            fate = "untouched"
        self.agent.push(session, fate)

    def _offer_again(self, *, changed: bool) -> None:
        """Whatever comes of it, nothing is begun that was not before."""
        if self.offered is None:
            return
        known = self.boot.supervisor.board.session(self.offered.session)
        if known is None:
            self._take(self.offered, OfferPush())
            return
        offer = self.offered.model_copy(update={"bytes": 2}) if changed else self.offered
        before = self.state
        is_taken = self._is_taken(offer)
        assert self.state.revision == before.revision, "an offer was taken twice"
        over = known.phase in OVER and known.phase is not UpdatePhase.COMMITTED
        assert is_taken == (not changed and not over)

    # -- the container

    async def _start(self) -> Boot:
        self.boots += 1
        engine = AttackedEngine(broken=self.oracle.breaks, loads=self.oracle.loads)
        engine.agent = self.agent
        engine.turns = lambda: self.loop.turns
        gate = SharedGate(engine) if self._front_ends else Gate(engine)
        supervisor = Supervisor(
            engine,
            self.agent,
            Store(self._folder, first_desired=self._root / "first.json"),
            drain_timeout_s=1.0,
            heartbeat_timeout_s=60.0,
            gate=gate,
        )
        front_ends: list[Attached] = []
        if isinstance(gate, SharedGate):
            front_ends = front_ends_of(gate, engine, self._front_ends)
            generations = [each.generation for each in front_ends]
            gates = [each.front_end.gate for each in front_ends]
        else:
            generations = [Generation(engine, gate, max_model_len=lambda: 100_000)]
            gates = [gate]
        task = asyncio.get_running_loop().create_task(supervisor.run(), name="supervisor")
        boot = Boot(engine, supervisor, generations, gates, task, front_ends)
        self.oracle.booted(supervisor, engine)
        task.add_done_callback(self.oracle.exits)
        return boot

    async def _restart(self, *, fresh: bool) -> None:
        engine = self.boot.engine
        engine.kill("the container was killed")
        self.boot.task.cancel()
        await self._end_boot()
        if fresh:
            self._folder = self._root / str(self.boots)
            if self.oracle.desired:  # the operator writes it into an annotation of the new pod
                (self._root / "first.json").write_text(self.oracle.desired.model_dump_json())
            self.oracle.lost_its_files()
        self.boot = await self._start()

    async def _end_boot(self) -> None:
        """The process ends: connections break, and nothing of it goes on."""
        try:
            async with asyncio.timeout(1000):
                await self.boot.task
        except (PodFailed, asyncio.CancelledError):
            pass
        mine = [c.task for c in self.callers if c.engine is self.boot.engine]
        _, left = await asyncio.wait(mine, timeout=100) if mine else ((), ())
        for task in left:  # parked at a gate that is gone
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.oracle.join()
        for front_end in self.boot.front_ends:
            await front_end.end()
        await self.boot.engine.shutdown()

    def _mind(self) -> None:
        """Kubelet: a container that ended starts again."""
        task = self.boot.task
        if not task.done():
            return
        self.oracle.ended(None if task.cancelled() else task.exception())
        armed = self.boot.engine.armed
        self._run(self._restart(fresh=False))
        # what was armed for a boot that never came so far
        self.boot.engine.armed = +armed if armed["start fails"] else self.boot.engine.armed

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

"""The preparation of a version: it runs beside everything else, and touches nothing that serves."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from rollout_pod.engine.base import Engine, EngineError, StagingRefused
from rollout_pod.protocol import FetchProgress, PushOffer, UpdatePhase, UpdateState, WeightsRef
from rollout_pod.protocol.push import OVER
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.ports import WeightsAgent
from rollout_pod.supervisor.render import begin_update
from rollout_pod.supervisor.state import Stage, StageStatus
from rollout_pod.weights.agent_client import StageError, TransferError

log = structlog.get_logger(__name__)

_RETRY_BASE_S = 1.0
_RETRY_LIMIT_S = 30.0
_TELL_S = 10.0
_BEFORE_THE_GATE = (
    UpdatePhase.PREFETCHING, UpdatePhase.WAITING, UpdatePhase.AWAITING_PUSH, UpdatePhase.STAGED,
)  # fmt: skip

SUPERSEDED = "nobody wants this version any more: something else was asked for meanwhile"
"""Told to the sender of a session that the pod gives up."""


def update_news(board: Board, **news: object) -> UpdateState:
    """The present update's record with news: fields of it, or of its ``seconds``."""
    update = board.state.update
    if update is None:
        raise RuntimeError("no update goes on")
    seconds = {k: v for k, v in news.items() if k in type(update.seconds).model_fields}
    fields = {k: v for k, v in news.items() if k not in seconds}
    return update.model_copy(update=fields | {"seconds": update.seconds.model_copy(update=seconds)})


@dataclass
class Staging:
    """At most one preparation at a time."""

    board: Board
    engine: Engine
    agent: WeightsAgent
    wake: Callable[[], None]
    """Makes the supervisor plan again."""
    on_device: bool = False
    """Whether versions go on to the ranks' devices while the engine serves."""
    _sessions: int = 0
    _task: asyncio.Task[None] | None = None
    _left: list[asyncio.Task[None]] = field(default_factory=list)
    """What ends by itself, and was not joined yet."""

    async def prefetch(self, ref: WeightsRef) -> None:
        """Begin to prepare ``ref``; what was being prepared before is given up."""
        if not await self.give_up():
            return
        self._sessions += 1
        session = f"{self.board.boot_id[:12]}-{self._sessions}"
        self.board.change(stage=Stage(ref, session, StageStatus.RUNNING), update=self._begin(ref))
        self._task = asyncio.create_task(self._stage(ref, session), name=f"stage {session}")

    async def await_push(self, ref: WeightsRef) -> None:
        """Say that a trainer has to bring ``ref``; what was being prepared before is given up."""
        if not await self.give_up():
            return
        update = self._begin(ref).model_copy(update={"phase": UpdatePhase.AWAITING_PUSH})
        self.board.change(stage=Stage(ref, "", StageStatus.AWAITING), update=update)

    def take_push(self, ref: WeightsRef, offer: PushOffer) -> None:
        """A trainer holds ``ref``, and every rank has accepted its manifest: what the agent
        prepares meanwhile is not waited for any more.
        """
        self._leave_task()
        stage = self.board.state.stage
        if stage and stage.session and not stage.ref.is_pushed:
            tell = self._tell_agent(self.agent.discard(session=stage.session))
            self._left.append(asyncio.create_task(tell, name=f"discard {stage.session}"))
        update = self._begin(ref).model_copy(
            update={
                "phase": UpdatePhase.STAGED, "session": offer.session, "bytes": offer.bytes,
                "transport": offer.transport, "mode": offer.mode, "note": offer.reason,
            }
        )  # fmt: skip
        self.board.change(stage=Stage(ref, offer.session, StageStatus.READY), update=update)
        log.info("push offered", version=ref.version, session=offer.session)
        self.wake()

    def drop_push(self, session: str, phase: UpdatePhase, message: str) -> None:
        """A trainer's session ends before anything of it was loaded."""
        state = self.board.state
        stage, update = state.stage, state.update
        if stage is None or stage.session != session or state.transferring:
            return
        if state.transferred and state.loaded == stage.ref and state.committed != stage.ref:
            return  # every rank has it: it is about to be committed
        log.info("push dropped", version=stage.ref.version, session=session, reason=message)
        if update and update.session == session and update.phase not in OVER:
            update = update_news(self.board, phase=phase, message=message, finished_at=time.time())
        self.board.change(stage=None, update=update)
        self.wake()

    def _begin(self, ref: WeightsRef) -> UpdateState:
        state = self.board.state
        attempt = state.load_failures_of(ref) + 1
        return begin_update(ref, state.update, attempt=attempt, now_unix=time.time())

    async def _stage(self, ref: WeightsRef, session: str) -> None:
        """Owned by ``_task``; ends in a READY or a FAILED stage, unless another took its place."""
        desired = self.board.desired
        if desired is None:
            raise RuntimeError("a version is prepared without a desired document")
        path = ref.source.location if ref.source else self.engine.model_path()
        try:
            if path is None:
                raise StageError(
                    "the model's own checkpoint is not a local folder and cannot be loaded again: "
                    "give spec.model as a path",
                    kind="source",
                    retryable=False,
                )
            if desired.transport == "cuda_ipc" and ref == desired.weights:
                raise StageError(
                    "transport cuda_ipc is for trainers that push; the weights agent sends through "
                    "shared memory: ask for auto or shared_memory",
                    kind="source",
                    retryable=False,
                )
            staged = await self.agent.stage(
                session=session,
                version=ref.version,
                path=str(path),
                rank_sockets=self.engine.rank_sockets(),
                bucket_bytes=desired.bucket_bytes,
                timeout_s=desired.update_timeout_s,
                on_progress=lambda done, total: self._fetched(session, done, total),
            )
            on_device, note = await self._to_device(ref, session, desired.update_timeout_s)
        except StageError as error:
            self._failed(ref, session, str(error))
        except Exception as error:
            log.exception("prefetch failed unexpectedly", version=ref.version)
            self._failed(ref, session, f"{type(error).__name__}: {error}")
        else:
            if not self._is_current(session):
                return
            self.board.set(self.board.state.without_stage_failure(ref))
            self.board.change(
                stage=Stage(ref, session, StageStatus.READY, on_device=on_device),
                update=update_news(
                    self.board,
                    phase=UpdatePhase.STAGED,
                    note=note,
                    bytes=staged.bytes,
                    transport=staged.transport,
                    prefetch=staged.seconds,
                    progress=None,
                ),
            )
        finally:
            self.wake()

    async def _to_device(self, ref: WeightsRef, session: str, timeout_s: float) -> tuple[bool, str]:
        """Let every rank take the version to its device, where it may wait there. Returns whether
        it does, and why not where it should.

        Raises:
            StageError: it was begun and did not succeed; serving is not touched.
        """
        state = self.board.state
        if not self.on_device or not self._is_current(session):
            return False, ""
        if state.committed is None or state.poisoned or state.weights_asleep:
            return False, ""  # nothing is served that it could wait beside
        if state.stage_failure_of(ref)[0]:
            return False, "it waits in host memory: staging it failed before"
        try:
            await self.engine.stage_weights(session, version=ref.version, timeout_s=timeout_s)
        except StagingRefused as error:
            return False, f"it waits in host memory: {error}"
        except EngineError as error:
            # a rank that has begun would not load the session in the ordinary way
            await self._tell_agent(self.agent.discard(session=session))
            raise StageError(str(error), kind="transfer", retryable=True) from error
        try:
            await self.agent.send(session=session, timeout_s=timeout_s)
        except TransferError as error:
            raise StageError(str(error), kind="transfer", retryable=True) from error
        return True, ""

    def _fetched(self, session: str, done: int, total: int) -> None:
        """A counter: whoever waits for news is not told."""
        if self._is_current(session):
            progress = FetchProgress(bytes=done, total=total)
            self.board.change(update=update_news(self.board, progress=progress))

    def _failed(self, ref: WeightsRef, session: str, message: str) -> None:
        """Serving goes on; the plan tries again when the time has come."""
        if not self._is_current(session):
            return
        state = self.board.state
        failures, _ = state.stage_failure_of(ref)
        delay = min(_RETRY_LIMIT_S, _RETRY_BASE_S * 2**failures)
        retry_at = time.monotonic() + delay
        log.warning("prefetch failed", version=ref.version, error=message, retry_in_s=delay)
        self.board.set(state.with_stage_failure(ref, retry_at=retry_at))
        self.board.change(
            stage=Stage(ref, session, StageStatus.FAILED, retry_at, message),
            update=update_news(
                self.board, phase=UpdatePhase.WAITING, message=message, progress=None
            ),
        )

    async def give_up(self, why: str = SUPERSEDED) -> bool:
        """End the preparation that goes on, if one does. False if a trainer's offer took its place
        meanwhile: that one stays.
        """
        stage = self.board.state.stage
        self._leave_task()
        left, self._left = self._left, []
        if left:
            await asyncio.gather(*left, return_exceptions=True)
        if stage and not stage.ref.is_pushed and stage.status is not StageStatus.FAILED:
            await self._tell_agent(self.agent.discard(session=stage.session))
        if self.board.state.stage is not stage:
            return self.board.state.stage is None
        if stage and stage.ref.is_pushed and stage.session:
            self.drop_push(stage.session, UpdatePhase.SUPERSEDED, why)
        self.board.change(stage=None)
        return True

    def _leave_task(self) -> None:
        """Cancel the agent's preparation; ``give_up`` joins it."""
        task, self._task = self._task, None
        if task:
            task.cancel()
            self._left.append(task)

    def _is_current(self, session: str) -> bool:
        stage = self.board.state.stage
        return stage is not None and (stage.session, stage.status) == (session, StageStatus.RUNNING)

    async def forget(self) -> None:
        """Nobody wants what was prepared any more."""
        state = self.board.state
        update = state.update
        if (
            state.stage
            and update
            and update.target == state.stage.ref.version
            and update.phase in _BEFORE_THE_GATE
        ):
            self.board.change(
                update=update_news(
                    self.board,
                    phase=UpdatePhase.SUPERSEDED,
                    finished_at=time.time(),
                    progress=None,
                )
            )
        await self.give_up()

    async def keep(self, stage: Stage) -> None:
        """The stage's version is committed: what the agent has of it is worth keeping."""
        if stage.ref.is_pushed:
            return
        session = stage.session
        await self._tell_agent(self.agent.committed(session=session))

    async def _tell_agent(self, call: Awaitable[None]) -> None:
        """For what the agent may miss without harm: it forgets sessions by itself."""
        try:
            async with asyncio.timeout(_TELL_S):
                await call
        except (StageError, TransferError, TimeoutError, OSError) as error:
            log.info("agent not told", error=str(error))

"""The preparation of a version: it runs beside everything else, and touches nothing that serves."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from rollout_pod.engine.base import Engine
from rollout_pod.protocol import FetchProgress, UpdatePhase, UpdateState, WeightsRef
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.ports import WeightsAgent
from rollout_pod.supervisor.render import begin_update
from rollout_pod.supervisor.state import Stage, StageStatus
from rollout_pod.weights.agent_client import StageError, TransferError

log = structlog.get_logger(__name__)

_RETRY_BASE_S = 1.0
_RETRY_LIMIT_S = 30.0
_TELL_S = 10.0
_BEFORE_THE_GATE = (UpdatePhase.PREFETCHING, UpdatePhase.WAITING, UpdatePhase.STAGED)


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
    _sessions: int = 0
    _task: asyncio.Task[None] | None = None

    async def prefetch(self, ref: WeightsRef) -> None:
        """Begin to prepare ``ref``; what was being prepared before is given up."""
        await self.give_up()
        self._sessions += 1
        session = f"{self.board.boot_id[:12]}-{self._sessions}"
        state = self.board.state
        self.board.change(
            stage=Stage(ref, session, StageStatus.RUNNING),
            update=begin_update(
                ref,
                state.update,
                attempt=state.load_failures_of(ref) + 1,
                now_unix=time.time(),
            ),
        )
        self._task = asyncio.create_task(self._stage(ref, session), name=f"stage {session}")

    async def _stage(self, ref: WeightsRef, session: str) -> None:
        """Owned by ``_stage_task``; ends in a READY or a FAILED stage."""
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
            staged = await self.agent.stage(
                session=session,
                version=ref.version,
                path=str(path),
                rank_sockets=self.engine.rank_sockets(),
                bucket_bytes=desired.bucket_bytes,
                timeout_s=desired.update_timeout_s,
                on_progress=lambda done, total: self._fetched(session, done, total),
            )
        except StageError as error:
            self._failed(ref, session, str(error))
        except Exception as error:
            log.exception("prefetch failed unexpectedly", version=ref.version)
            self._failed(ref, session, f"{type(error).__name__}: {error}")
        else:
            self.board.set(self.board.state.without_stage_failure(ref))
            self.board.change(
                stage=Stage(ref, session, StageStatus.READY),
                update=update_news(
                    self.board,
                    phase=UpdatePhase.STAGED,
                    bytes=staged.bytes,
                    transport=staged.transport,
                    mode="bucketed",
                    prefetch=staged.seconds,
                    progress=None,
                ),
            )
        finally:
            self.wake()

    def _fetched(self, session: str, done: int, total: int) -> None:
        """A counter: whoever waits for news is not told."""
        stage = self.board.state.stage
        if stage and stage.session == session and stage.status is StageStatus.RUNNING:
            progress = FetchProgress(bytes=done, total=total)
            self.board.change(update=update_news(self.board, progress=progress))

    def _failed(self, ref: WeightsRef, session: str, message: str) -> None:
        """Serving goes on; the plan tries again when the time has come."""
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

    async def give_up(self) -> None:
        """End the preparation that goes on, if one does."""
        task, self._task = self._task, None
        stage = self.board.state.stage
        if task and not task.done():
            task.cancel()
        if task:
            await asyncio.gather(task, return_exceptions=True)
        if stage and stage.status is not StageStatus.FAILED:
            await self._tell_agent(self.agent.discard(session=stage.session))
        self.board.change(stage=None)

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

    async def keep(self, session: str) -> None:
        """The session's version is committed: its bytes are worth keeping."""
        await self._tell_agent(self.agent.committed(session=session))

    async def _tell_agent(self, call: Awaitable[None]) -> None:
        """For what the agent may miss without harm: it forgets sessions by itself."""
        try:
            async with asyncio.timeout(_TELL_S):
                await call
        except (StageError, TransferError, TimeoutError, OSError) as error:
            log.info("agent not told", error=str(error))

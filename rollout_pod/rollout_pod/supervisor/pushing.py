"""The door at which trainers come in: what they are told, and whether an offer is taken.

What follows from an offer is the plan's business, as with a version that the agent staged.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from rollout_pod.engine.base import Engine, EngineError
from rollout_pod.protocol import (
    ProblemCode,
    PushOffer,
    PushStatus,
    PushTarget,
    UpdatePhase,
    UpdateState,
)
from rollout_pod.protocol.push import OVER
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.faults import Faults
from rollout_pod.supervisor.pushed import is_at_hand, needed_push
from rollout_pod.supervisor.staging import Staging
from rollout_pod.supervisor.state import EngineStatus, StageStatus, wanted_weights

_REMEMBERED = 32
"""Offers, for senders that ask again because an answer was lost."""


class PushRefused(Exception):
    """An offer that is not taken; nothing was changed."""

    def __init__(self, code: ProblemCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class NoRanks(Exception):
    """The engine is not up: there is nobody to push to."""


class UnknownSession(Exception):
    """No session of this name was offered since the pod started."""


@dataclass
class Pushing:
    """All of it on the event loop's thread; only ``ended`` waits."""

    board: Board
    engine: Engine
    staging: Staging
    faults: Faults
    _offers: OrderedDict[str, PushOffer] = field(default_factory=OrderedDict)

    def target(self, *, shm_dir: Path) -> PushTarget:
        """Where the ranks are, and what they wait for.

        Raises:
            NoRanks: the engine is not up.
        """
        self._check_up()
        state, desired = self.board.state, self.board.desired
        sockets = tuple(str(path.absolute()) for path in self.engine.rank_sockets())
        document = self.board.document()
        return PushTarget(
            boot_id=self.board.boot_id,
            world=state.info.world_size if state.info else len(sockets),
            sockets=sockets,
            shm_dir=str(shm_dir),
            bucket_bytes=desired.bucket_bytes if desired else 256 << 20,
            transport=desired.transport if desired else "auto",
            desired_version=document.desired_version,
            needs=document.needs,
            weight_version=document.weight_version,
            update_timeout_s=desired.update_timeout_s if desired else 600.0,
            gpu_uuids=self.engine.gpu_uuids(),
        )

    async def compare_parts(self, offer: PushOffer) -> None:
        """Of a session of several senders: see that all ranks have accepted it, and the same
        tensors. Only the ranks know: each sender knows of its own.

        Raises:
            NoRanks: they cannot be asked.
            PushRefused: which of them have not.
        """
        self._check_up()
        info = self.board.state.info
        if offer.ranks is None or offer.session in self._offers or info is None:
            return
        if set(offer.ranks) >= set(range(info.world_size)):
            return
        try:
            accepted = await self.engine.accepted_manifests(offer.session)
        except EngineError as error:
            raise NoRanks(str(error)) from error
        missing = [str(rank) for rank, manifest in enumerate(accepted) if not manifest]
        if missing:
            raise PushRefused(
                ProblemCode.NOT_ACCEPTED,
                f"session {offer.session}: rank {', '.join(missing)} accepted nothing of it: offer "
                "it when the other senders' ranks have accepted theirs",
            )
        if len(set(accepted)) > 1:
            raise PushRefused(
                ProblemCode.NOT_ACCEPTED,
                f"session {offer.session}: its senders show different tensors, or the same in "
                "another order: all of them send the same ones in one order",
            )

    def offer(self, offer: PushOffer) -> PushStatus:
        """Take an offer; the same one again is the same.

        Raises:
            NoRanks: the engine is not up.
            PushRefused: why not.
        """
        self._check_up()
        known = self._offers.get(offer.session)
        if known is not None:
            return self._again(known, offer)
        state, desired = self.board.state, self.board.desired
        if offer.boot_id != self.board.boot_id:
            raise PushRefused(
                ProblemCode.STALE_SESSION,
                f"session {offer.session} is of an earlier start of the pod: read the target again",
            )
        if state.draining:
            raise PushRefused(ProblemCode.DRAINING, "this pod ends: push to the one that follows")
        if state.weights_asleep:
            raise PushRefused(
                ProblemCode.ASLEEP, "the weights sleep: wake them first, then offer again"
            )
        needed = needed_push(desired, state)
        if desired is None or needed is None or needed.version != offer.version:
            raise self._not_needed(offer.version, needed.version if needed else None)
        if state.transferring:
            raise PushRefused(
                ProblemCode.PUSH_IN_PROGRESS,
                "another version is being loaded just now: offer again when that is over",
            )
        if desired.transport not in ("auto", offer.transport):
            raise PushRefused(
                ProblemCode.NOT_SUPPORTED,
                f"transport: the document names {desired.transport}, this session uses "
                f"{offer.transport}{': ' + offer.reason if offer.reason else ''}; mend the cause, "
                "or ask for transport auto",
            )
        self._offers[offer.session] = offer
        while len(self._offers) > _REMEMBERED:
            self._offers.popitem(last=False)
        self.staging.take_push(needed, offer)
        return self.status(offer.session)

    def give_up(self, session: str, reason: str) -> PushStatus:
        """The sender ends its session. Of one that is being loaded the ranks know already.

        Raises:
            UnknownSession: as it says.
        """
        self._record(session)
        message = f"the sender gave up: {reason or 'it says no more'}"
        self.faults.fail_offer(session, message)
        self.staging.drop_push(session, UpdatePhase.GIVEN_UP, message)
        return self.status(session)

    def status(self, session: str) -> PushStatus:
        """How far a session came.

        Raises:
            UnknownSession: as it says.
        """
        update = self._record(session)
        return PushStatus(
            session=session,
            version=update.target,
            phase=update.phase,
            over=update.phase in OVER,
            message=update.message,
            state=self.board.document(),
        )

    async def ended(self, session: str, *, timeout_s: float) -> PushStatus:
        """``status``, held until the session is over or ``timeout_s`` have passed.

        Raises:
            UnknownSession: as it says.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status(session)
            left = deadline - time.monotonic()
            if status.over or left <= 0 or self.board.is_closed:
                return status
            seen = f"{status.state.boot_id}:{status.state.revision}"
            await self.board.wait_news(after=seen, timeout_s=left)

    # --- inside ---

    def _check_up(self) -> None:
        if self.board.state.engine is not EngineStatus.UP:
            raise NoRanks("the engine is not up: there are no ranks to push to yet")

    def _record(self, session: str) -> UpdateState:
        update = self.board.session(session)
        if update is None:
            raise UnknownSession(f"session {session!r} is not known since this start of the pod")
        return update

    def _again(self, known: PushOffer, offer: PushOffer) -> PushStatus:
        if known != offer:
            raise PushRefused(
                ProblemCode.STALE_SESSION,
                f"session {offer.session} was offered with other contents: take another name",
            )
        status = self.status(offer.session)
        if status.over and status.phase is not UpdatePhase.COMMITTED:
            raise PushRefused(
                ProblemCode.STALE_SESSION,
                f"session {offer.session} is over ({status.message or status.phase}): begin "
                "another one",
            )
        return status

    def _not_needed(self, version: str, needs: str | None) -> PushRefused:
        """Why it is not taken, and what would be."""
        state, desired = self.board.state, self.board.desired
        stage = state.stage
        live = stage is not None and stage.ref.is_pushed and stage.status is StageStatus.READY
        if live and stage and stage.ref.version == version and is_at_hand(state, stage.ref):
            return PushRefused(
                ProblemCode.PUSH_IN_PROGRESS,
                f"{version} is being pushed by session {stage.session}: wait until that is over",
            )
        if state.rejected is not None and state.rejected.version == version:
            why = f"{version} was rejected: {state.rejected_message}"
        else:
            wanted = wanted_weights(desired).version if desired else None
            why = f"the pod asks for {wanted}, not for {version}"
        needed = f"it needs {needs}" if needs else "it waits for no push"
        return PushRefused(ProblemCode.NOT_DESIRED, f"{why}; {needed}")

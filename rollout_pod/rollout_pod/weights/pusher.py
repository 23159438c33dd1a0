"""A trainer's whole part in push mode: wait until the pod needs a version, send it, see it
committed.
"""

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from rollout_pod.protocol import (
    ProblemCode,
    PushOffer,
    PushTarget,
    StateDocument,
)
from rollout_pod.weights.device import Device, DeviceError
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.push_errors import (
    NotDesired,
    PodGone,
    PushError,
    PushFailed,
    PushRefused,
    PushTimeout,
)
from rollout_pod.weights.push_link import PushLink, Refusal, Watch
from rollout_pod.weights.segment import RoomError
from rollout_pod.weights.sender import ManifestError, RanksError, SessionError
from rollout_pod.weights.trainer import Mode, SentWeights, Tensors, Transport, WeightSender

__all__ = [
    "NotDesired",
    "PodGone",
    "PushError",
    "PushFailed",
    "PushRefused",
    "PushTimeout",
    "Pushed",
    "Pusher",
]

RUN_DIR: Final = "ROLLOUT_RUN_DIR"
"""The environment variable that names the run folder; the operator sets it in every container."""
SHM_DIR: Final = "ROLLOUT_SHM_DIR"
"""The same for the memory that is shared with the ranks."""

HOLD_S: Final = 10.0
RETRY_S: Final = 0.2
"""Between two looks at a pod that is not there, or whose ranks are busy."""
LAST_WORDS_S: Final = 5.0
"""How long the pod may take to say how a failed session ended."""

_PASSING: Final = frozenset(
    {
        ProblemCode.PUSH_IN_PROGRESS, ProblemCode.STALE_SESSION, ProblemCode.ENGINE_NOT_UP,
        ProblemCode.ASLEEP,
    }
)  # fmt: skip
"""Refusals that end by themselves."""


@dataclass(frozen=True)
class Pushed:
    """A version that is committed on every rank.

    ``sent`` is None where the pod had it already and nothing was sent; ``state`` is the pod's
    state document just after the commit.
    """

    version: str
    sent: SentWeights | None
    state: StateDocument


class _NotNow(Exception):
    """Nothing was begun; it may be tried again."""


class Pusher:
    """Pushes versions to the pod whose run folder this process sees, one after the other.

    What is made once (connections, mapped memory, exported handles) is kept for the next version,
    until the pod starts anew.

    Args:
        run_dir: the pod's run folder; None takes ``$ROLLOUT_RUN_DIR``.
        shm_dir: memory that is shared with the ranks; None takes ``$ROLLOUT_SHM_DIR``, else what
            the pod says.
        device: the GPU that the tensors are on (``weights.cuda.Cuda``); None if they are on the
            host.
        transport: as in ``WeightSender``; ``auto`` takes what the pod's document names.
        mode: as in ``WeightSender``.
        bucket_bytes: None takes what the pod's document names.
        ranks: global numbers of the ranks that this process sends to, where several processes
            serve one session; None for all. See ``join``.

    Raises:
        ValueError: no run folder is named; or as ``WeightSender``.
    """

    def __init__(
        self,
        run_dir: Path | str | None = None,
        *,
        shm_dir: Path | str | None = None,
        device: Device | None = None,
        transport: Transport = "auto",
        mode: Mode = "auto",
        bucket_bytes: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        where = run_dir or os.environ.get(RUN_DIR)
        if not where:
            raise ValueError(f"run_dir: name the pod's run folder, or set {RUN_DIR}")
        shared = shm_dir or os.environ.get(SHM_DIR)
        self._link = PushLink(Path(where))
        self._shm_dir = Path(shared) if shared else None
        self._device = device
        self._transport: Transport = transport
        self._mode: Mode = mode
        self._bucket_bytes = bucket_bytes
        self._ranks = tuple(ranks) if ranks is not None else None
        self._sender: WeightSender | None = None
        self._made_for: tuple[object, ...] = ()
        self._cancelled = threading.Event()
        self._busy = threading.Lock()

    # --- what the pod says ---

    def target(self) -> PushTarget:
        """Where the ranks are and what they wait for.

        Raises:
            PodGone: nobody answers.
            PushRefused: there are no ranks yet.
        """
        try:
            return self._link.target()
        except Refusal as error:
            raise PushRefused(str(error)) from error

    def state(self, *, after: str | None = None, timeout_s: float = 0.0) -> StateDocument:
        """The pod's state document; with ``after`` (``<boot_id>:<revision>``) held until there is
        news, or ``timeout_s`` (at most 60) are over.

        Raises:
            PodGone: nobody answers.
        """
        return self._link.state(after=after, hold_s=timeout_s)

    # --- pushing ---

    def push(
        self,
        version: str,
        tensors: Tensors,
        *,
        manifest: Manifest | None = None,
        timeout_s: float = 600.0,
        session: str | None = None,
        on_accepted: Callable[[str], None] | None = None,
    ) -> Pushed:
        """Wait until the pod needs ``version``, send it, and return when it is committed on every
        rank. Blocks. A version that is committed already is not sent again.

        Args:
            version: its name, as it was asked for.
            tensors: see ``WeightSender.send``. They must not change meanwhile.
            manifest: see ``WeightSender.send``.
            timeout_s: for all of it, the wait included.
            session: its name, where several processes serve one; None makes one.
            on_accepted: called with the session when all ranks have accepted its manifest, before
                the pod is told: where the others of the session are waited for.

        Raises:
            NotDesired: at the deadline the pod asks for another version.
            PushRefused: nothing was sent, serving was not interrupted.
            PushFailed: the update began and did not commit.
            PushTimeout: the time is over.
            PodGone: the pod ended, or is not there.
        """
        deadline = time.monotonic() + timeout_s
        with self._one():
            while True:
                target, state = self._needed(version, deadline)
                if target is None:
                    return Pushed(version, None, state)
                try:
                    return self._push(
                        target, version, tensors, manifest, deadline,
                        session or uuid.uuid4().hex, on_accepted,
                    )  # fmt: skip
                except _NotNow as error:
                    self._pause(deadline, f"{version}: not begun: {error}", state)

    async def push_async(
        self,
        version: str,
        tensors: Tensors,
        *,
        manifest: Manifest | None = None,
        timeout_s: float = 600.0,
        session: str | None = None,
        on_accepted: Callable[[str], None] | None = None,
    ) -> Pushed:
        """``push`` on a thread, where ``tensors`` and ``on_accepted`` are called too. Cancelled, it
        gives the session up before it returns.
        """
        work = asyncio.ensure_future(
            asyncio.to_thread(
                self.push,
                version,
                tensors,
                manifest=manifest,
                timeout_s=timeout_s,
                session=session,
                on_accepted=on_accepted,
            )
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()
            raise

    def join(
        self,
        version: str,
        tensors: Tensors,
        *,
        session: str,
        manifest: Manifest | None = None,
        timeout_s: float = 600.0,
        on_accepted: Callable[[str], None] | None = None,
    ) -> SentWeights:
        """Send to this process's ``ranks`` as a part of another process's ``push`` with the same
        ``session``; returns when these ranks have loaded it. Whether it is committed is the other's
        to know.

        Raises:
            PushRefused, PushFailed, PodGone: as ``push``.
        """
        deadline = time.monotonic() + timeout_s
        with self._one():
            target = self.target()
            sender = self._sender_for(target)
            try:
                return sender.send(
                    version, tensors, manifest=manifest, session=session,
                    timeout_s=deadline - time.monotonic(), on_accepted=on_accepted,
                )  # fmt: skip
            except (RanksError, ManifestError, RoomError, DeviceError) as error:
                raise PushRefused(str(error)) from error
            except SessionError as error:
                raise PushFailed(str(error)) from error

    def cancel(self) -> None:
        """Let the push that is on give up, from any thread."""
        self._cancelled.set()
        sender = self._sender
        if sender is not None:
            sender.cancel.set()

    def close(self) -> None:
        """Let the ranks unmap this process's memory, and close everything. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # --- the steps ---

    def _needed(self, version: str, deadline: float) -> tuple[PushTarget | None, StateDocument]:
        """The target as soon as it needs ``version``; None if that is committed already."""
        after: str | None = None
        state: StateDocument | None = None
        gone: PodGone | None = None
        while True:
            self._check_cancelled(state)
            left = deadline - time.monotonic()
            if left <= 0:
                raise _late(version, state, gone)
            try:
                state = self._link.state(after=after, hold_s=min(HOLD_S, left))
                gone = None
                if state.weight_version == version:
                    return None, state
                if state.needs == version:
                    target = self._link.target()
                    if target.needs == version:
                        return target, state
                    continue
            except PodGone as error:
                gone, after = error, None
            except Refusal as error:
                if error.problem.code not in _PASSING:
                    raise PushRefused(str(error), state) from error
                after = None
            else:
                after = f"{state.boot_id}:{state.revision}"
                if state.rejected and state.rejected.version == version == state.desired_version:
                    raise PushRefused(
                        f"{version} was rejected: {state.rejected_message}; ask for another "
                        "version, or change its step, to have it tried again",
                        state,
                    )
                continue
            self._cancelled.wait(min(RETRY_S, max(left, 0.0)))

    def _push(
        self,
        target: PushTarget,
        version: str,
        tensors: Tensors,
        manifest: Manifest | None,
        deadline: float,
        session: str,
        on_accepted: Callable[[str], None] | None,
    ) -> Pushed:
        sender = self._sender_for(target)
        watch = Watch(self._link, session, deadline=deadline + LAST_WORDS_S)
        watch.on_trouble = sender.cancel

        def accepted(name: str) -> None:
            if on_accepted is not None:
                on_accepted(name)
            agreed = sender.accepted
            assert agreed is not None  # noqa: S101 - set before this is called
            self._link.offer(
                PushOffer(
                    session=name,
                    boot_id=target.boot_id,
                    version=version,
                    bytes=agreed.bytes,
                    tensors=agreed.tensors,
                    transport=agreed.transport,
                    mode=agreed.mode,
                    reason=agreed.reason[:4000],
                )
            )
            watch.start()

        began = False
        try:
            sent = sender.send(
                version, tensors, manifest=manifest, session=session,
                timeout_s=deadline - time.monotonic(), on_accepted=accepted,
            )  # fmt: skip
        except BaseException as error:
            began = watch.ident is not None
            self._give_up(session, error)
            if began:
                watch.join(LAST_WORDS_S)
            raise self._judged(error, watch, version, began=began) from error
        finally:
            sender.cancel.clear()
        watch.ended.wait(max(0.0, deadline - time.monotonic()) + LAST_WORDS_S)
        status = watch.status
        if watch.is_committed and status is not None:
            return Pushed(version, sent, status.state)
        self._give_up(session, TimeoutError("the sender's deadline"))
        raise self._judged(TimeoutError("not committed in time"), watch, version, began=True)

    def _sender_for(self, target: PushTarget) -> WeightSender:
        """The one of the last push, unless the pod is another, or asks for something else."""
        transport = self._checked_transport(target)
        bucket_bytes = self._bucket_bytes or target.bucket_bytes
        shm_dir = self._shm_dir or Path(target.shm_dir)
        key = (target.boot_id, transport, bucket_bytes, shm_dir)
        if self._sender is not None and self._made_for == key:
            return self._sender
        if self._sender is not None:
            self._sender.close()
        numbers = range(target.world) if self._ranks is None else self._ranks
        wrong = [rank for rank in numbers if not 0 <= rank < len(target.sockets)]
        if wrong:
            raise PushRefused(f"ranks: the pod has {target.world}, none is numbered {wrong[0]}")
        self._sender = WeightSender(
            [Path(target.sockets[rank]) for rank in numbers], shm_dir=shm_dir,
            transport=transport, mode=self._mode, bucket_bytes=bucket_bytes, device=self._device,
            ranks=self._ranks, world=target.world,
        )  # fmt: skip
        self._made_for = key
        return self._sender

    def _checked_transport(self, target: PushTarget) -> Transport:
        """What both sides ask for; refused where it cannot work."""
        if "auto" not in (self._transport, target.transport) and (
            self._transport != target.transport
        ):
            raise PushRefused(
                f"transport: the sender names {self._transport}, the pod's document "
                f"{target.transport}: let one of them be auto"
            )
        asked = target.transport if self._transport == "auto" else self._transport
        if asked != "cuda_ipc":
            return asked
        if self._device is None:
            raise PushRefused(
                "transport cuda_ipc does not work: the tensors are on the host; give the sender "
                "their GPU (device), or ask for transport auto"
            )
        mine = self._device.uuid
        numbers = range(target.world) if self._ranks is None else self._ranks
        other = [rank for rank in numbers if target.gpu_uuids[rank] != mine]
        if other:
            there = target.gpu_uuids[other[0]] or "no GPU"
            raise PushRefused(
                f"transport cuda_ipc does not work: the sender is on {mine}, rank {other[0]} on "
                f"{there}; place both on one GPU, or ask for transport auto"
            )
        return asked

    def _judged(
        self, error: BaseException, watch: Watch, version: str, *, began: bool
    ) -> BaseException:
        """What the caller is told of a send that raised."""
        state = watch.status.state if watch.status else None
        if not isinstance(error, Exception):
            return error
        if self._cancelled.is_set():
            return PushFailed(f"{version}: given up by its sender", state)
        if watch.gone is not None:
            return PodGone(f"{version}: {watch.gone}", state)
        if began:
            words = watch.status.message if watch.status and watch.status.over else ""
            text = f"{version}: {words or error}"
            late = isinstance(error, TimeoutError) and not words
            return PushTimeout(text, state) if late else PushFailed(text, state)
        if isinstance(error, Refusal):
            code = error.problem.code
            if code in _PASSING:
                return _NotNow(str(error))
            if code is ProblemCode.NOT_DESIRED:
                return NotDesired(f"{version}: {error}", state)
            return PushRefused(f"{version}: {error}", state)
        if isinstance(error, RanksError) and error.retryable:
            return _NotNow(str(error))
        if isinstance(error, ManifestError | RanksError | RoomError | DeviceError):
            return PushRefused(f"{version}: {error}", state)
        return error

    def _give_up(self, session: str, error: BaseException) -> None:
        # it may never have known of it, or be gone: the ranks were told as well
        with suppress(PushError, Refusal):
            self._link.give_up(session, f"{type(error).__name__}: {error}")

    def _pause(self, deadline: float, why: str, state: StateDocument) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PushTimeout(why, state)
        self._cancelled.wait(min(RETRY_S, left))
        self._check_cancelled(state)

    def _check_cancelled(self, state: StateDocument | None) -> None:
        if self._cancelled.is_set():
            raise PushFailed("given up by its sender", state)

    def _one(self) -> "_One":
        return _One(self._busy, self._cancelled)


class _One:
    """One push at a time; a cancel is of the push that is on."""

    def __init__(self, lock: threading.Lock, cancelled: threading.Event) -> None:
        self._lock = lock
        self._cancelled = cancelled

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise PushRefused("this pusher is pushing already: one version after the other")
        self._cancelled.clear()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _late(version: str, state: StateDocument | None, gone: PodGone | None) -> PushError:
    """Why ``version`` was not needed until the deadline."""
    if gone is not None:
        return PodGone(f"{version}: {gone}", state)
    if state is None:
        return PushTimeout(f"{version}: the pod said nothing in time")
    if state.desired_version != version and state.needs != version:
        needs = f", and needs {state.needs}" if state.needs else ""
        return NotDesired(
            f"the pod asks for {state.desired_version}{needs}, not for {version}: ask for it first",
            state,
        )
    update = state.update
    what = f", its update is {update.phase}: {update.message}" if update else ""
    return PushTimeout(f"{version}: the pod is {state.phase} and does not wait for it{what}", state)

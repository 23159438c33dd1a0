"""A trainer's whole part in push mode: wait until the pod needs a version, send it, see it
committed.
"""

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from rollout_pod.protocol import PushOffer, PushTarget, StateDocument
from rollout_pod.weights.device import Device, DeviceError
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.on_thread import on_thread
from rollout_pod.weights.push_errors import (
    NotDesired,
    PodGone,
    PushError,
    PushFailed,
    PushRefused,
    PushTimeout,
)
from rollout_pod.weights.push_link import PushLink, Refusal, Watch
from rollout_pod.weights.push_placement import Placement
from rollout_pod.weights.push_verdict import NotNow, after_the_offer, before_the_offer
from rollout_pod.weights.push_waiting import RETRY_S, until_needed
from rollout_pod.weights.segment import RoomError
from rollout_pod.weights.session_errors import ManifestError, RanksError, SessionError
from rollout_pod.weights.trainer import Mode, SentWeights, Tensors, Transport

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

LAST_WORDS_S: Final = 5.0
"""How long the pod may take to say how a failed session ended."""


@dataclass(frozen=True)
class Pushed:
    """A version that is committed on every rank.

    ``sent`` is None where the pod had it already and nothing was sent; ``state`` is the pod's
    state document just after the commit.
    """

    version: str
    sent: SentWeights | None
    state: StateDocument


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
        self._placement = Placement(
            Path(shared) if shared else None, device, transport, mode, bucket_bytes,
            tuple(ranks) if ranks is not None else None,
        )  # fmt: skip
        self._busy = threading.Lock()
        """Held by the push that is on."""
        self._guard = threading.Lock()
        self._stop: threading.Event | None = None
        """Ends the push that is on; None where none is. Behind ``_guard``, as is what it does to
        the sender's ``cancel``."""

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
        return self._run(
            threading.Event(), version, tensors, manifest, timeout_s, session, on_accepted
        )

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
        stop = threading.Event()

        return await on_thread(
            lambda: self._run(stop, version, tensors, manifest, timeout_s, session, on_accepted),
            lambda: self._cancel(stop),
        )

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
        stop = threading.Event()
        with self._alone(stop):
            sender = self._placement.sender_for(self.target())
            if stop.is_set():
                raise PushFailed(f"{version}: given up by its sender")
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
        """Let the push or ``join`` that is on give up, from any thread. Where none is, nothing."""
        stop = self._stop
        if stop is not None:
            self._cancel(stop)

    def _cancel(self, stop: threading.Event) -> None:
        with self._guard:
            stop.set()
            sender = self._placement.sender
            if self._stop is stop and sender is not None:
                sender.cancel.set()

    def close(self) -> None:
        """Let the ranks unmap this process's memory, and close everything. Idempotent.

        Raises:
            PushRefused: a push is on: cancel it, and close when it has ended.
        """
        with self._alone(threading.Event()):
            self._placement.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # --- the steps ---

    def _run(
        self,
        stop: threading.Event,
        version: str,
        tensors: Tensors,
        manifest: Manifest | None,
        timeout_s: float,
        session: str | None,
        on_accepted: Callable[[str], None] | None,
    ) -> Pushed:
        deadline = time.monotonic() + timeout_s
        with self._alone(stop):
            while True:
                target, state = until_needed(self._link, version, deadline=deadline, cancelled=stop)
                if target is None:
                    return Pushed(version, None, state)
                try:
                    return self._push(
                        target, version, tensors, manifest, deadline,
                        session or uuid.uuid4().hex, on_accepted, stop,
                    )  # fmt: skip
                except NotNow as error:
                    if session is not None:  # the others of it have begun theirs
                        raise PushRefused(f"{version}: {error}", state) from error
                    _pause(stop, deadline, f"{version}: not begun: {error}", state)

    def _push(
        self,
        target: PushTarget,
        version: str,
        tensors: Tensors,
        manifest: Manifest | None,
        deadline: float,
        session: str,
        on_accepted: Callable[[str], None] | None,
        stop: threading.Event,
    ) -> Pushed:
        sender = self._placement.sender_for(target)
        if stop.is_set():  # before there was this sender
            raise PushFailed(f"{version}: given up by its sender")
        watch = Watch(self._link, session, deadline=deadline + LAST_WORDS_S)
        watch.on_trouble = sender.cancel

        def accepted(name: str) -> None:
            if on_accepted is not None:
                on_accepted(name)
            if stop.is_set():
                raise PushFailed(f"{version}: given up by its sender")
            agreed = sender.accepted
            assert agreed is not None  # noqa: S101 - set before this is called
            offer = PushOffer(
                session=name, boot_id=target.boot_id, version=version, bytes=agreed.bytes,
                tensors=agreed.tensors, transport=agreed.transport, mode=agreed.mode,
                reason=agreed.reason[:4000], ranks=self._placement.ranks,
            )  # fmt: skip
            self._link.offer(offer)
            watch.start()

        try:
            sent = sender.send(
                version, tensors, manifest=manifest, session=session,
                timeout_s=deadline - time.monotonic(), on_accepted=accepted,
            )  # fmt: skip
            watch.ended.wait(max(0.0, deadline - time.monotonic()) + LAST_WORDS_S)
            if not watch.is_committed or watch.status is None:
                raise TimeoutError(
                    "every rank has loaded it, and the pod did not commit it in time"
                )
        except BaseException as error:
            began = watch.ident is not None
            self._give_up(session, error)
            if began:
                watch.join(LAST_WORDS_S)
            if not isinstance(error, Exception):
                raise
            if stop.is_set():
                raise PushFailed(f"{version}: given up by its sender") from error
            if began:
                raise after_the_offer(error, version, watch) from error
            raise before_the_offer(error, version, None) from error
        finally:
            watch.on_trouble = None  # what it finds from now on is no matter of the next push
            sender.cancel.clear()
        return Pushed(version, sent, watch.status.state)

    def _give_up(self, session: str, error: BaseException) -> None:
        # it may never have known of it, or be gone: the ranks were told as well
        with suppress(PushError, Refusal):
            self._link.give_up(session, f"{type(error).__name__}: {error}")

    @contextmanager
    def _alone(self, stop: threading.Event) -> Iterator[None]:
        """One push at a time; a cancel is of the push that is on."""
        if not self._busy.acquire(blocking=False):
            raise PushRefused("this pusher is pushing already: one version after the other")
        try:
            self._is_on(stop)
            yield
        finally:
            self._is_on(None)
            self._busy.release()

    def _is_on(self, stop: threading.Event | None) -> None:
        with self._guard:
            self._stop = stop
            if self._placement.sender is not None:
                self._placement.sender.cancel.clear()  # it was for the one before


def _pause(stop: threading.Event, deadline: float, why: str, state: StateDocument) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise PushTimeout(why, state)
    stop.wait(min(RETRY_S, left))

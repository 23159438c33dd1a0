"""The bytes' way from the trainer to one replica."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from rollout_client.trainer.control import Control, Facts
from rollout_client.trainer.errors import (
    AdapterError,
    Late,
    Refused,
    Superseded,
    Unreachable,
    UpdateFailed,
)
from rollout_client.trainer.fanout import Reached
from rollout_client.trainer.muster import Missed, Muster
from rollout_client.trainer.parcel import Parcel
from rollout_client.trainer.pump import SourceFailed
from rollout_client.trainer.tensors import TensorsChanged
from rollout_client.trainer.wishes import Hold
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.on_thread import on_thread
from rollout_pod.weights.pusher import (
    NotDesired,
    PodGone,
    Pusher,
    PushError,
    PushFailed,
    PushTimeout,
)
from rollout_pod.weights.trainer import SentWeights

Transport = Literal["auto", "shared_memory", "cuda_ipc"]

_ATTEMPTS: Final = 3
"""Of one update, where its bytes can be read again."""
_WORD_S: Final = 5.0
"""How long the replica's owner may take to say who asked for another version."""


class Sending:
    """Owns one pusher for each run folder, and what those keep from one version to the next."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pushers: dict[Path, tuple[int | None, Pusher]] = {}

    async def close(self) -> None:
        """Let the ranks unmap our memory. Idempotent."""
        while self._pushers:
            _, (_, pusher) = self._pushers.popitem()
            await on_thread(pusher.close)

    async def update(
        self,
        control: Control,
        wish: Hold,
        parcel: Parcel,
        *,
        muster: Muster | None,
        timeout_s: float,
    ) -> Reached:
        """Ask for a version and send it; returns when every rank has committed it.

        Raises:
            AdapterError: see ``ServerAdapter.update_weights``.
        """
        try:
            await control.check_update(wish)
            following = await control.wish(wish)
            parcel.is_asked_for = True
            follow = asyncio.ensure_future(following.reached())
            push = asyncio.ensure_future(
                self._push(control, wish, parcel, muster, timeout_s, quietly=False)
            )
            try:
                await asyncio.wait({follow, push}, return_when=asyncio.FIRST_EXCEPTION)
                if push.done() and (error := push.exception()) is not None:
                    raise await _judged(control, wish, error, follow)
                return Reached(await follow, await push)
            finally:
                # whoever waits for tensors, or for the others, is let go first
                self._leave(control, parcel, muster)
                follow.cancel()
                push.cancel()  # gives its session up before it ends
                for ended in (await asyncio.wait({follow, push}))[0]:
                    if not ended.cancelled():
                        ended.exception()  # one of the two is told
        finally:
            self._leave(control, parcel, muster)

    async def again(
        self, control: Control, wish: Hold, parcel: Parcel, *, muster: Muster | None,
        timeout_s: float, quietly: bool,
    ) -> Reached:  # fmt: skip
        """Send a version to a pod that waits for it. Whether it still ought to is not asked.

        Raises:
            AdapterError: see ``ServerAdapter.update_weights``.
        """
        push = asyncio.ensure_future(
            self._push(control, wish, parcel, muster, timeout_s, quietly=quietly)
        )
        try:
            await asyncio.wait({push})
            if (error := push.exception()) is not None:
                raise await _judged(control, wish, error, None)
            return Reached(await control.facts(), await push)
        finally:
            self._leave(control, parcel, muster)
            push.cancel()
            await asyncio.wait({push})

    def _leave(self, control: Control, parcel: Parcel, muster: Muster | None) -> None:
        parcel.leave(control.name)
        if muster is not None:
            muster.leave(control.name)

    async def _push(
        self,
        control: Control,
        wish: Hold,
        parcel: Parcel,
        muster: Muster | None,
        timeout_s: float,
        *,
        quietly: bool,
    ) -> SentWeights | None:
        pusher = await self._pusher_of(control, parcel.device)
        failures = 0
        while True:
            try:
                pushed = await pusher.push_async(
                    wish.version,
                    parcel.tensors(control.name, quietly=quietly),
                    manifest=parcel.manifest,
                    timeout_s=timeout_s,
                    on_accepted=_arrival(control, muster),
                )
            except (PodGone, PushFailed) as error:
                failures += isinstance(error, PushFailed)
                is_ours = _origin(error) is not None
                if is_ours or not parcel.is_repeatable or failures >= _ATTEMPTS:
                    raise
                control.told = f"{error}; it is sent once more"
            else:
                return pushed.sent

    async def _pusher_of(self, control: Control, device: int | None) -> Pusher:
        run_dir = control.run_dir
        if run_dir is None:
            raise Refused(
                f"{control.name}: no bytes can be sent to it from here: give the run folder that "
                "this process shares with its pod (run_dir), or let it fetch versions from a path "
                "or URL and hand over no weights",
                target=control.name,
            )
        known = self._pushers.get(run_dir)
        if known is not None and known[0] == device:
            return known[1]
        if known is not None:
            await on_thread(known[1].close)
        gpu = None if device is None else Cuda(device)
        pusher = Pusher(run_dir, device=gpu, transport=self._transport)
        self._pushers[run_dir] = (device, pusher)
        return pusher


def _arrival(control: Control, muster: Muster | None) -> Callable[[str], None] | None:
    if muster is None:
        return None
    return lambda session: muster.arrive(control.name)


async def _judged(
    control: Control, wish: Hold, error: BaseException, follow: "asyncio.Future[Facts] | None"
) -> BaseException:
    """What a push failed with, in the adapter's words."""
    told = f"{control.name}: {error}"
    ours = _origin(error)
    made: AdapterError
    if isinstance(ours, TensorsChanged):
        made = Refused(f"{control.name}: {ours}: hand it over anew", target=control.name)
    elif ours is not None:
        made = UpdateFailed(f"{control.name}: {ours}", target=control.name)
    elif isinstance(error, NotDesired):
        if follow is not None:
            # whoever owns the replica knows who asked for something else
            await asyncio.wait({follow}, timeout=_WORD_S)
            if follow.done() and (word := follow.exception()) is not None:
                return word
        made = Superseded(told, target=control.name)
    elif isinstance(error, PushTimeout):
        made = Late(told, target=control.name)
    elif isinstance(error, PodGone):
        made = Unreachable(told, target=control.name)
    elif isinstance(error, PushError):
        made = UpdateFailed(told, target=control.name)
    else:
        return error
    made.__cause__ = error
    return made


def _origin(error: BaseException | None) -> BaseException | None:
    """What went wrong on our own side, if that is where it did."""
    while error is not None:
        if isinstance(error, TensorsChanged | SourceFailed | Missed):
            return error
        error = error.__cause__
    return None

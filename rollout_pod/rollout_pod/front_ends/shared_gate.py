"""The gate of a pod with several front ends, as the process sees it that steers.

Each front end has a ``Gate`` of its own. They are closed by notes and brought to rest by one call
to each; the engine is paused once, when every gate is closed and knows why its requests are cut.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_pod.admission import CancelCounts, CancelTimeout
from rollout_pod.engine.base import Engine
from rollout_pod.front_ends.channel import CallFailed, Channel, ChannelClosed, Handler
from rollout_pod.gate import ABORT_S, Gate
from rollout_pod.protocol import CancelReason, InterruptionMode, WeightsRef

_ATTACH_S = 120.0
"""How much longer than the engine's own start a front end's may take."""

_ANSWER_S = 10.0
"""How much longer than its own deadline a front end may take to answer."""


@dataclass
class Member:
    """One front end, as it was last heard of."""

    index: int
    channel: Channel
    unfinished: int = 0
    parked: int = 0


@dataclass
class _Rest:
    """One cancel: the engine is paused when all that still take part have asked for it."""

    left: set[int]
    keep: bool
    asked: dict[int, asyncio.Future[None]] = field(default_factory=dict)


class SharedGate(Gate):
    """See ``Gate``, whose requests are in the front ends here: nothing passes this one itself."""

    def __init__(self, engine: Engine) -> None:
        self.members: dict[int, Member] = {}
        self._claims: dict[str, int] = {}
        """Which front end has which request."""
        self._rest: _Rest | None = None
        self._pausing: asyncio.Task[None] | None = None
        super().__init__(engine)

    # -- what is in force, told to all at once

    @property
    def weights(self) -> WeightsRef | None:
        """See ``Gate``."""
        return self._weights

    @weights.setter
    def weights(self, ref: WeightsRef | None) -> None:
        self._weights = ref
        self._tell("weights", None if ref is None else ref.model_dump_json())

    @property
    def generation(self) -> int:
        """See ``Gate``."""
        return self._generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._generation = generation
        self._tell("generation", generation)

    @property
    def keeps(self) -> bool:
        """See ``Gate``."""
        return self._keeps

    @keeps.setter
    def keeps(self, keeps: bool) -> None:
        self._keeps = keeps
        self._tell("keeps", keeps)

    def open(self, weights: WeightsRef, generation: int) -> None:
        """See ``Gate``."""
        super().open(weights, generation)
        self._tell("open", weights.model_dump_json(), generation)

    def close(self, reason: CancelReason) -> None:
        """See ``Gate``. A front end hears of it before the ``cancel`` that follows."""
        super().close(reason)
        self._tell("close", reason)

    def unpublish(self) -> None:
        """See ``Gate``."""
        super().unpublish()
        self._tell("unpublish")

    def fail(self) -> None:
        """See ``Gate``."""
        super().fail()
        self._tell("fail")

    def drain(self) -> None:
        """See ``Gate``."""
        super().drain()
        self._tell("drain")

    async def settle(self) -> None:
        """See ``Gate``."""
        await self._ask_all("settle", timeout_s=_ATTACH_S)

    # -- members

    def join(self, member: Member) -> None:
        """Take a front end in, and tell it what is in force."""
        self.members[member.index] = member
        tell = member.channel.tell
        tell("generation", self.generation)
        tell("keeps", self.keeps)
        tell("weights", None if self.weights is None else self.weights.model_dump_json())
        if self.closed_for is not None:
            tell("close", self.closed_for)
        if self.is_open and self.weights is not None:
            tell("open", self.weights.model_dump_json(), self.generation)
        if self.is_draining:
            tell("drain")

    def notes_of(self, index: int) -> Mapping[str, Handler]:
        """What a front end may tell."""
        return {
            "counts": lambda unfinished, parked: self._count(index, unfinished, parked),
            "release": lambda request_id: self._claims.pop(request_id, None),
        }

    def calls_of(self, index: int) -> Mapping[str, Handler]:
        """What a front end may ask for."""

        async def claim(request_id: str) -> bool:
            if request_id in self._claims:  # alive, whoever has it
                return False
            self._claims[request_id] = index
            return True

        return {
            "claim": claim,
            "pause": lambda: self.pause(index),
            "cancel_one": self.cancel_of,
        }

    def _count(self, index: int, unfinished: int, parked: int) -> None:
        member = self.members[index]
        member.unfinished, member.parked = unfinished, parked

    async def cancel_of(self, request_id: str) -> str | None:
        """Cut one request, wherever it is; its answer as JSON, None if it is not alive."""
        member = self.members.get(self._claims.get(request_id, -1))
        if member is None:
            return None
        answer: str | None = await member.channel.call("cancel_one", request_id)
        return answer

    async def pause(self, index: int) -> None:
        """A front end asks for a pause of the engine; returns when it has paused."""
        rest = self._rest
        if rest is None:
            raise RuntimeError("a pause is asked for, and no cancel goes on")
        future = rest.asked[index] = asyncio.get_running_loop().create_future()
        self._pause_if_all()
        await future

    # -- bringing the engine to rest

    @property
    def unfinished(self) -> int:
        """See ``Gate``. As they last said."""
        return sum(member.unfinished for member in self.members.values())

    @property
    def parked(self) -> int:
        """See ``Gate``. As they last said."""
        return sum(member.parked for member in self.members.values())

    async def cancel(
        self,
        *,
        timeout_s: float,
        mode: InterruptionMode = InterruptionMode.ABORT,
        woken: asyncio.Event | None = None,
    ) -> CancelCounts | None:
        """See ``Gate``: each front end does it, and they share the pauses."""
        if self.is_open:
            raise RuntimeError("cancel behind an open gate: close it first")
        started = time.monotonic()
        if mode is InterruptionMode.DRAIN:
            started = self._drain_began = self._drain_began or started
            is_idle = await self._wait_idle_or(woken, self.drain_left(timeout_s))
            if not is_idle and woken and woken.is_set():
                return None
            mode, timeout_s = InterruptionMode.ABORT, ABORT_S
        self._rest = _Rest(set(self.members), keep=mode is InterruptionMode.KEEP)
        try:
            answers = await self._ask_all("cancel", mode, timeout_s, timeout_s=timeout_s)
        finally:
            self._rest = None
            if self._pausing is not None:  # nobody waits for it any more, unless it has ended
                self._pausing.cancel()
                await asyncio.gather(self._pausing, return_exceptions=True)
                self._pausing = None
        self._drain_began = None
        counts = zip([0, 0, 0, 0], *answers, strict=True)  # before any has joined there are none
        aborted, finished, tokens, kept = (sum(each) for each in counts)
        return CancelCounts(aborted, finished, tokens, kept, time.monotonic() - started)

    async def wait_idle(self, *, timeout_s: float) -> bool:
        """See ``Gate``."""
        return all(await self._ask_all("wait_idle", timeout_s, timeout_s=timeout_s))

    # -- inside

    def _pause_if_all(self) -> None:
        rest = self._rest
        if rest is None or not rest.asked or not rest.left <= rest.asked.keys():
            return
        asked, rest.asked = rest.asked, {}
        self._pausing = asyncio.create_task(self._pause_for(asked, keep=rest.keep), name="pause")

    async def _pause_for(self, asked: dict[int, asyncio.Future[None]], *, keep: bool) -> None:
        try:
            await self.engine.pause(keep=keep)
        except Exception as error:
            for future in asked.values():
                if not future.done():
                    future.set_exception(error)
        else:
            for future in asked.values():
                if not future.done():
                    future.set_result(None)

    def _tell(self, name: str, *args: Any) -> None:
        for member in self.members.values():
            member.channel.tell(name, *args)

    async def _ask_all(self, name: str, *args: Any, timeout_s: float) -> list[Any]:
        """The answers of all front ends.

        Raises:
            CancelTimeout: one is gone, failed, or did not answer in time.
        """
        calls = [self._ask(member, name, args) for member in self.members.values()]
        try:
            async with asyncio.timeout(timeout_s + 2 * _ANSWER_S):
                return await _all(calls)
        except TimeoutError:
            raise CancelTimeout(f"a front end did not {name} in time") from None

    async def _ask(self, member: Member, name: str, args: tuple[Any, ...]) -> Any:
        try:
            return await member.channel.call(name, *args)
        except ChannelClosed:
            raise CancelTimeout(f"front end {member.index} is gone") from None
        except CallFailed as error:
            raise CancelTimeout(f"front end {member.index}: {error}") from None
        finally:
            if name == "cancel" and self._rest is not None:
                self._rest.left.discard(member.index)
                self._pause_if_all()


async def _all(calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All of their values, or the first error once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)

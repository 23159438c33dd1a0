"""A fake engine and agent that go wrong when they are told to, and that know the truth."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_pod.engine.base import (
    CacheReport,
    EngineDeadError,
    EngineDelta,
    EngineError,
    EngineHungError,
    EngineInternalError,
    EngineOutput,
    EngineRequest,
    EngineStartError,
    OnDelta,
    RankReport,
    SleepReport,
    SleepUnsupported,
)
from rollout_pod.protocol import EngineInfo, SleepTag
from rollout_pod.weights.agent_client import StageError, TransferError
from tests.support.fakes import GARBAGE, FakeAgent, FakeEngine, FakeStaged

WORLD = 2
HAND_OVER = 15
"""Turns that a request takes from ``generate`` to the scheduler."""
CALL_S = 60.0
"""The deadline that the real engine gives its calls."""


@dataclass
class AttackedEngine(FakeEngine):
    """``broken`` is told of what must never be asked of an engine."""

    world: int = WORLD
    step_s: float = 0.01
    broken: Callable[[str], None] = print
    loads: Callable[[str], None] = print
    """Told of the version of every load."""
    armed: Counter[str] = field(default_factory=Counter)
    rank_holds: list[str] = field(default_factory=lambda: ["base"] * WORLD)
    """What each rank really holds."""
    is_complete: bool = True
    """Every rank holds all of one version."""
    is_loading: bool = False
    is_cleared: bool = True
    """Every cache was cleared since the last weight byte."""
    is_published: bool = False
    """A name was given to what the ranks hold now."""
    doomed: str | None = None
    """A call failed that an engine cannot be steered without."""
    is_unclear: bool = False
    """A cache that what slept has left could not be cleared: nobody knows any more what is there."""
    hung_at: float | None = None
    last_pause: str | None = None
    turns: Callable[[], int] = lambda: 0
    """Of the loop."""
    _came: dict[str, int] = field(default_factory=dict)
    ledger: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """By engine id: each token, with the version that really sampled it."""

    def takes(self, fault: str) -> bool:
        """Whether a call goes wrong now."""
        if not self.armed[fault]:
            return False
        self.armed[fault] -= 1
        return True

    async def start(self) -> EngineInfo:
        if self.takes("start fails"):
            self.start_error = EngineStartError("it does not start")
        await asyncio.sleep(1.0)
        return await super().start()

    async def generate(
        self, request: EngineRequest, on_delta: OnDelta | None = None
    ) -> EngineOutput:
        truth = self.ledger.setdefault(request.engine_id, [])
        self._came[request.engine_id] = self.turns()

        def note(delta: EngineDelta) -> None:
            fresh = self.cache_of == self.holds
            truth.extend((token, self.holds if fresh else GARBAGE) for token in delta.token_ids)
            if on_delta:
                on_delta(delta)

        return await super().generate(request, note)

    async def abort(self, engine_id: str) -> None:
        await self._call("abort")
        await super().abort(engine_id)

    async def pause(self, *, keep: bool = False) -> None:
        if self.takes("pause hangs"):
            self.doomed = "pause hangs"
            await asyncio.sleep(CALL_S)
            raise EngineHungError("the engine did not pause in time")
        if self.takes("pause raises"):
            self.doomed = "pause raises"
            raise EngineError("cannot pause")
        await self._call("pause")
        # what is on its way to the scheduler is not aborted: it waits there for the next pause
        turns = self.turns()
        waiting = [r for i, r in self._requests.items() if turns - self._came[i] < HAND_OVER]
        spared = [r for r in waiting if not keep and not r.aborted]
        pausing = super().pause(keep=keep)
        pausing.send(None)  # up to where it lets others go on
        for request in spared:
            request.aborted = False
        await asyncio.sleep(0)
        pausing.close()
        self.last_pause = "keep" if keep else "abort"

    async def resume(self) -> None:
        if self.takes("resume raises"):
            self.doomed = "resume raises"
            raise EngineError("cannot resume")
        await self._call("resume")
        if not self.is_complete:
            self.broken("resumed after a load that is not complete")
        if not self.is_published:
            self.broken("resumed before what the ranks hold was published")
        self.last_pause = None
        await super().resume()

    async def load_weights(
        self, session: str, *, version: str, flush: bool, timeout_s: float
    ) -> tuple[RankReport, ...]:
        self.loads(version)
        await self._call("load")
        if not self.paused:
            self.broken("weights are loaded into an engine that runs")
        kind = next((f for f in self.armed if f.startswith("load: ") and self.takes(f)), "")
        if kind == "load: raises":
            self.is_published = False  # nobody can know how far it came
            raise EngineInternalError("the load was not begun")
        self.is_loading = True
        try:
            return await self._load(session, version, flush, timeout_s, kind)
        finally:
            self.is_loading = False

    async def _load(
        self, session: str, version: str, flush: bool, timeout_s: float, kind: str
    ) -> tuple[RankReport, ...]:
        assert self.agent is not None
        ends_at = asyncio.get_running_loop().time() + timeout_s + 1
        try:
            async with asyncio.timeout_at(ends_at):
                outcome = await self.agent.outcome(session, version)
        except TimeoutError:
            outcome = "untouched"
        if outcome == "untouched":
            return self._reports(version, "nothing came", touched=False)
        self.is_complete = self.is_cleared = self.is_published = False
        self.rank_holds, self.holds = [GARBAGE] * WORLD, GARBAGE
        await asyncio.sleep(0.02)  # bucket after bucket
        if kind == "load: dies" or outcome == "dies":
            self.kill("died in a load")
        if self.dead:
            raise EngineDeadError(self.dead)
        if kind == "load: hangs":
            await asyncio.sleep(ends_at - asyncio.get_running_loop().time())
            return self._reports(version, "the time was over")
        if outcome == "midway" or (self.needs_flush and not flush):
            self.needs_flush = True
            return self._reports(version, "the sender vanished")
        self.rank_holds[0] = version
        if kind == "load: a rank fails":
            self.needs_flush = True
            good, bad = self._reports(version, "")
            return (good, RankReport(bad.rank, bad.host, False, version, error="out of memory"))
        if kind == "load: a rank is silent":
            self.needs_flush = True
            return self._reports(version, "")[:1]
        if kind == "load: another version":
            self.rank_holds[1] = "step-9"
            good, _ = self._reports(version, "")
            return (good, RankReport(1, "host", True, "step-9"))
        self.rank_holds[1] = self.holds = version
        self.is_complete, self.needs_flush = True, False
        return self._reports(version, "")

    def _reports(self, version: str, error: str, *, touched: bool = True) -> tuple[RankReport, ...]:
        return tuple(
            RankReport(rank, "host", not error, version, error=error, touched=touched)
            for rank in range(WORLD)
        )

    async def clear_caches(self) -> CacheReport:
        await self._call("clear")
        self.is_unclear = True
        if self.takes("clear raises"):
            raise EngineError("cannot clear")
        if self.takes("clear refuses"):
            return CacheReport(prefix=False, multimodal=False, encoder=False)
        report = await super().clear_caches()
        self.is_cleared = report.is_complete
        self.is_unclear = not report.is_complete
        return report

    async def sleep(self, level: int) -> SleepReport:
        if self.takes("sleep is unsupported"):
            raise SleepUnsupported("this engine does not sleep")
        if self.takes("sleep raises"):
            self.doomed = "sleep raises"
            raise EngineError("cannot sleep")
        await self._call("sleep")
        self.is_cleared = False
        if level == 2:
            self.is_complete = self.is_published = False
            self.rank_holds = [GARBAGE] * WORLD
        return await super().sleep(level)

    async def wake(self, tags: frozenset[SleepTag]) -> int:
        if self.takes("wake raises"):
            self.doomed = "wake raises"
            raise EngineError("cannot wake")
        await self._call("wake")
        return await super().wake(tags)

    async def publish_version(self, version: str) -> None:
        await self._call("publish")
        if self.takes("publish raises"):
            self.doomed = "publish raises"
            raise EngineError("cannot take the name")
        if not self.is_complete or version != self.holds:
            self.broken(f"{version} is published, but the ranks hold {self.rank_holds}")
        if not self.is_cleared:
            self.broken("published before every cache was cleared")
        self.is_published = True
        await super().publish_version(version)
        await asyncio.sleep(0)

    async def ping(self, *, timeout_s: float) -> None:
        if self.dead:
            raise EngineDeadError(self.dead)
        await super().ping(timeout_s=timeout_s)

    async def _call(self, what: str) -> None:
        """Every call may find the engine dead or hung, and takes its time."""
        if self.hangs:
            await asyncio.sleep(CALL_S)
            raise EngineHungError(f"the engine did not {what} in time")
        await asyncio.sleep(0)
        if self.dead:
            raise EngineDeadError(self.dead)

    def hang(self) -> None:
        """Its loop stands still from now on."""
        if self.hung_at is None:
            self.hung_at = asyncio.get_running_loop().time()
        self.hangs = self.paused = True


@dataclass
class AttackedAgent(FakeAgent):
    """Lives on when the engine's container restarts."""

    armed: Counter[str] = field(default_factory=Counter)

    def takes(self, fault: str) -> bool:
        """Whether a call goes wrong now."""
        if not self.armed[fault]:
            return False
        self.armed[fault] -= 1
        return True

    async def stage(
        self, *, session: str, version: str, path: str, rank_sockets: Sequence[Path],
        bucket_bytes: int, timeout_s: float, on_progress: Callable[[int, int], None] | None = None,
    ) -> FakeStaged:  # fmt: skip
        if self.takes("stage raises"):
            raise OSError("the agent's socket is gone")
        if self.takes("stage hangs"):
            await asyncio.sleep(timeout_s)
            raise StageError("not there in time", kind="agent", retryable=True)
        await asyncio.sleep(0.05)
        if self.takes("stage fails"):
            raise StageError("no such folder", kind="source", retryable=True)
        return await super().stage(
            session=session, version=version, path=path, rank_sockets=rank_sockets,
            bucket_bytes=bucket_bytes, timeout_s=timeout_s, on_progress=on_progress,
        )  # fmt: skip

    async def send(self, *, session: str, timeout_s: float) -> FakeStaged:
        if self.takes("send raises"):
            self._outcome(session).set_result("midway")
            raise OSError("the agent's socket is gone")
        if self.takes("send hangs"):
            await asyncio.sleep(timeout_s)
            raise TransferError("not sent in time", kind="agent")
        for outcome in ("untouched", "midway"):
            if session in self.staged and self.takes(f"send: {outcome}"):
                self.send_script[self.staged[session]].append(outcome)
        await asyncio.sleep(0.03)
        return await super().send(session=session, timeout_s=timeout_s)

    async def committed(self, *, session: str) -> None:
        await self._told()
        await super().committed(session=session)

    async def discard(self, *, session: str) -> None:
        await self._told()
        await super().discard(session=session)

    async def _told(self) -> None:
        await asyncio.sleep(0)
        if self.takes("tell hangs"):
            await asyncio.sleep(3600)
        if self.takes("tell fails"):
            raise TransferError("the agent is gone", kind="agent")

"""A fake engine and a fake weights agent: deterministic, scripted, for interleavings only.

The engine's tokens depend on the weights it really holds and on what its cache really holds, so
that a mix of versions, a load that was not finished, and a stale cache all show in the tokens.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_pod.engine.base import (
    CacheReport,
    EngineDeadError,
    EngineDelta,
    EngineError,
    EngineHungError,
    EngineInternalError,
    EngineOutput,
    EngineRequest,
    EngineSettings,
    ExpertIds,
    InvalidField,
    InvalidSamplingParams,
    InvalidTokens,
    OnDelta,
    Prepared,
    RankReport,
    SleepReport,
    SleepUnsupported,
    StagingRefused,
    TopLogProb,
)
from rollout_pod.engine.front_end import App, NoFrontEnd
from rollout_pod.protocol import EngineInfo, SleepTag
from rollout_pod.weights.agent_client import StageError, TransferError

GARBAGE = "garbage"
VOCAB = 50_000


def fake_token(version: str, history: Sequence[int]) -> int:
    """The next token under ``version``; another version gives another one."""
    text = f"{version}:{','.join(map(str, history))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) % VOCAB


def fake_tokens(version: str, prompt: Sequence[int], n: int) -> list[int]:
    """``n`` tokens after ``prompt``, all under ``version``."""
    tokens: list[int] = []
    for _ in range(n):
        tokens.append(fake_token(version, [*prompt, *tokens]))
    return tokens


@dataclass
class _Request:
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False


@dataclass
class FakeEngine:
    """Behaves as the Engine Protocol says; faults are set as attributes by a test."""

    world: int = 1
    step_s: float = 0.0
    max_model_len: int = 4096
    eos_below: int = 0
    """Tokens below it end a request, as an end-of-sequence token does."""
    holds: str = "base"
    needs_flush: bool = False
    cache_of: str | None = None
    paused: bool = False
    start_error: Exception | None = None
    start_gate: asyncio.Event | None = None
    dead: str | None = None
    pause_hangs: bool = False
    hangs: bool = False
    load_hangs: bool = False
    fault: str | None = None
    """Of a device: known to ``ping``, before any request meets it."""
    silent_ranks: set[int] = field(default_factory=set)
    refuse_clear: int = 0
    asleep: set[SleepTag] = field(default_factory=set)
    refuses_sleep: str | None = None
    """Told by ``sleep_refusal``."""
    sleep_error: Exception | None = None
    """Raised by the next ``sleep``."""
    wake_error: Exception | None = None
    resize_gate: asyncio.Event | None = None
    """``sleep`` and ``wake`` take until it is set."""
    on_cpu: bool = False
    """Sleeps without releasing anything."""
    agent: "FakeAgent | None" = None
    published: str | None = None
    server: App | None = None
    media_gate: asyncio.Event | None = None
    requests: list[EngineRequest] = field(default_factory=list)
    """All that came, in order."""
    own_metrics: bytes = b""
    tells: dict[str, Any] = field(
        default_factory=lambda: {
            "transport": "shared_memory", "mode": "bucketed", "path": "reference",
            "note": "it cannot be replayed", "seconds": 0.2, "steps": (("load", 0.1),),
        }
    )  # fmt: skip
    """Of every good load, in the reports of all ranks."""
    aside: str | None = None
    """The version that waits on the device."""
    refuses_staging: str = ""
    """Raised by ``stage_weights``, whose sender is not heard of then."""
    staging_script: list[str] = field(default_factory=list)
    """What the next ``stage_weights`` raise when some ranks have begun; then they go well."""
    switch_script: list[str] = field(default_factory=list)
    """What the next switches do: ``untouched`` or ``midway``; then ``ok``."""
    calls: list[str] = field(default_factory=list)
    _requests: dict[str, _Request] = field(default_factory=dict)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> EngineInfo:
        self.calls.append("start")
        if self.start_gate:
            await self.start_gate.wait()
        if self.start_error:
            raise self.start_error
        return EngineInfo(
            name="fake", version="1", logprobs_mode="processed_logprobs",
            generation_config="vllm", max_model_len=self.max_model_len, world_size=self.world,
        )  # fmt: skip

    def sampling_params(self, raw: Mapping[str, Any], *, max_tokens: int) -> object:
        for name in raw:
            if name not in {"temperature", "min_tokens", "seed", "structured_outputs"}:
                raise InvalidSamplingParams(name, "unknown sampling parameter")
        return max_tokens

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        for position, token in enumerate(token_ids):
            if not 0 <= token < VOCAB:
                raise InvalidTokens(position, f"{token} is no token id of this model")

    async def prepare(
        self,
        prompt_token_ids: Sequence[int],
        *,
        lora: str | None = None,
        media: Mapping[str, Sequence[str]] | None = None,
        routed_experts: bool = False,
    ) -> Prepared:
        """``media`` adds 9 tokens an item, once ``media_gate`` opens."""
        self.calls.append(f"prepare {len(prompt_token_ids)} {lora} {media} {routed_experts}")
        if lora not in (None, "known"):
            raise InvalidField("lora", f"no adapter is called {lora!r}; known: known")
        if self.media_gate:
            await self.media_gate.wait()
        added = [7] * 9 * sum(len(urls) for urls in (media or {}).values())
        prompt = [*prompt_token_ids, *added]
        return Prepared(
            len(prompt),
            prompt=prompt if media else None,
            lora=lora,
            routed_experts=routed_experts,
        )

    async def generate(
        self, request: EngineRequest, on_delta: OnDelta | None = None
    ) -> EngineOutput:
        if request.engine_id in self._requests:
            raise AssertionError("an engine id was used twice")
        mine = self._requests[request.engine_id] = _Request()
        self.requests.append(request)
        assert isinstance(request.params, int)
        try:
            while len(mine.tokens) < request.params and not mine.aborted:
                if self.dead:
                    raise EngineDeadError(self.dead)
                if self.paused:
                    await self._moved.wait()
                    continue
                if self.asleep:
                    raise AssertionError("a sleeping engine was made to generate")
                if self.cache_of not in (None, self.holds):
                    version = GARBAGE  # stale cache
                else:
                    version = self.cache_of = self.holds
                mine.tokens.append(fake_token(version, [*request.prompt_token_ids, *mine.tokens]))
                stopped = mine.tokens[-1] < self.eos_below
                over = stopped or len(mine.tokens) == request.params
                if on_delta:
                    ended = ("stop" if stopped else "length") if over else None
                    on_delta(EngineDelta((mine.tokens[-1],), (-0.5,), finish_reason=ended))
                if over:
                    break
                await asyncio.sleep(self.step_s)
            stopped = bool(mine.tokens) and mine.tokens[-1] < self.eos_below
            reason = "stop" if stopped else "abort" if mine.aborted else "length"
            told = request.prepared is not None and request.prepared.routed_experts
            return EngineOutput(
                tuple(mine.tokens),
                (-0.5,) * len(mine.tokens),
                reason,
                prompt_log_probs=(None, (TopLogProb(2, -0.25, 1),)) if told else None,
                routed_experts=ExpertIds((1, 1, 2), "uint8", b"\x05\x06") if told else None,
            )
        finally:
            del self._requests[request.engine_id]

    async def abort(self, engine_id: str) -> None:
        if engine_id in self._requests:
            self._requests[engine_id].aborted = True
            self._move()

    async def pause(self, *, keep: bool = False) -> None:
        self.calls.append("pause keep" if keep else "pause")
        if self.dead:
            raise EngineDeadError(self.dead)
        if self.pause_hangs:
            await asyncio.Event().wait()
        self.paused = True
        if keep:
            self.cache_of = None
        else:
            for request in self._requests.values():
                request.aborted = True
            self._move()
        await asyncio.sleep(0)

    async def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False
        self._move()

    async def load_weights(
        self, session: str, *, version: str, flush: bool, timeout_s: float
    ) -> tuple[RankReport, ...]:
        self.calls.append(f"load {version}{' flush' if flush else ''}")
        if self.dead:
            raise EngineDeadError(self.dead)
        if not self.paused:
            raise AssertionError("weights were loaded under running requests")
        if SleepTag.WEIGHTS in self.asleep:
            raise AssertionError("weights were loaded into released memory")
        assert self.agent is not None
        if self.load_hangs:
            raise EngineHungError(f"the engine did not load within {timeout_s:g} s")
        outcome = await self._outcome(session, version, timeout_s)
        if self.dead:
            raise EngineDeadError(self.dead)
        if outcome == "dies":
            self.kill("died in a load")
            raise EngineDeadError("died in a load")
        if self.needs_flush and not flush:
            outcome = "midway"
        if outcome == "ok":
            self.holds, self.needs_flush = version, False
            ranks = [r for r in range(self.world) if r not in self.silent_ranks]
            return tuple(RankReport(r, "host", True, version, **self.tells) for r in ranks)
        touched = outcome != "untouched"
        if touched:
            self.holds, self.needs_flush = GARBAGE, True
        return tuple(
            RankReport(
                r, "host", r != 0, version, error="scripted" if r == 0 else "", touched=touched
            )
            for r in range(self.world)
        )

    async def _outcome(self, session: str, version: str, timeout_s: float) -> str:
        """How its sender ends it; a death ends the wait."""
        assert self.agent is not None
        told = asyncio.ensure_future(self.agent.outcome(session, version))
        try:
            async with asyncio.timeout(timeout_s):
                while not told.done() and not self.dead:
                    moved = asyncio.ensure_future(self._moved.wait())
                    try:
                        await asyncio.wait({told, moved}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        moved.cancel()
            return told.result() if told.done() else "untouched"
        except TimeoutError:
            return "untouched"  # of a session that nobody comes for
        finally:
            told.cancel()

    async def clear_caches(self) -> CacheReport:
        self.calls.append("clear")
        if self.dead:
            raise EngineDeadError(self.dead)
        if SleepTag.WEIGHTS in self.asleep:
            raise AssertionError("the caches of a sleeping engine were cleared")
        if self.refuse_clear:
            self.refuse_clear -= 1
            return CacheReport(prefix=False, multimodal=False, encoder=False)
        self.cache_of = None
        return CacheReport(prefix=True, multimodal=True, encoder=True)

    def sleep_refusal(self) -> str | None:
        return self.refuses_sleep

    async def sleep(self, level: int) -> SleepReport:
        self.calls.append(f"sleep {level}")
        if not self.paused or self._requests or self.asleep:
            raise AssertionError("only an idle engine that is awake falls asleep")
        await self._resize()
        if self.sleep_error:
            error, self.sleep_error = self.sleep_error, None
            if not isinstance(error, SleepUnsupported):
                self.holds = GARBAGE
            raise error
        self.asleep = set(SleepTag)
        self.cache_of = GARBAGE
        if level == 2:
            self.holds = GARBAGE
        return SleepReport(0, "nothing on CPU") if self.on_cpu else SleepReport(3 << 20)

    async def wake(self, tags: frozenset[SleepTag]) -> int:
        self.calls.append(f"wake {' '.join(sorted(tags))}")
        if not tags or not tags <= self.asleep:
            raise AssertionError(f"{tags} do not sleep")
        await self._resize()
        if self.wake_error:
            error, self.wake_error = self.wake_error, None
            raise error
        self.asleep -= tags
        return 0 if self.on_cpu else sum(2 if t is SleepTag.WEIGHTS else 1 for t in tags) << 20

    async def _resize(self) -> None:
        if self.resize_gate:
            await self.resize_gate.wait()
        await asyncio.sleep(0)
        if self.dead:
            raise EngineDeadError(self.dead)

    async def stage_weights(self, session: str, *, version: str, timeout_s: float) -> None:
        if self.refuses_staging:
            self.calls.append("stage refused")
            raise StagingRefused(self.refuses_staging)
        if self.staging_script:
            self.calls.append("stage begun in part")
            raise EngineError(self.staging_script.pop(0))
        self.calls.append(f"stage {version}")
        self.aside = version

    async def switch_weights(self, version: str, *, timeout_s: float) -> tuple[RankReport, ...]:
        self.calls.append(f"switch {version}")
        assert self.paused and not self.asleep
        outcome = self.switch_script.pop(0) if self.switch_script else "ok"
        if version != self.aside:
            outcome = "untouched"
        error = "" if outcome == "ok" else f"scripted: {outcome}"
        touched = outcome != "untouched"
        if outcome == "ok":
            self.holds = version
        elif touched:
            self.holds, self.needs_flush = GARBAGE, True
        return tuple(
            RankReport(rank, "host", not error, version, error=error, touched=touched,
                       path="switched")
            for rank in range(self.world)
        )  # fmt: skip

    async def publish_version(self, version: str) -> None:
        self.published = version

    def rank_sockets(self) -> tuple[Path, ...]:
        return tuple(Path(f"/nowhere/rank-{r}.sock") for r in range(self.world))

    async def accepted_manifests(self, session: str) -> tuple[str, ...]:
        return ("m",) * self.world

    def gpu_uuids(self) -> tuple[str | None, ...]:
        return (None,) * self.world

    def model_path(self) -> Path | None:
        return Path("/models/base")

    async def ping(self, *, timeout_s: float) -> None:
        if self.hangs:
            await asyncio.sleep(timeout_s)
            raise EngineHungError(
                f"the engine did not answer within {timeout_s:g} s: its loop hangs"
            )
        if self.fault:
            raise EngineInternalError(self.fault)

    def front_end(self) -> App:
        if self.server is None:
            raise NoFrontEnd("the fake engine has no server")
        return self.server

    def metrics_text(self) -> bytes:
        return self.own_metrics

    def dead_error(self) -> str | None:
        return self.dead

    async def shutdown(self) -> None:
        self.kill("shut down")

    def kill(self, why: str) -> None:
        """End the engine as a crash does."""
        self.dead = why
        self._move()

    def condemn(self, reason: str) -> None:
        self.kill(self.dead or reason)

    def run_ranks(self) -> None:
        raise AssertionError("the fake engine's ranks are the test's")

    @property
    def running(self) -> int:
        return len(self._requests)

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


@dataclass(frozen=True)
class FakeStaged:
    bytes: int = 4096
    tensors: int = 2
    seconds: float = 0.01
    transport: str = "shared_memory"
    sample: str = "5a" * 32
    sums: str = ""


@dataclass
class FakeAgent:
    """``stage_script`` and ``send_script`` hold, by version, what the next calls do; then ``ok``.

    stage: ``ok`` or an error text. send: ``ok``, ``untouched`` (fails before the first byte),
    ``midway`` (after it), ``dies`` (the engine dies).
    """

    stage_script: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    send_script: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    stage_gate: asyncio.Event | None = None
    send_gate: asyncio.Event | None = None
    staged: dict[str, str] = field(default_factory=dict)
    found: FakeStaged = FakeStaged()
    """What ``stage`` answers."""
    calls: list[str] = field(default_factory=list)
    _outcomes: dict[str, asyncio.Future[str]] = field(default_factory=dict)

    async def stage(
        self, *, session: str, version: str, path: str, rank_sockets: Sequence[Path],
        bucket_bytes: int, timeout_s: float, on_progress: Callable[[int, int], None] | None = None,
    ) -> FakeStaged:  # fmt: skip
        self.calls.append(f"stage {version} {path}")
        if on_progress and self.stage_gate:
            for done in (0, 5):
                on_progress(done, 10)
                await asyncio.sleep(0)
        if self.stage_gate:
            await self.stage_gate.wait()
        await asyncio.sleep(0)
        script = self.stage_script[version]
        outcome = script.pop(0) if script else "ok"
        if outcome != "ok":
            raise StageError(outcome, kind="source", retryable=True)
        self.staged[session] = version
        return self.found

    async def send(self, *, session: str, timeout_s: float) -> FakeStaged:
        version = self.staged.get(session)
        outcome = "untouched"
        if version is not None:
            script = self.send_script[version]
            outcome = script.pop(0) if script else "ok"
        self.calls.append(f"send {version} {outcome}")
        if self.send_gate:
            await self.send_gate.wait()
        self.push(session, outcome)
        if outcome != "ok":
            raise TransferError(f"scripted: {outcome}", kind="ranks")
        return FakeStaged()

    def push(self, session: str, outcome: str) -> None:
        """What a trainer's session comes to, as ``send_script`` says it of the agent's."""
        future = self._outcome(session)
        if not future.done():
            future.set_result(outcome)

    async def outcome(self, session: str, version: str) -> str:
        return await asyncio.shield(self._outcome(session))

    async def committed(self, *, session: str) -> None:
        self.calls.append(f"committed {self.staged.get(session)}")

    async def discard(self, *, session: str) -> None:
        self.calls.append("discard")
        self.staged.pop(session, None)

    async def close(self) -> None:
        self.calls.append("close")

    def _outcome(self, session: str) -> asyncio.Future[str]:
        if session not in self._outcomes:
            self._outcomes[session] = asyncio.get_running_loop().create_future()
        return self._outcomes[session]


def create(settings: EngineSettings) -> FakeEngine:
    """Entry point, for tests that start a whole process around the fake engine."""
    return FakeEngine()

"""A front end, as its own process sees it: a gate, and what it was told of the pod."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from rollout_pod.engine.base import (
    Engine,
    EngineDeadError,
    EngineInternalError,
    EngineOutput,
    EngineRequest,
    OnDelta,
    SharedEngine,
)
from rollout_pod.front_ends.channel import CallFailed, Channel, ChannelClosed, Handler
from rollout_pod.gate import Gate
from rollout_pod.generation import Generation
from rollout_pod.metrics import PodMetrics
from rollout_pod.protocol import (
    CancelReason,
    GenerateResponse,
    InterruptionMode,
    PodPhase,
    ReadyFacts,
    WeightsRef,
)

COUNT_PERIOD_S: Final = 0.05
"""How often the counts of requests are told, where they changed."""


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What the steering process tells of the pod."""

    phase: PodPhase = PodPhase.LOADING
    is_started: bool = False
    is_ready: bool = False
    liveness_error: str | None = None
    max_model_len: int = 0
    boot_id: str | None = None
    weight_version: str | None = None
    weight_step: int | None = None


class _Paused:
    """The engine, for the gate: pauses are the steering process' business."""

    def __init__(self, engine: Engine, channel: Callable[[], Channel]) -> None:
        self._engine = engine
        self._channel = channel

    async def generate(
        self, request: EngineRequest, on_delta: OnDelta | None = None
    ) -> EngineOutput:
        return await self._engine.generate(request, on_delta)

    async def abort(self, engine_id: str) -> None:
        await self._engine.abort(engine_id)

    async def pause(self, *, keep: bool = False) -> None:
        await _asked(self._channel(), "pause")


async def _asked(channel: Channel, name: str, *args: Any) -> Any:
    """What the steering process answers.

    Raises:
        EngineDeadError: it has gone.
        EngineInternalError: it failed at it.
    """
    try:
        return await channel.call(name, *args)
    except ChannelClosed as error:
        raise EngineDeadError(str(error)) from error
    except CallFailed as error:
        raise EngineInternalError(str(error)) from error


class FrontEnd:
    """A ``server.pod.Pod``: answers requests for an engine that another process steers."""

    def __init__(self, index: int, engine: Engine, *, silence_s: float = 120.0) -> None:
        self._silence_s = silence_s
        self.engine = engine
        self.metrics = PodMetrics()
        self.gate = Gate(_Paused(engine, lambda: self.channel), name=f"{index}.")
        self.elsewhere = self
        self.channel: Channel
        """To the steering process; set before anything is served."""
        self.generation: Generation | None = None
        self.attached = asyncio.Event()
        """Set once requests can be handed to the engine."""
        self._weights: WeightsRef | None = None
        self._opened: int | None = None
        """The committed version, and the generation that the pod's gate is open for: the gate here
        hears of them once requests can be handed to the engine."""
        self._facts = Facts()
        self._counted = (0, 0)
        self.metrics.watch(
            gate_open=lambda: self.gate.is_open,
            gate_changed=lambda: self.gate.changed_at,
            unfinished=lambda: self.gate.unfinished,
            parked=lambda: self.gate.parked,
            fetched=lambda: (0, 0),
        )

    # -- a Pod

    @property
    def max_model_len(self) -> int:
        """See ``Pod``."""
        return self._facts.max_model_len

    @property
    def phase(self) -> PodPhase:
        """See ``Pod``."""
        return self._facts.phase

    @property
    def is_started(self) -> bool:
        """See ``Pod``."""
        return self._facts.is_started and self.attached.is_set()

    @property
    def is_ready(self) -> bool:
        """See ``Pod``."""
        return self._facts.is_ready and self.attached.is_set() and self.engine.dead_error() is None

    def facts(self) -> ReadyFacts:
        """See ``Pod``."""
        facts = self._facts
        return ReadyFacts(
            boot_id=facts.boot_id,
            weight_version=facts.weight_version,
            weight_step=facts.weight_step,
        )

    def liveness_error(self) -> str | None:
        """See ``Pod``. It is also asked for by kubelet while the steering process hangs."""
        if self._facts.is_started:
            silent_s = time.monotonic() - self.channel.heard_at
            if silent_s > self._silence_s:
                return f"the steering process has not been heard of for {silent_s:.0f} s"
        return self._facts.liveness_error

    async def metrics_text(self) -> bytes:
        """See ``Pod``: of all processes, each sample with the label ``front_end``."""
        text: bytes = await _asked(self.channel, "metrics")
        return text

    # -- Elsewhere

    async def claim(self, request_id: str) -> bool:
        """See ``Elsewhere``."""
        is_free: bool = await _asked(self.channel, "claim", request_id)
        return is_free

    def release(self, request_id: str) -> None:
        """See ``Elsewhere``."""
        self.channel.tell("release", request_id)

    async def cancel(self, request_id: str) -> GenerateResponse | None:
        """See ``Elsewhere``."""
        answer: str | None = await _asked(self.channel, "cancel_one", request_id)
        return None if answer is None else GenerateResponse.model_validate_json(answer)

    # -- what the steering process tells and asks

    def notes(self) -> Mapping[str, Handler]:
        """What it tells."""
        gate = self.gate
        return {
            "facts": self._take_facts,
            "weights": self._take_weights,
            "generation": lambda n: setattr(gate, "generation", n),
            "keeps": lambda keeps: setattr(gate, "keeps", keeps),
            "open": self._take_open,
            "close": self._take_close,
            "unpublish": self._unpublish,
            "fail": gate.fail,
            "drain": gate.drain,
        }

    def calls(self) -> Mapping[str, Handler]:
        """What it asks for."""
        return {
            "cancel": self._cancel,
            "wait_idle": self._wait_idle,
            "cancel_one": self._cancel_one,
            "settle": self._settle,
            "metrics": self._own_metrics,
        }

    async def count(self) -> None:
        """Tell how many requests there are, when that changes. Until cancelled."""
        while True:
            self._tell_counts()
            await asyncio.sleep(COUNT_PERIOD_S)

    def _tell_counts(self) -> None:
        counts = (self.gate.unfinished, self.gate.parked)
        if counts != self._counted:
            self._counted = counts
            self.channel.tell("counts", *counts)

    def _take_facts(self, facts: list[Any]) -> None:
        self._facts = msgspec.convert(facts, Facts)

    def _take_weights(self, ref: str | None) -> None:
        self._weights = None if ref is None else WeightsRef.model_validate_json(ref)
        if self.attached.is_set():
            self.gate.weights = self._weights

    def _take_open(self, ref: str, generation: int) -> None:
        self._weights, self._opened = WeightsRef.model_validate_json(ref), generation
        if self.attached.is_set():
            self.gate.open(self._weights, generation)

    def _take_close(self, reason: str) -> None:
        self._opened = None
        self.gate.close(CancelReason(reason))

    def _unpublish(self) -> None:
        self._weights = None
        self.gate.unpublish()

    def take_requests(self) -> None:
        """The engine is attached: from here on they can be handed to it."""
        self.attached.set()
        self.gate.weights = self._weights
        if self._weights is not None and self._opened is not None:
            self.gate.open(self._weights, self._opened)

    async def _cancel(self, mode: str, timeout_s: float) -> list[int]:
        counts = await self.gate.cancel(timeout_s=timeout_s, mode=InterruptionMode(mode))
        if mode == InterruptionMode.KEEP and isinstance(self.engine, SharedEngine):
            # what is still on its way was sampled by the present version, and is to be noted so
            await self.engine.drained()
        if counts is None:
            raise AssertionError("only a drain is broken off, and that is the other side's")
        self._tell_counts()  # before the answer: a pod at rest says so
        return [counts.aborted, counts.finished, counts.tokens_returned, counts.kept]

    async def _wait_idle(self, timeout_s: float) -> bool:
        is_idle = await self.gate.wait_idle(timeout_s=timeout_s)
        self._tell_counts()
        return is_idle

    async def _cancel_one(self, request_id: str) -> str | None:
        answer = await self.generation.cancel(request_id) if self.generation else None
        return None if answer is None else answer.model_dump_json()

    async def _settle(self) -> None:
        """All notes before this were taken; and requests can be taken when this returns."""
        await self.attached.wait()

    async def _own_metrics(self) -> bytes:
        return self.metrics.text() + await asyncio.to_thread(self.engine.metrics_text)

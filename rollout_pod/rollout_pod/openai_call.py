"""A request of an agent that knows nothing of pauses: how it passes the gate, again and again."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

from rollout_pod.admission import Admission, Draining, Finished, Refused
from rollout_pod.engine.base import EngineOutput, EngineRequest
from rollout_pod.engine.front_end import Passage
from rollout_pod.gate import Gate
from rollout_pod.protocol import (
    CancelReason,
    ChoiceWeightVersionSpan,
    FinishReason,
    OnPause,
    WeightVersionSpan,
)

_serial = itertools.count()

OnAnswered = Callable[[str, int, bool, int], None]
"""Told of each sequence: its finish reason, its tokens, whether it was cut, and how many weight
versions sampled it."""


class _Patience:
    """How long a call may wait at the gate: time counts once, however many sequences wait."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._waiting = 0
        self._since = 0.0

    @property
    def left_s(self) -> float:
        """Seconds from now on; never negative."""
        spent = time.monotonic() - self._since if self._waiting else 0.0
        return max(0.0, self._left_s - spent)

    def begin(self) -> None:
        """One more sequence waits."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1

    def end(self) -> None:
        """One sequence waits no more."""
        if self._waiting == 1:
            self._left_s = self.left_s
        self._waiting -= 1


class GatedCall:
    """See ``engine.front_end.Call``.

    Args:
        gate: The pod's.
        returns_partials: What was cut is answered as it is, with finish reason ``abort``.
        timeout_s: How long it may wait at the gate, all its waits together.
        on_answered: For metrics.
        on_refused: Likewise: told why the gate was closed to a caller who does not wait.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        returns_partials: bool,
        timeout_s: float,
        on_answered: OnAnswered,
        on_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._gate = gate
        self._returns_partials = returns_partials
        self._patience = _Patience(timeout_s)
        self._on_answered = on_answered
        self._on_refused = on_refused
        self._choices = 0
        self._spans: dict[int, list[ChoiceWeightVersionSpan]] = {}
        self._gone: list[asyncio.Event] = []
        self._has_begun = False
        """The engine has had a sequence of it: what that gave would be lost with the call."""
        self.error: BaseException | None = None
        """The first one that a sequence ended by."""

    def new_choices(self, count: int) -> int:
        """See ``Call``."""
        first, self._choices = self._choices, self._choices + count
        return first

    async def pass_gate(self, make: Callable[[str], EngineRequest], gone: asyncio.Event) -> Passage:
        """See ``Call``.

        Raises:
            NotReady: no version is committed, and nothing was generated yet.
            Draining: the pod ends, and whatever it was to go on with.
            GateStayedClosed: the time to wait is over.
        """
        if gone not in self._gone:
            self._gone.append(gone)

        async def is_gone() -> None:
            await gone.wait()

        timeout_s = self._patience.left_s
        waits = True
        self._patience.begin()

        def end_of_wait() -> None:
            nonlocal waits
            if waits:
                self._patience.end()
            waits = False

        def admitted(_: Admission) -> None:
            self._has_begun = True
            end_of_wait()

        try:
            outcome = await self._gate.generate(
                f"openai {next(_serial)}",  # the blank keeps it apart from a rollout's id
                make,
                on_pause=OnPause.RETURN if self._returns_partials else OnPause.WAIT,
                timeout_s=timeout_s,
                gone=is_gone,
                on_admit=admitted,
                has_begun=self._has_begun,
                on_delta=lambda *_: None,  # tracked: an update that keeps requests keeps this one
            )
        finally:
            end_of_wait()
        return self._passage(outcome, is_wanted=not gone.is_set())

    def _passage(self, outcome: Finished | Refused, *, is_wanted: bool) -> Passage:
        """``is_wanted``: the sequence was not complete, and its reader there."""
        if isinstance(outcome, Refused):
            if outcome.cancel_reason is CancelReason.REFUSED:
                self._on_refused(self._gate.closed_for or CancelReason.PAUSED)
            return Passage(EngineOutput((), (), FinishReason.ABORT), (), goes_on=False)
        is_draining = outcome.cancel_reason is CancelReason.DRAINING
        if is_draining and is_wanted and not self._returns_partials:
            raise Draining
        interrupted = outcome.cancel_reason in (
            CancelReason.PAUSED,
            CancelReason.UPDATING,
            CancelReason.SLEEPING,
        )
        spans = tuple(
            WeightVersionSpan(
                version=span.weights.version, step=span.weights.step, start=span.start, end=span.end
            )
            for span in outcome.spans
        )
        goes_on = interrupted and not self._returns_partials
        return Passage(outcome.output, spans, goes_on=goes_on)

    def finished(
        self, choice: int, spans: Sequence[WeightVersionSpan], *, reason: str, tokens: int
    ) -> None:
        """See ``Call``."""
        self._spans[choice] = [
            ChoiceWeightVersionSpan(**span.model_dump(), choice=choice) for span in spans
        ]
        versions = len({span.version for span in spans})
        self._on_answered(reason, tokens, reason == FinishReason.ABORT, versions)

    def leave(self) -> None:
        """The answer is over, whatever its end: what the engine still has of it is aborted."""
        for gone in self._gone:
            gone.set()

    def failed(self, error: BaseException) -> None:
        """See ``Call``."""
        self.error = self.error or error

    def spans(self, choices: Sequence[int] | None = None) -> list[ChoiceWeightVersionSpan]:
        """Of these sequences, or of all that are complete."""
        asked = sorted(self._spans) if choices is None else choices
        return [span for choice in asked for span in self._spans.get(choice, ())]

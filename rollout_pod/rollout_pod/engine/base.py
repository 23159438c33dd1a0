"""The Engine Protocol: all that the pod asks of an inference engine.

An engine is picked by name from the entry-point group ``rollout_pod.engines``; each entry is a
function ``create(settings: EngineSettings) -> Engine``. Nothing outside ``rollout_pod.engine``
knows which engine runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollout_pod.protocol import EngineInfo, SleepTag

if TYPE_CHECKING:
    from rollout_pod.engine.front_end import App


class EngineError(Exception):
    """The engine could not do what it was asked, or refused it; it lives on."""


class EngineInternalError(EngineError):
    """Nothing was wrong with what it was asked: the fault is the engine's."""


class SleepUnsupported(EngineError):
    """It was not started so that it could sleep. Nothing was released, nothing is lost."""


class EngineDeadError(Exception):
    """The engine is gone: only a restart of the container helps."""


class EngineStartError(Exception):
    """The engine did not start; the message is its last error line."""


class InvalidSamplingParams(ValueError):
    """Refused by the engine's own parameter class (or unknown to it)."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


class InvalidTokens(ValueError):
    """A token id that the model does not have."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position = position
        """Of the first one, counted from 0."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with."""

    model: str
    args: Sequence[str] = ()
    """The engine's own command line, as in ``spec.engineArgs``."""
    run_dir: Path = Path("/run/rollout")
    """Where the ranks bind their sockets: ``<run_dir>/ranks/rank-<global rank>.sock``."""
    shm_dir: Path = Path("/dev/shm")
    """Where the ranks attach shared segments."""
    served_model_name: str | None = None


@dataclass(frozen=True)
class EngineRequest:
    """One request, all values already checked."""

    engine_id: str
    """Unique in the life of the engine."""
    prompt_token_ids: Sequence[int]
    params: object
    """Made by ``Engine.sampling_params``."""
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int = 0
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    native: object | None = None
    """From the engine's own front end, instead of ``params`` and all that follows them. Whether
    outputs hold log-probs is its own matter."""


@dataclass(frozen=True)
class TopLogProb:
    """One of the most likely tokens at a position."""

    token_id: int
    log_prob: float
    rank: int
    """1 is the most likely."""


@dataclass(frozen=True)
class EngineDelta:
    """Tokens that were sampled since the last delta of a request."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of the sampled tokens, under the distribution that was sampled; as long as ``token_ids``."""
    top_log_probs: tuple[tuple[TopLogProb, ...], ...] | None = None
    """By rank, where the parameters ask for them; as long as ``token_ids``."""


@dataclass(frozen=True)
class EngineOutput:
    """The one, final output of a request: also of an aborted one, with its partial tokens."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of the sampled tokens, under the distribution that was sampled; as long as ``token_ids``."""
    finish_reason: str
    """``stop``, ``length``, ``abort``, ``error`` or ``repetition``."""
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    top_log_probs: tuple[tuple[TopLogProb, ...], ...] | None = None
    """By rank, where the parameters ask for them; as long as ``token_ids``."""


OnDelta = Callable[[EngineDelta], None]


@dataclass(frozen=True)
class RankReport:
    """What one rank (global: data-parallel index x world + rank) says of a load."""

    rank: int
    host: str
    ok: bool
    version: str
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    touched: bool = True
    """Whether the model was changed: a load that failed untouched poisons nothing."""


@dataclass(frozen=True)
class CacheReport:
    """Whether each cache was cleared, as the engine itself says."""

    prefix: bool
    multimodal: bool
    encoder: bool

    @property
    def is_complete(self) -> bool:
        """All of them."""
        return self.prefix and self.multimodal and self.encoder


@dataclass(frozen=True)
class SleepReport:
    """What falling asleep released."""

    bytes: int
    """Of device memory, over all ranks, as measured; 0 where nothing was released."""
    message: str = ""
    """Why nothing was."""


class Engine(Protocol):
    """An engine inside this process' reach. Every method may raise ``EngineDeadError``."""

    async def start(self) -> EngineInfo:
        """Start and load ``settings.model``; the ranks' receivers are bound when this returns.

        Raises:
            EngineStartError: with the engine's last error line.
        """

    def sampling_params(self, raw: Mapping[str, Any], *, max_tokens: int) -> object:
        """Check ``raw`` (never changed) by the engine's own class and set the budget.

        Raises:
            InvalidSamplingParams: unknown name or refused value.
        """

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Check the tokens of a prompt, or those generated before. Cheap, and before ``generate``.

        Raises:
            InvalidTokens: one is outside of the vocabulary.
        """

    async def generate(
        self, request: EngineRequest, on_delta: OnDelta | None = None
    ) -> EngineOutput:
        """Run one request to its final output, which holds all of its tokens also where
        ``on_delta`` is told of them as they come. Cancelling this coroutine loses the partial.

        Every log-prob is finite: at a token that has none the output ends, without it, with the
        finish reason ``error`` and a stop reason that says so.

        Raises:
            EngineInternalError: a fault of the engine.
            EngineError: the engine refuses the request; in its words.
        """

    async def abort(self, engine_id: str) -> None:
        """Make ``generate`` of this request return its partial. Unknown ids are ignored."""

    async def pause(self, *, keep: bool = False) -> None:
        """Stop the scheduler, abort everything it knows of (each ``generate`` gets its partial)
        and clear the prefix cache. May be called again; new requests are queued meanwhile.

        With ``keep`` nothing is aborted: requests stay as they are, no token of them comes any
        more when this returns, and what their KV cache held is computed anew after ``resume``.
        """

    async def resume(self) -> None:
        """Let the scheduler go on. Idempotent."""

    async def load_weights(
        self, session: str, *, version: str, flush: bool, timeout_s: float
    ) -> tuple[RankReport, ...]:
        """Let every rank take the buckets of ``session`` that its receiver was promised.

        Only while paused. ``flush`` first clears what a failed load left. A rank that fails says
        so in its report; the call returns within ``timeout_s`` (plus a second) whatever a sender
        does.
        """

    async def clear_caches(self) -> CacheReport:
        """Clear prefix, multimodal and encoder caches. The prefix cache cannot be cleared while
        requests hold blocks of it; the others are left alone then, too, since running requests may
        need what is in them.
        """

    def sleep_refusal(self) -> str | None:
        """Why this engine cannot sleep and what to do about it; None where it can. Known after
        ``start``.
        """

    async def sleep(self, level: int) -> SleepReport:
        """Release weights and KV cache. Only while paused and without requests, all resident.

        Level 1 keeps the weights in host memory; after level 2 they are lost, and only a complete
        ``load_weights`` gives the model defined ones again. The KV cache is lost at either.

        Raises:
            SleepUnsupported: it cannot; nothing was changed.
            EngineError: it failed, and nobody knows how far it came.
        """

    async def wake(self, tags: frozenset[SleepTag]) -> int:
        """Take back ``tags`` of what sleeps; returns the bytes of device memory that took. The
        scheduler stays paused also when everything is resident again.

        Raises:
            EngineError: it failed, and nobody knows how far it came.
        """

    async def publish_version(self, version: str) -> None:
        """Tell the engine the name of what it now holds (for its own metrics and spans)."""

    def rank_sockets(self) -> tuple[Path, ...]:
        """The socket of every rank's receiver, ordered by global rank. Known after ``start``."""

    def model_path(self) -> Path | None:
        """The folder that ``base`` was loaded from; None where that is no local folder."""

    async def ping(self, *, timeout_s: float) -> None:
        """Return when the engine's loop has answered: between two of its steps.

        Raises:
            EngineError: it did not answer in time.
        """

    def front_end(self) -> "App":
        """The engine's own OpenAI server, for the ``ROUTES`` of ``front_end``. Known after
        ``start``.

        Raises:
            NoFrontEnd: it has none, or none as it was started.
        """

    def dead_error(self) -> str | None:
        """Why the engine is dead; None while it lives. Cheap: asked by every probe."""

    async def shutdown(self) -> None:
        """End the engine and all its processes. Idempotent; never raises."""

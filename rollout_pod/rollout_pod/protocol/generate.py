"""``POST /v1/rollout/generate``: tokens in, tokens out, and whether the rollout was cut.

The first three fields of the answer are the tuple that verl's ``generate_for_partial`` returns.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]


class OnPause(StrEnum):
    """What happens to a request that finds the gate closed."""

    RETURN = "return"
    """Answered at once: no tokens, ``is_cancel`` true, ``cancel_reason`` ``refused``."""
    WAIT = "wait"
    """Parked until the gate opens or ``timeout_s`` is over (then 503 with ``Retry-After``)."""


class FinishReason(StrEnum):
    """The engine's finish reasons."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """The engine could not go on: ``stop_reason`` says why (a log-prob that is no number)."""
    REPETITION = "repetition"


class CancelReason(StrEnum):
    """Why a rollout was cut."""

    REFUSED = "refused"
    """The gate was closed when the request came: the engine never saw it."""
    PAUSED = "paused"
    UPDATING = "updating"
    SLEEPING = "sleeping"
    """The engine's memory was released: it may take long until this pod generates again."""
    CANCELLED = "cancelled"
    """By the caller."""
    DRAINING = "draining"


MediaUrl = Annotated[str, Field(min_length=1)]
"""``https://``, ``http://`` or ``data:...;base64,``; ``file://`` where the engine allows it."""


class MultiModalData(BaseModel):
    """Images and videos, in the order of their placeholders in the prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: Annotated[list[MediaUrl], Field(max_length=1024)] = []
    video: Annotated[list[MediaUrl], Field(max_length=1024)] = []


class GenerateRequest(BaseModel):
    """One attempt at a rollout. Unknown fields are refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request_id: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1 << 22)]
    generated_token_ids: Annotated[list[TokenId], Field(max_length=1 << 22)] = []
    """What earlier attempts generated; counts against ``max_tokens``."""
    sampling_params: dict[str, Any] = {}
    """vLLM's names. ``max_tokens`` is the budget of the whole rollout, over all attempts."""
    attempt: Annotated[int, Field(strict=True, ge=1, le=1 << 31)] = 1
    """The caller's count, echoed."""
    session_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """The sticky key of a conversation or a group of samples, apart from ``request_id``."""
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    lora: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """The name of an adapter that the engine was started with."""
    multi_modal_data: MultiModalData | None = None
    """The prompt holds a placeholder for each, as a chat template writes it; expanded here. All
    attempts send the same prompt and the same data.
    """
    return_routed_experts: Annotated[bool, Field(strict=True)] = False
    priority: Annotated[int, Field(strict=True, ge=-(1 << 31), lt=1 << 31)] = 0
    stream: Annotated[bool, Field(strict=True)] = False
    """Answer by server-sent events: ``delta`` events, then one ``end`` (or ``error``)."""
    on_pause: OnPause = OnPause.RETURN
    timeout_s: Annotated[float, Field(strict=True, gt=0, le=86400)] = 600.0
    """How long a parked request waits for the gate."""


class WeightVersionSpan(BaseModel):
    """Tokens ``[start, end)`` of this answer were sampled by ``version``."""

    model_config = ConfigDict(frozen=True)

    version: str
    step: int | None
    start: int
    end: int


class ChoiceWeightVersionSpan(WeightVersionSpan):
    """A span of one of an OpenAI answer's sequences: ``choice`` is its index."""

    choice: int


class TokenLogProb(BaseModel):
    """One of the most likely tokens at a position; ``rank`` 1 is the most likely."""

    model_config = ConfigDict(frozen=True)

    token_id: int
    log_prob: float
    rank: int


class RoutedExperts(BaseModel):
    """Which experts each token went to: an array ``[tokens, layers, experts per token]``, C order.

    Its first row is the prompt's first token (or that of ``routed_experts_prompt_start``), its last
    one the last token that was an input of the model.
    """

    model_config = ConfigDict(frozen=True)

    shape: tuple[int, int, int]
    dtype: str
    """NumPy's name, of unsigned or signed integers in little-endian order: ``uint8``, ``int16``."""
    data: str
    """Base64."""


class GenerateResponse(BaseModel):
    """The tokens of this attempt (not of earlier ones), with one log-prob for each."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    log_probs: list[float]
    is_cancel: bool
    """The engine's finish reason was ``abort`` (or the engine never saw the request)."""
    request_id: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    cancel_reason: CancelReason | None
    weight_versions: list[WeightVersionSpan]
    """Covers ``[0, len(token_ids))`` without a gap."""
    attempt: int
    generation: int
    """Of the desired document that was in force when the request was admitted."""
    num_cached_tokens: int
    top_log_probs: list[list[TokenLogProb]] | None = None
    """The k most likely tokens at each position, where ``logprobs: k`` asks for them."""
    prompt_log_probs: list[list[TokenLogProb] | None] | None = None
    """One entry for each token of the prompt, where ``prompt_logprobs: k`` asks for them: that
    token's own first, then the k most likely ones besides it. Null for the first token, which
    nothing predicts, and where the engine gave no finite number. None at all in an answer that
    was cut before the prompt was done.
    """
    routed_experts: RoutedExperts | None = None
    """Where ``return_routed_experts`` asks for them; null in an answer without tokens."""


class GenerateDelta(BaseModel):
    """Event ``delta`` of a stream: tokens that were sampled since the last one."""

    model_config = ConfigDict(frozen=True)

    token_ids: list[int]
    log_probs: list[float]
    version: str
    """The weight version that sampled them."""
    step: int | None = None
    top_log_probs: list[list[TokenLogProb]] | None = None


class GenerateEnd(BaseModel):
    """Event ``end``, the last one of a stream, also of a cut one: an answer without its tokens."""

    model_config = ConfigDict(frozen=True)

    request_id: str
    num_tokens: int
    """The deltas of this stream held so many."""
    is_cancel: bool
    finish_reason: FinishReason
    stop_reason: int | str | None
    cancel_reason: CancelReason | None
    weight_versions: list[WeightVersionSpan]
    attempt: int
    generation: int
    num_cached_tokens: int
    prompt_log_probs: list[list[TokenLogProb] | None] | None = None
    routed_experts: RoutedExperts | None = None

"""What pods, operator and clients say to each other over HTTP: documents, nothing that acts.

Imported by all three; imports nothing but pydantic.
"""

from rollout_pod.protocol.desired import (
    BASE_VERSION,
    LOCAL_OWNER,
    URL_PATTERN,
    DesiredDocument,
    Interruption,
    InterruptionMode,
    WeightsRef,
    WeightsSource,
)
from rollout_pod.protocol.generate import (
    CancelReason,
    ChoiceWeightVersionSpan,
    FinishReason,
    GenerateDelta,
    GenerateEnd,
    GenerateRequest,
    GenerateResponse,
    OnPause,
    TokenLogProb,
    WeightVersionSpan,
)
from rollout_pod.protocol.problem import PROBLEM_MEDIA_TYPE, Problem, ProblemCode
from rollout_pod.protocol.state import (
    EngineInfo,
    FetchProgress,
    GateState,
    PodPhase,
    RankState,
    StateDocument,
    UpdatePhase,
    UpdateSeconds,
    UpdateState,
)
from rollout_pod.protocol.wellknown import (
    ADMIN_PORT,
    DATA_PORT,
    DESIRED_ANNOTATION,
    STATE_POLL_MAX_S,
    TOKEN_HEADER,
)

__all__ = [
    "ADMIN_PORT",
    "BASE_VERSION",
    "DATA_PORT",
    "DESIRED_ANNOTATION",
    "LOCAL_OWNER",
    "PROBLEM_MEDIA_TYPE",
    "STATE_POLL_MAX_S",
    "TOKEN_HEADER",
    "URL_PATTERN",
    "CancelReason",
    "ChoiceWeightVersionSpan",
    "DesiredDocument",
    "EngineInfo",
    "FetchProgress",
    "FinishReason",
    "GateState",
    "GenerateDelta",
    "GenerateEnd",
    "GenerateRequest",
    "GenerateResponse",
    "Interruption",
    "InterruptionMode",
    "OnPause",
    "PodPhase",
    "Problem",
    "ProblemCode",
    "RankState",
    "StateDocument",
    "TokenLogProb",
    "UpdatePhase",
    "UpdateSeconds",
    "UpdateState",
    "WeightVersionSpan",
    "WeightsRef",
    "WeightsSource",
]

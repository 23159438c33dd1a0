"""What pods, operator and clients say to each other over HTTP: documents, nothing that acts.

Imported by all three; imports nothing but pydantic.
"""

from rollout_pod.protocol.caches import CachesCleared, ClearCachesRequest
from rollout_pod.protocol.desired import (
    BASE_VERSION,
    LOCAL_OWNER,
    DesiredDocument,
    Interruption,
    InterruptionMode,
    SleepSpec,
    SleepTag,
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
    MultiModalData,
    OnPause,
    RoutedExperts,
    TokenLogProb,
    WeightVersionSpan,
)
from rollout_pod.protocol.problem import PROBLEM_MEDIA_TYPE, Problem, ProblemCode
from rollout_pod.protocol.state import (
    EngineInfo,
    GateState,
    PodPhase,
    RankState,
    SleepState,
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
    "CachesCleared",
    "CancelReason",
    "ChoiceWeightVersionSpan",
    "ClearCachesRequest",
    "DesiredDocument",
    "EngineInfo",
    "FinishReason",
    "GateState",
    "GenerateDelta",
    "GenerateEnd",
    "GenerateRequest",
    "GenerateResponse",
    "Interruption",
    "InterruptionMode",
    "MultiModalData",
    "OnPause",
    "PodPhase",
    "Problem",
    "ProblemCode",
    "RankState",
    "RoutedExperts",
    "SleepSpec",
    "SleepState",
    "SleepTag",
    "StateDocument",
    "TokenLogProb",
    "UpdatePhase",
    "UpdateSeconds",
    "UpdateState",
    "WeightVersionSpan",
    "WeightsRef",
    "WeightsSource",
]

"""Conditions and their reasons. Reasons are stable: people alert on them (docs/failures.md)."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_MESSAGE = 4096


class ConditionType(StrEnum):
    """kstatus' three, and ours."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    AVAILABLE = "Available"
    PAUSED = "Paused"
    WEIGHTS_READY = "WeightsReady"


class Reason(StrEnum):
    """Why a condition is what it is."""

    # Ready
    SERVING = "Serving"
    PAUSED = "Paused"
    SLEEPING = "Sleeping"
    # nothing happens before somebody mends something
    INVALID_SPEC = "InvalidSpec"
    FOREIGN_OBJECT = "ForeignObject"
    INVALID_TEMPLATE = "InvalidTemplate"
    ENGINE_FAILED = "EngineFailed"
    CRASH_LOOP = "CrashLoop"
    UPDATE_FAILED = "UpdateFailed"
    SLEEP_UNSUPPORTED = "SleepUnsupported"
    # tried again until somebody mends something
    POD_FORBIDDEN = "PodForbidden"
    QUOTA_EXCEEDED = "QuotaExceeded"
    UNSCHEDULABLE = "Unschedulable"
    VOLUME_UNAVAILABLE = "VolumeUnavailable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    POD_CONFIG_ERROR = "PodConfigError"
    WEIGHTS_AGENT_FAILED = "WeightsAgentFailed"
    WEIGHTS_UNAVAILABLE = "WeightsUnavailable"
    POD_UNREACHABLE = "PodUnreachable"
    UNAUTHORIZED = "Unauthorized"
    DOCUMENT_REFUSED = "DocumentRefused"
    INTERNAL_ERROR = "InternalError"
    # on the way
    WAITING_FOR_PREDECESSOR = "WaitingForPredecessor"
    POD_CREATING = "PodCreating"
    POD_STARTING = "PodStarting"
    POD_REPLACING = "PodReplacing"
    POD_FAILED = "PodFailed"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    NODE_SHUTDOWN = "NodeShutdown"
    NODE_LOST = "NodeLost"
    NODE_POD_GONE = "NodePodGone"
    FENCED = "Fenced"
    ENGINE_STARTING = "EngineStarting"
    ENGINE_RESTARTING = "EngineRestarting"
    OOM_KILLED = "OOMKilled"
    LOADING_WEIGHTS = "LoadingWeights"
    AWAITING_PUSH = "AwaitingPush"
    POISONED = "Poisoned"
    DRAINING = "Draining"
    UPDATING = "Updating"
    PAUSING = "Pausing"
    RESUMING = "Resuming"
    FALLING_ASLEEP = "FallingAsleep"
    WAKING = "Waking"
    WAITING_FOR_WAKE = "WaitingForWake"
    READINESS_PENDING = "ReadinessPending"
    # of the other conditions
    SETTLED = "Settled"
    NOT_STALLED = "NotStalled"
    NOT_SERVING = "NotServing"
    NOT_PAUSED = "NotPaused"
    COMMITTED = "Committed"


Truth = Literal["True", "False", "Unknown"]


class Condition(BaseModel):
    """One condition, as ``metav1.Condition``."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    type: Annotated[str, Field(min_length=1, max_length=64)]
    status: Truth
    reason: Annotated[str, Field(min_length=1, max_length=128)]
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    last_transition_time: str = ""


def shorten(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return ``text`` on at most ``limit`` characters; what is cut is marked."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def settle(new: Condition, previous: Condition | None) -> Condition:
    """Return ``new`` with the previous transition time where the status did not change."""
    if previous is not None and previous.status == new.status and previous.last_transition_time:
        return new.model_copy(update={"last_transition_time": previous.last_transition_time})
    return new

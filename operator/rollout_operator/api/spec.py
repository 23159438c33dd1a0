"""``spec`` of a RolloutReplica. The CRD holds the same fields and bounds (a test compares)."""

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from rollout_operator.api.names import MAX_NODES
from rollout_operator.api.quantity import parse_bytes
from rollout_pod.protocol import URL_PATTERN, SleepTag

VERSION_PLACEHOLDER: Final = "{version}"
VERSION_PATTERN: Final = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
ENGINE_PATTERN: Final = VERSION_PATTERN
DEFAULT_ENGINE: Final = "vllm"
ONE_NODE_FLAGS: Final = frozenset({"--data-parallel-size", "-dp", "--api-server-count", "-asc"})
MAX_BUCKET: Final = 1 << 34
MIN_BUCKET: Final = 1 << 12
MAX_HOST_MEMORY: Final = 1 << 44


class _Part(BaseModel):
    # A newer CRD may serve fields that this operator does not know yet.
    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )


class Transport(StrEnum):
    """How weight bytes reach the engine's workers."""

    AUTO = "Auto"
    SHARED_MEMORY = "SharedMemory"
    CUDA_IPC = "CUDAIPC"


class StagingPlace(StrEnum):
    """Where the next version waits to be loaded."""

    HOST = "Host"
    DEVICE = "Device"


class InterruptionMode(StrEnum):
    """What a pause or an update does to requests in flight."""

    ABORT = "Abort"
    KEEP = "Keep"
    DRAIN = "Drain"


class SecretRef(_Part):
    """A Secret of the replica's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]


class PushSource(_Part):
    """A trainer in the replica's pod sends each version."""


class WeightsSource(_Part):
    """Where versions come from; exactly one of path, url and push is set."""

    path: Annotated[str | None, Field(min_length=1, max_length=3072)] = None
    url: Annotated[str | None, Field(min_length=1, max_length=2048, pattern=URL_PATTERN)] = None
    secret_ref: SecretRef | None = None
    push: PushSource | None = None


class WeightsSpec(_Part):
    """How weights reach the engine."""

    host_memory: Annotated[str | int, Field(max_length=32)] = "16Gi"
    staging: StagingPlace = StagingPlace.HOST
    transport: Transport = Transport.AUTO
    bucket_size: Annotated[str | int, Field(max_length=32)] = "256Mi"
    source: WeightsSource | None = None
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3

    @field_validator("host_memory")
    @classmethod
    def _host_memory_in_range(cls, value: str | int) -> str | int:
        return _within(value, 1, MAX_HOST_MEMORY)

    @field_validator("bucket_size")
    @classmethod
    def _bucket_in_range(cls, value: str | int) -> str | int:
        return _within(value, MIN_BUCKET, MAX_BUCKET)


class Interruption(_Part):
    """What a pause or an update does to requests in flight, and how long that may take."""

    mode: InterruptionMode = InterruptionMode.ABORT
    timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 60


class Sleep(_Part):
    """What of the engine's memory stays released."""

    level: Annotated[int, Field(ge=1, le=2)] = 1
    tags: Annotated[tuple[SleepTag, ...], Field(min_length=1, max_length=2)] = tuple(SleepTag)


class RestartPolicy(_Part):
    """When a replica that failed starts anew, and when it gives up."""

    backoff_seconds: Annotated[int, Field(ge=0, le=3600)] = 10
    backoff_limit_seconds: Annotated[int, Field(ge=0, le=86400)] = 600
    reset_after_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 10


class RolloutSpec(_Part):
    """All that a person asks of a replica."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    engine: Annotated[str, Field(min_length=1, max_length=63, pattern=ENGINE_PATTERN)] = (
        DEFAULT_ENGINE
    )
    image: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    engine_args: Annotated[
        tuple[Annotated[str, Field(max_length=4096)], ...], Field(max_length=256)
    ] = ()
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    load_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 3600
    weights: WeightsSpec = WeightsSpec()
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 30
    restart_policy: RestartPolicy = RestartPolicy()
    template: dict[str, Any] = {}
    paused: bool = False
    weight_version: Annotated[
        str | None, Field(min_length=1, max_length=128, pattern=VERSION_PATTERN)
    ] = None
    weight_step: Annotated[int | None, Field(ge=0)] = None
    interruption: Interruption = Interruption()
    sleep: Sleep | None = None

    @model_validator(mode="after")
    def _nodes_fit(self) -> "RolloutSpec":
        if self.nodes > 1:
            refusal = _refusal_of_nodes(self)
            if refusal:
                raise ValueError(f"nodes above 1: {refusal}")
        return self


def _refusal_of_nodes(spec: RolloutSpec) -> str | None:
    """Why this cannot span nodes; the CRD refuses what it can see of that as well."""
    if spec.engine != DEFAULT_ENGINE:
        return f"engine {spec.engine} works on one node only; use {DEFAULT_ENGINE}, or nodes: 1"
    if spec.weights.staging is StagingPlace.DEVICE:
        return "weights.staging Device works on one node only; use Host"
    if spec.weights.source is not None and spec.weights.source.push is not None:
        return "weights.source.push works on one node only; use path or url"
    for arg in spec.engine_args:
        flag = arg.split("=", 1)[0].replace("_", "-")
        if flag in ONE_NODE_FLAGS:
            return f"engineArgs: {flag} works on one node only; remove it"
    return None


def _within(value: str | int, low: int, high: int) -> str | int:
    if not low <= parse_bytes(value) <= high:
        raise ValueError(f"{value!r} is out of range: from {low} to {high} bytes")
    return value

"""The desired document: all that is asked of a pod, in one JSON object."""

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

BASE_VERSION: Final = "base"
"""The name of the model's own checkpoint."""

URL_PATTERN: Final = r"^(https?|s3|gs|hf)://[^@/?#\s]+(/[^?#\s]*)?$"
"""A folder's URL: no user, query or fragment, which could be secrets."""

Transport = Literal["auto", "shared_memory", "cuda_ipc"]

LOCAL_OWNER: Final = "local"
"""The owner of a pod that no operator steers."""


class _Document(BaseModel):
    # Unknown fields are ignored, so that pods and operator may differ by a version.
    model_config = ConfigDict(frozen=True, extra="ignore")


def _is_none(value: object) -> bool:
    return value is None


class PushSource(_Document):
    """A trainer in the same pod sends the version when it is ready to."""


class WeightsSource(_Document):
    """Where the weights of a version come from: a folder of safetensors files, or a trainer.
    Exactly one field is set; those that are not are left out of the JSON.
    """

    path: Annotated[str | None, Field(min_length=1, max_length=4096, exclude_if=_is_none)] = None
    """As the weights agent sees it."""
    url: Annotated[
        str | None,
        Field(min_length=1, max_length=4096, pattern=URL_PATTERN, exclude_if=_is_none),
    ] = None
    """Credentials are the agent's, and never part of it."""
    push: Annotated[PushSource | None, Field(exclude_if=_is_none)] = None

    @property
    def location(self) -> str:
        """Path or URL; empty where a trainer pushes."""
        return self.path or self.url or ""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(value is not None for value in (self.path, self.url, self.push)) != 1:
            raise ValueError("source: set exactly one of path, url and push")
        return self


class WeightsRef(_Document):
    """One version and where to get it.

    ``version`` is opaque and is what two references are compared by when weights are loaded;
    ``step`` is the trainer's own counter, the only thing that is ever ordered.
    """

    version: Annotated[str, Field(min_length=1, max_length=253)]
    step: Annotated[int | None, Field(strict=True, ge=0)] = None
    source: WeightsSource | None = None
    """None only for ``base``, the model's own checkpoint."""

    @property
    def is_pushed(self) -> bool:
        """Only a trainer can bring it: nobody can fetch it."""
        return self.source is not None and self.source.push is not None

    @model_validator(mode="after")
    def _only_base_has_no_source(self) -> Self:
        if (self.source is None) != (self.version == BASE_VERSION):
            raise ValueError(
                f"version {self.version!r}: every version but {BASE_VERSION!r} needs a source, "
                f"and {BASE_VERSION!r} (the model's own checkpoint) takes none"
            )
        return self


class InterruptionMode(StrEnum):
    """What a pause or an update does to requests in flight."""

    ABORT = "abort"
    """Each caller gets its partial at once."""
    KEEP = "keep"
    """They stay in the engine, and go on when the gate opens; after an update under the new
    weights, with their KV cache computed anew. The answer's spans tell which tokens are whose."""
    DRAIN = "drain"
    """They may end by themselves until ``timeout_s``; what is left then is aborted."""


class Interruption(_Document):
    """What a pause or an update does to requests in flight, and how long that may take."""

    mode: InterruptionMode = InterruptionMode.ABORT
    timeout_s: Annotated[float, Field(strict=True, gt=0, le=3600)] = 60.0


class SleepTag(StrEnum):
    """A part of the engine's memory that can be released and taken back."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class SleepSpec(_Document):
    """What of the engine's memory stays released. To wake a part is to name it no longer."""

    level: Literal[1, 2] = 1
    """Of the weights: 1 moves them to host memory, 2 drops them (a complete update brings them
    back). What the KV cache holds is dropped at either level."""
    tags: Annotated[tuple[SleepTag, ...], Field(min_length=1, max_length=2)] = tuple(SleepTag)

    @field_validator("tags")
    @classmethod
    def _each_once(cls, tags: tuple[SleepTag, ...]) -> tuple[SleepTag, ...]:
        if len(set(tags)) != len(tags):
            raise ValueError("name each tag once: weights, kv_cache or both")
        return tuple(tag for tag in SleepTag if tag in tags)

    def without(self, tags: Collection[SleepTag]) -> "SleepSpec | None":
        """What stays released when these are taken back; None where that is nothing."""
        left = tuple(tag for tag in self.tags if tag not in tags)
        return self.model_copy(update={"tags": left}) if left else None


class DesiredDocument(_Document):
    """What a pod has to become. Fenced by ``owner`` and ``generation``."""

    owner: Annotated[str, Field(min_length=1, max_length=253)]
    generation: Annotated[int, Field(strict=True, ge=0)]
    paused: Annotated[bool, Field(strict=True)] = False
    weights: WeightsRef | None = None
    """None asks for the model's own checkpoint, ``base``."""
    fallback: WeightsRef | None = None
    """The version that this replica committed last; None for a new one."""
    interruption: Interruption = Interruption()
    sleep: SleepSpec | None = None
    """None keeps all memory resident. While anything is released nothing is generated."""
    bucket_bytes: Annotated[int, Field(strict=True, ge=1 << 12, le=1 << 34)] = 256 << 20
    update_timeout_s: Annotated[float, Field(strict=True, gt=0, le=86400)] = 600.0
    max_attempts: Annotated[int, Field(strict=True, ge=1, le=100)] = 3
    """Failures after the gate closed, before a version is rejected."""
    transport: Transport = "auto"
    """How bytes reach the ranks. A named one that cannot work is an error, never replaced."""

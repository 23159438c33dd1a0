"""The desired document: all that is asked of a pod, in one JSON object."""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

BASE_VERSION: Final = "base"
"""The name of the model's own checkpoint."""

URL_PATTERN: Final = r"^(https?|s3|gs|hf)://[^@/?#\s]+(/[^?#\s]*)?$"
"""A folder's URL: no user, query or fragment, which could be secrets."""

LOCAL_OWNER: Final = "local"
"""The owner of a pod that no operator steers."""


class _Document(BaseModel):
    # Unknown fields are ignored, so that pods and operator may differ by a version.
    model_config = ConfigDict(frozen=True, extra="ignore")


class WeightsSource(_Document):
    """Where the weights of a version lie: a folder of safetensors files. Exactly one field is set;
    those that are not are left out of the JSON.
    """

    path: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    """As the weights agent sees it."""
    url: Annotated[str | None, Field(min_length=1, max_length=4096, pattern=URL_PATTERN)] = None
    """Credentials are the agent's, and never part of it."""

    @property
    def location(self) -> str:
        """Path or URL."""
        return self.path or self.url or ""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.path is None) == (self.url is None):
            raise ValueError("source: set exactly one of path and url")
        return self

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None}


class WeightsRef(_Document):
    """One version and where to get it.

    ``version`` is opaque and is what two references are compared by when weights are loaded;
    ``step`` is the trainer's own counter, the only thing that is ever ordered.
    """

    version: Annotated[str, Field(min_length=1, max_length=253)]
    step: Annotated[int | None, Field(ge=0)] = None
    source: WeightsSource | None = None
    """None only for ``base``, the model's own checkpoint."""

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
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0


class DesiredDocument(_Document):
    """What a pod has to become. Fenced by ``owner`` and ``generation``."""

    owner: Annotated[str, Field(min_length=1, max_length=253)]
    generation: Annotated[int, Field(ge=0)]
    paused: bool = False
    weights: WeightsRef | None = None
    """None asks for the model's own checkpoint, ``base``."""
    fallback: WeightsRef | None = None
    """The version that this replica committed last; None for a new one."""
    interruption: Interruption = Interruption()
    bucket_bytes: Annotated[int, Field(ge=1 << 12, le=1 << 34)] = 256 << 20
    update_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Failures after the gate closed, before a version is rejected."""
    transport: Literal["auto", "shared_memory"] = "auto"

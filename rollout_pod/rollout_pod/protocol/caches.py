"""``POST /admin/v1/clear-caches``: forget what was computed, at once."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ClearCachesRequest(BaseModel):
    """How long it may be tried: requests in flight hold blocks of the prefix cache."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_s: Annotated[float, Field(strict=True, ge=0, le=600)] = 30.0


class CachesCleared(BaseModel):
    """Every cache was cleared, each as the engine itself confirmed."""

    model_config = ConfigDict(frozen=True)

    cleared: tuple[str, ...]
    """The names of the caches: ``prefix``, ``multimodal``, ``encoder``."""
    attempts: int
    seconds: float

"""Errors as ``application/problem+json`` (RFC 9457) with a stable ``code``."""

from enum import StrEnum
from typing import Final

from pydantic import BaseModel

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"


class ProblemCode(StrEnum):
    """Stable: programs switch on these."""

    INVALID_JSON = "invalid_json"
    INVALID_FIELD = "invalid_field"
    """422; ``errors`` names each field."""
    INVALID_SAMPLING_PARAMS = "invalid_sampling_params"
    PROMPT_TOO_LONG = "prompt_too_long"
    BODY_TOO_LARGE = "body_too_large"
    DUPLICATE_REQUEST = "duplicate_request"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNAUTHORIZED = "unauthorized"
    FENCED = "fenced"
    """409: another owner, or a generation lower than the newest."""
    PRECONDITION_FAILED = "precondition_failed"
    """412: ``If-Match`` names an older state."""
    NOT_READY = "not_ready"
    """503: no committed version, or the engine is dead."""
    GATE_CLOSED = "gate_closed"
    """503: a parked request's time is over."""
    DRAINING = "draining"
    ENGINE_NOT_UP = "engine_not_up"
    """503: there are no ranks yet that could be pushed to."""
    NOT_DESIRED = "not_desired"
    """409: this version is not the one that the pod waits for."""
    PUSH_IN_PROGRESS = "push_in_progress"
    """409: another sender's session, or another load, is on."""
    STALE_SESSION = "stale_session"
    """409: the session belongs to an earlier start of the pod, or is over."""
    NOT_ACCEPTED = "not_accepted"
    """409: not every rank has accepted the session, or not the same tensors."""
    ASLEEP = "asleep"
    """409: the engine sleeps; wake it first."""
    CACHE_IN_USE = "cache_in_use"
    """503: requests held a cache for the whole ``timeout_s``."""
    WRONG_GROUP = "wrong_group"
    """409: this pod belongs to another incarnation of the replica."""
    RANK_TAKEN = "rank_taken"
    """409: another process has joined as this rank, and the engine has started with it."""
    WEIGHTS_AGENT = "weights_agent"
    """502: the weights agent of this node failed, or is not there."""
    NOT_SUPPORTED = "not_supported"
    """501: the engine cannot do this as it was started."""
    STORE_FAILED = "store_failed"
    """507: the run folder is full, or cannot be written; nothing has changed."""
    ENGINE_ERROR = "engine_error"
    INTERNAL = "internal"


class FieldError(BaseModel):
    """One field that was refused, and why."""

    field: str
    message: str


class Problem(BaseModel):
    """The body of every answer with a status of 400 or more."""

    type: str = "about:blank"
    title: str
    status: int
    code: ProblemCode
    detail: str
    errors: list[FieldError] = []

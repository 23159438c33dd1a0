"""Every error as ``application/problem+json`` with a stable code."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from rollout_pod.admission import Draining, DuplicateRequest, GateStayedClosed, NotReady
from rollout_pod.engine.base import (
    EngineDeadError,
    EngineError,
    EngineInternalError,
    InvalidField,
    InvalidSamplingParams,
)
from rollout_pod.engine.front_end import NoFrontEnd
from rollout_pod.generation import PromptTooLong
from rollout_pod.nodes.muster import RankTaken, UnknownRank, WrongGroup
from rollout_pod.protocol import PROBLEM_MEDIA_TYPE, Problem, ProblemCode
from rollout_pod.protocol.problem import FieldError
from rollout_pod.supervisor.caches import CachesInUse, EngineAsleep, EngineNotUp
from rollout_pod.supervisor.pushing import NoRanks, PushRefused, UnknownSession
from rollout_pod.supervisor.store import StoreError
from rollout_pod.supervisor.supervisor import Fenced, PreconditionFailed
from rollout_pod.weights.agent_client import AgentClientError

log = structlog.get_logger(__name__)

RETRY_AFTER_S = 1
"""What a client that is told to come back should wait, in seconds."""


def problem_response(
    status: int,
    code: ProblemCode,
    title: str,
    detail: str,
    *,
    errors: list[FieldError] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """One problem as an answer, from its parts."""
    body = Problem(title=title, status=status, code=code, detail=detail, errors=errors or [])
    return respond(body, headers=headers)


def respond(problem: Problem, *, headers: Mapping[str, str] | None = None) -> Response:
    """A problem as an answer; 503 carries ``Retry-After``."""
    retry = {"Retry-After": str(RETRY_AFTER_S)} if problem.status == 503 else {}
    return Response(
        json.dumps(_valid(problem.model_dump())),
        status_code=problem.status,
        media_type=PROBLEM_MEDIA_TYPE,
        headers={**retry, **(headers or {})},
    )


def _valid(value: Any) -> Any:
    """The same with surrogates spelt out: what a caller sent may be no valid text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _valid(each) for name, each in value.items()}
    return [_valid(each) for each in value] if isinstance(value, list) else value


_KNOWN: Mapping[type, tuple[int, ProblemCode, str, str]] = {
    NotReady: (503, ProblemCode.NOT_READY, "Not ready", "no weight version is committed yet"),
    Draining: (503, ProblemCode.DRAINING, "Draining", "this pod ends: ask another one"),
    GateStayedClosed: (
        503, ProblemCode.GATE_CLOSED, "Paused", "generation stayed paused until timeout_s was over",
    ),
    DuplicateRequest: (
        409, ProblemCode.DUPLICATE_REQUEST, "Duplicate request",
        "a request with this request_id is alive: wait for its answer or use another id",
    ),
    PromptTooLong: (400, ProblemCode.PROMPT_TOO_LONG, "Prompt too long", ""),
    Fenced: (409, ProblemCode.FENCED, "Fenced", ""),
    PreconditionFailed: (412, ProblemCode.PRECONDITION_FAILED, "Precondition failed", ""),
    NoFrontEnd: (501, ProblemCode.NOT_SUPPORTED, "No OpenAI routes", ""),
    EngineNotUp: (503, ProblemCode.NOT_READY, "Not ready", ""),
    NoRanks: (503, ProblemCode.ENGINE_NOT_UP, "Engine not up", ""),
    UnknownSession: (404, ProblemCode.NOT_FOUND, "Unknown session", ""),
    WrongGroup: (409, ProblemCode.WRONG_GROUP, "Wrong group", ""),
    RankTaken: (409, ProblemCode.RANK_TAKEN, "Rank taken", ""),
    UnknownRank: (422, ProblemCode.INVALID_FIELD, "Unknown rank", ""),
    AgentClientError: (502, ProblemCode.WEIGHTS_AGENT, "The weights agent failed", ""),
    StoreError: (507, ProblemCode.STORE_FAILED, "Not kept", ""),
    EngineAsleep: (409, ProblemCode.ASLEEP, "Asleep", ""),
    CachesInUse: (503, ProblemCode.CACHE_IN_USE, "Caches in use", ""),
    EngineError: (400, ProblemCode.ENGINE_ERROR, "Refused by the engine", ""),
    EngineInternalError: (500, ProblemCode.ENGINE_ERROR, "The engine failed", ""),
    EngineDeadError: (503, ProblemCode.NOT_READY, "Engine dead", "the engine is dead; it restarts"),
}  # fmt: skip


def problem_of(error: BaseException) -> Problem:
    """What a caller is told of an exception of the pod's own."""
    if isinstance(error, InvalidSamplingParams):
        field = f"sampling_params.{error.field}" if error.field else "sampling_params"
        return Problem(
            title="Invalid sampling parameters",
            status=422,
            code=ProblemCode.INVALID_SAMPLING_PARAMS,
            detail=f"{field}: {error}",
            errors=[FieldError(field=field, message=str(error))],
        )
    if isinstance(error, InvalidField):
        return Problem(
            title="Invalid field",
            status=422,
            code=ProblemCode.INVALID_FIELD,
            detail=f"{error.field}: {error}",
            errors=[FieldError(field=error.field, message=str(error))],
        )
    if isinstance(error, PushRefused):
        return Problem(title="Push refused", status=409, code=error.code, detail=str(error))
    for kind in type(error).__mro__:
        if kind in _KNOWN:
            status, code, title, detail = _KNOWN[kind]
            return Problem(title=title, status=status, code=code, detail=detail or str(error))
    return Problem(
        title="Internal error", status=500, code=ProblemCode.INTERNAL, detail=type(error).__name__
    )


def _methods_of(request: Request) -> str:
    """All that the path knows: Starlette names those of its first route only."""
    return ", ".join(
        sorted(
            method
            for route in request.app.routes
            if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
            for method in route.methods or ()
        )
    )


_HTTP_CODES = {
    400: ProblemCode.INVALID_JSON,
    401: ProblemCode.UNAUTHORIZED,
    404: ProblemCode.NOT_FOUND,
    405: ProblemCode.METHOD_NOT_ALLOWED,
    413: ProblemCode.BODY_TOO_LARGE,
}


def install_problems(app: FastAPI, *, on_refused: Callable[[str], None] | None = None) -> None:
    """Turn every exception that a handler may raise into a problem.

    Args:
        app: The app.
        on_refused: Told the code of a problem with the request, or with its moment.
    """
    refused = on_refused or (lambda _: None)

    async def known(_: Request, error: Exception) -> Response:
        problem = problem_of(error)
        if problem.status != 500:
            refused(problem.code)
        return respond(problem)

    async def invalid(_: Request, error: Exception) -> Response:
        errors = list(error.errors()) if isinstance(error, RequestValidationError) else []
        if any(e.get("type") == "json_invalid" for e in errors):
            refused(ProblemCode.INVALID_JSON)
            return problem_response(
                400, ProblemCode.INVALID_JSON, "Invalid JSON", "the body is not valid JSON"
            )
        refused(ProblemCode.INVALID_FIELD)
        fields = [
            FieldError(field=".".join(str(p) for p in e["loc"][1:]) or "body", message=e["msg"])
            for e in errors
        ]
        detail = "; ".join(f"{f.field}: {f.message}" for f in fields[:5])
        return problem_response(
            422, ProblemCode.INVALID_FIELD, "Invalid field", detail, errors=fields
        )

    async def http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        code = _HTTP_CODES.get(error.status_code, ProblemCode.INTERNAL)
        refused(code)
        headers = error.headers
        if error.status_code == 405:
            headers = {**(headers or {}), "Allow": _methods_of(request)}
        return problem_response(
            error.status_code, code, str(error.detail), str(error.detail), headers=headers
        )

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("unexpected error", path=request.url.path, error=repr(error))
        return respond(problem_of(error))

    for kind in (*_KNOWN, InvalidSamplingParams, InvalidField, PushRefused):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)

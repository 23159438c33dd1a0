"""The data port: generation, probes, metrics."""

from contextlib import suppress
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from rollout_pod import __version__
from rollout_pod.generation import Generation
from rollout_pod.protocol import (
    CancelReason,
    GenerateRequest,
    GenerateResponse,
    ProblemCode,
    ReadyFacts,
)
from rollout_pod.server.body_limit import BodyLimit
from rollout_pod.server.openai import openai_routes
from rollout_pod.server.pod import Pod
from rollout_pod.server.problems import install_problems, problem_of, problem_response
from rollout_pod.server.schema import SCHEMA_PATH, STREAM, problems, schema_of
from rollout_pod.server.streaming import Stream, Streams

BODY_LIMIT = 64 << 20
"""Bytes; a prompt of four million token ids fits."""

_TRACE_HEADERS = ("traceparent", "tracestate")


class Probe(BaseModel):
    """The answer of a probe that succeeds."""

    status: Literal["ok"] = "ok"


def make_data_app(pod: Pod) -> FastAPI:
    """The app of the data port. Needs no token: it changes nothing but what it generates."""
    app = FastAPI(
        title="rollout-pod data",
        version=__version__,
        strict_content_type=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=openai_routes(pod),
    )
    metrics = pod.metrics
    install_problems(app, on_refused=metrics.refused)
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)

    streams = Streams()
    generation = Generation(
        pod.engine, pod.gate, max_model_len=lambda: pod.max_model_len, elsewhere=pod.elsewhere
    )

    app.state.generation = generation

    async def disconnected(request: Request) -> None:
        with suppress(ClientDisconnect):
            while (await request.receive())["type"] != "http.disconnect":
                pass

    async def run(
        body: GenerateRequest, request: Request, stream: Stream | None = None
    ) -> GenerateResponse:
        headers = request.headers
        try:
            answer = await generation.generate(
                body,
                gone=stream.gone if stream else lambda: disconnected(request),
                trace_headers={n: v for n in _TRACE_HEADERS if (v := headers.get(n)) is not None},
                on_admit=stream.on_admit if stream else None,
                on_delta=stream.on_delta if stream else None,
            )
        except Exception as error:
            metrics.answered(problem_of(error).code)
            raise
        if answer.cancel_reason is CancelReason.REFUSED:
            metrics.refused(pod.gate.closed_for or CancelReason.PAUSED)
        metrics.answered(
            answer.cancel_reason or answer.finish_reason,
            tokens=len(answer.token_ids),
            cut=answer.is_cancel,
            versions=len({span.version for span in answer.weight_versions}),
        )
        return answer

    @app.post(
        "/v1/rollout/generate",
        response_model=GenerateResponse,
        responses=STREAM | problems(400, 409, 413, 422, 500, 503),
    )
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Generate until the rollout ends or is cut; a cut one returns its partial.

        With ``stream: true`` the answer is ``text/event-stream``: ``delta`` events, then one
        ``end`` (or ``error``).
        """
        if body.stream:
            return await streams.respond(
                lambda stream: run(body, request, stream), lambda: disconnected(request)
            )
        return _answered(await run(body, request))

    @app.delete("/v1/rollout/requests/{request_id:path}", responses=problems(404, 422, 500, 503))
    async def cancel(request_id: str) -> GenerateResponse:
        """Cut one request. Its own caller gets the same partial; 404 if it is not alive."""
        answer = await generation.cancel(request_id)
        if answer is None and pod.elsewhere is not None:
            answer = await pod.elsewhere.cancel(request_id)
        if answer is None:
            raise HTTPException(404, "no request of this id is alive")
        return answer

    @app.get("/startupz", response_model=Probe, responses=problems(503))
    async def startupz() -> Response:
        """200 once the engine has started."""
        return _probe("the engine is starting" if not pod.is_started else None)

    @app.get("/readyz", response_model=ReadyFacts, responses=problems(503))
    async def readyz() -> Response:
        """200 while a version is committed; pauses and updates do not change it. Says which."""
        if not pod.is_ready:
            return _probe(f"phase {pod.phase}")
        return JSONResponse(pod.facts().model_dump())

    @app.get("/healthz", response_model=Probe, responses=problems(503))
    async def healthz() -> Response:
        """200 unless the engine is dead: paused, updating and starting pods are alive."""
        return _probe(pod.liveness_error())

    @app.get("/metrics", response_class=PlainTextResponse, responses=problems(500))
    async def metrics_text() -> Response:
        """The pod's own metrics and the engine's, in Prometheus' text format."""
        text = await pod.metrics_text()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get(SCHEMA_PATH, include_in_schema=False)
    async def schema() -> dict[str, Any]:
        """This port's OpenAPI document, without the engine's own routes."""
        return schema_of(app, needs_token=False)

    return app


def _answered(answer: GenerateResponse) -> Response:
    """Written by msgspec from values that were checked when they were made: pydantic and FastAPI
    would check every token twice more, which a cancel of many requests waits for.
    """
    body = msgspec.json.encode(answer.__dict__, enc_hook=lambda model: model.__dict__)
    return Response(body, media_type="application/json")


def _probe(error: str | None) -> Response:
    if error is None:
        return JSONResponse(Probe().model_dump())
    return problem_response(503, ProblemCode.NOT_READY, "Not ready", error)

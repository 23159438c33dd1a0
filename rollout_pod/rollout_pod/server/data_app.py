"""The data port: generation, probes, metrics."""

from contextlib import suppress

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.requests import ClientDisconnect

from rollout_pod import __version__
from rollout_pod.generation import Generation
from rollout_pod.protocol import GenerateRequest, GenerateResponse, ProblemCode
from rollout_pod.server.body_limit import BodyLimit
from rollout_pod.server.problems import install_problems, problem_response
from rollout_pod.supervisor.supervisor import Supervisor

BODY_LIMIT = 64 << 20
"""Bytes; a prompt of four million token ids fits."""

_TRACE_HEADERS = ("traceparent", "tracestate")


def make_data_app(supervisor: Supervisor) -> FastAPI:
    """The app of the data port. Needs no token: it changes nothing but what it generates."""
    app = FastAPI(title="rollout-pod data", version=__version__)
    install_problems(app)
    app.add_middleware(BodyLimit, limit=BODY_LIMIT)
    metrics = supervisor.metrics

    def max_model_len() -> int:
        info = supervisor.board.state.info
        return info.max_model_len if info else 0

    generation = Generation(supervisor.engine, supervisor.gate, max_model_len=max_model_len)

    @app.post("/v1/rollout/generate")
    async def generate(body: GenerateRequest, request: Request) -> GenerateResponse:
        """Generate until the rollout ends or is cut; a cut one returns its partial."""

        async def gone() -> None:
            with suppress(ClientDisconnect):
                while (await request.receive())["type"] != "http.disconnect":
                    pass

        try:
            answer = await generation.generate(
                body,
                gone=gone,
                trace_headers={
                    name: value
                    for name in _TRACE_HEADERS
                    if (value := request.headers.get(name)) is not None
                },
            )
        except Exception as error:
            metrics.answered(type(error).__name__)
            raise
        metrics.answered(
            answer.cancel_reason or answer.finish_reason,
            tokens=len(answer.token_ids),
            cut=answer.is_cancel,
        )
        return answer

    @app.get("/startupz")
    async def startupz() -> Response:
        """200 once the engine has started."""
        return _probe("the engine is starting" if not supervisor.is_started else None)

    @app.get("/readyz")
    async def readyz() -> Response:
        """200 while a version is committed; pauses and updates do not change it."""
        phase = supervisor.board.document().phase
        return _probe(None if supervisor.is_ready else f"phase {phase}")

    @app.get("/healthz")
    async def healthz() -> Response:
        """200 unless the engine is dead: paused, updating and starting pods are alive."""
        return _probe(supervisor.liveness_error())

    @app.get("/metrics")
    async def metrics_text() -> Response:
        """Prometheus' text format."""
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    return app


def _probe(error: str | None) -> Response:
    if error is None:
        return JSONResponse({"status": "ok"})
    return problem_response(503, ProblemCode.NOT_READY, "Not ready", error)

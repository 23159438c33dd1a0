"""The two ports of a node that is not the head's: its weights agent for the head, and probes."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from rollout_pod import __version__
from rollout_pod.nodes.follower import Follower, Standing
from rollout_pod.nodes.muster import WrongGroup
from rollout_pod.protocol import (
    NodeDone,
    NodeSend,
    NodeSent,
    NodeSession,
    NodeStage,
    NodeStaged,
    ProblemCode,
)
from rollout_pod.server.auth import RequireToken, Tokens
from rollout_pod.server.body_limit import BodyLimit
from rollout_pod.server.problems import install_problems, problem_response
from rollout_pod.server.schema import problems
from rollout_pod.supervisor.ports import WeightsAgent

_BODY_LIMIT = 1 << 20


def make_node_admin_app(
    follower: Follower, agent: WeightsAgent, tokens: Tokens, *, run_dir: Path
) -> FastAPI:
    """The app of a node's admin port; every route needs the token, and the head's group."""
    app = _app("rollout-pod node admin")
    app.add_middleware(BodyLimit, limit=_BODY_LIMIT)
    app.add_middleware(RequireToken, tokens=tokens, nodes="/admin/v1/agent/")
    known = problems(400, 401, 409, 413, 422, 500, 502)

    def check(group: str) -> None:
        if group != follower.group:
            raise WrongGroup(f"this node is of group {follower.group}, not {group}")

    @app.post("/admin/v1/agent/stage", responses=known)
    async def stage(asked: NodeStage) -> NodeStaged:
        """Get a version ready; answers when it is."""
        check(asked.group)
        ranks = [run_dir / "ranks" / f"rank-{rank}.sock" for rank in range(asked.ranks)]
        staged = await agent.stage(
            session=asked.session, version=asked.version, path=asked.path, rank_sockets=ranks,
            bucket_bytes=asked.bucket_bytes, timeout_s=asked.timeout_s,
        )  # fmt: skip
        return NodeStaged(
            bytes=staged.bytes, tensors=staged.tensors, seconds=staged.seconds,
            transport=staged.transport, sample=staged.sample, sums=staged.sums,
        )  # fmt: skip

    @app.post("/admin/v1/agent/send", responses=known)
    async def send(asked: NodeSend) -> NodeSent:
        """Send it to this node's ranks; answers when they have it."""
        check(asked.group)
        sent = await agent.send(session=asked.session, timeout_s=asked.timeout_s)
        return NodeSent(bytes=sent.bytes, seconds=sent.seconds)

    @app.post("/admin/v1/agent/committed", responses=known)
    async def committed(asked: NodeSession) -> NodeDone:
        """Keep what this session brought."""
        check(asked.group)
        await agent.committed(session=asked.session)
        return NodeDone()

    @app.post("/admin/v1/agent/discard", responses=known)
    async def discard(asked: NodeSession) -> NodeDone:
        """End this session."""
        check(asked.group)
        await agent.discard(session=asked.session)
        return NodeDone()

    return app


def make_node_data_app(follower: Follower) -> FastAPI:
    """The app of a node's data port: probes, without a token. It generates nothing."""
    app = _app("rollout-pod node data")

    def answer(*, fine: bool) -> Response:
        if fine:
            return JSONResponse({"standing": follower.standing.value})
        text = f"{follower.standing.value}: {follower.message}".removesuffix(": ")
        return problem_response(503, ProblemCode.NOT_READY, "Not ready", text)

    @app.get("/startupz", responses=problems(503))
    async def startupz() -> Response:
        """200 once the engine has started."""
        return answer(fine=follower.standing in (Standing.UP, Standing.DRAINING))

    @app.get("/readyz", responses=problems(503))
    async def readyz() -> Response:
        """200 while this node's ranks are part of an engine that is up."""
        return answer(fine=follower.standing is Standing.UP)

    @app.get("/healthz")
    async def healthz() -> Response:
        """200: a node that is ill ends."""
        return answer(fine=True)

    return app


def _app(title: str) -> FastAPI:
    app = FastAPI(
        title=title, version=__version__, strict_content_type=False,
        docs_url=None, redoc_url=None, openapi_url=None,
    )  # fmt: skip
    install_problems(app)
    return app

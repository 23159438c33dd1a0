"""The admin port: the desired document in, the state document out."""

from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Query, Response

from rollout_pod import __version__
from rollout_pod.nodes.head import Head
from rollout_pod.protocol import (
    STATE_POLL_MAX_S,
    CachesCleared,
    ClearCachesRequest,
    DesiredDocument,
    StateDocument,
)
from rollout_pod.server.auth import RequireToken, Tokens
from rollout_pod.server.body_limit import BodyLimit
from rollout_pod.server.head_routes import HEAD_PATH, head_routes
from rollout_pod.server.problems import install_problems
from rollout_pod.server.schema import SCHEMA_PATH, problems, schema_of
from rollout_pod.supervisor.supervisor import Supervisor

_BODY_LIMIT = 1 << 20


def make_admin_app(supervisor: Supervisor, tokens: Tokens, *, head: Head | None = None) -> FastAPI:
    """The app of the admin port; every route needs the token. ``head``: of a group of nodes."""
    app = FastAPI(
        title="rollout-pod admin",
        version=__version__,
        strict_content_type=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    install_problems(app)
    app.add_middleware(BodyLimit, limit=_BODY_LIMIT)
    nodes = HEAD_PATH if head else None
    app.add_middleware(
        RequireToken, tokens=tokens, nodes=nodes
    )  # the outermost: before anything is read

    def etag(state: StateDocument) -> dict[str, str]:
        return {"ETag": f'"{state.boot_id}:{state.revision}"'}

    @app.put("/admin/v1/desired", responses=problems(400, 401, 409, 412, 413, 422, 500, 507))
    async def put_desired(
        document: DesiredDocument,
        response: Response,
        if_match: Annotated[str | None, Header()] = None,
    ) -> StateDocument:
        """Take a document into force; 409 if it is fenced out, 412 if ``If-Match`` is stale."""
        state = supervisor.put_desired(document, if_match=if_match.strip('"') if if_match else None)
        response.headers.update(etag(state))
        return state

    @app.get("/admin/v1/desired", responses=problems(401, 404, 500))
    async def get_desired() -> DesiredDocument:
        """The document in force; 404 before the first."""
        if supervisor.board.desired is None:
            raise HTTPException(404, "no desired document came yet")
        return supervisor.board.desired

    @app.get("/admin/v1/state", responses=problems(401, 422, 500))
    async def get_state(
        response: Response,
        after: Annotated[str | None, Query(max_length=128)] = None,
        timeout: Annotated[float, Query(ge=0, le=STATE_POLL_MAX_S)] = 0.0,
    ) -> StateDocument:
        """The state; with ``after`` (``<boot_id>:<revision>``) held until there is news."""
        state = await supervisor.board.wait_news(after=after, timeout_s=timeout)
        response.headers.update(etag(state))
        return state

    @app.post("/admin/v1/clear-caches", responses=problems(400, 401, 409, 413, 422, 500, 503))
    async def clear_caches(body: ClearCachesRequest | None = None) -> CachesCleared:
        """Clear prefix, multimodal and encoder caches; tried again while requests need them.

        Serving goes on. 503 ``cache_in_use`` when ``timeout_s`` is over, 409 ``asleep``.
        """
        asked = body or ClearCachesRequest()
        return await supervisor.clear_caches(timeout_s=asked.timeout_s)

    if head is not None:
        app.include_router(head_routes(head))

    @app.get(SCHEMA_PATH, include_in_schema=False)
    async def schema() -> dict[str, Any]:
        """This port's OpenAPI document."""
        return schema_of(app, needs_token=True)

    return app

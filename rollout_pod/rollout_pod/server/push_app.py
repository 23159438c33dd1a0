"""The push socket: trainers in the same pod. Whoever may open the socket may push."""

import os
import socket
import stat
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi import Path as InPath

from rollout_pod import __version__
from rollout_pod.protocol import (
    PUSH_POLL_MAX_S,
    PUSH_SOCKET,
    CachesCleared,
    ClearCachesRequest,
    PushGiveUp,
    PushOffer,
    PushStatus,
    PushTarget,
    StateDocument,
)
from rollout_pod.protocol.push import SESSION_PATTERN
from rollout_pod.server.body_limit import BodyLimit
from rollout_pod.server.problems import install_problems
from rollout_pod.server.schema import problems
from rollout_pod.supervisor.supervisor import Supervisor

_BODY_LIMIT = 1 << 16

Session = Annotated[str, InPath(min_length=1, max_length=128, pattern=SESSION_PATTERN)]
Hold = Annotated[float, Query(ge=0, le=PUSH_POLL_MAX_S)]


class PushSocketError(Exception):
    """The socket cannot be had; the message says why."""


def bind_push_socket(run_dir: Path) -> socket.socket:
    """Listen on ``<run_dir>/push.sock``; one that a dead pod left is replaced.

    Raises:
        PushSocketError: something else lies there, or the path is too long.
    """
    path = run_dir.absolute() / PUSH_SOCKET
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if path.is_symlink() or path.exists():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise PushSocketError(f"{path} is there and is no socket: remove it")
            path.unlink()  # the run folder's lock is ours: nobody listens there
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise PushSocketError(f"cannot listen on {path}: {error}") from error
    except PushSocketError:
        listener.close()
        raise
    return listener


def make_push_app(supervisor: Supervisor, *, shm_dir: Path) -> FastAPI:
    """The app of the push socket."""
    app = FastAPI(
        title="rollout-pod push", version=__version__, docs_url=None, redoc_url=None,
        openapi_url=None,
    )  # fmt: skip
    install_problems(app)
    app.add_middleware(BodyLimit, limit=_BODY_LIMIT)
    pushes = supervisor.pushes
    shared = shm_dir.absolute()

    @app.get("/v1/push/target", responses=problems(500, 503))
    async def target() -> PushTarget:
        """Where the ranks are, and what they wait for; 503 until the engine is up."""
        return pushes.target(shm_dir=shared)

    @app.post(
        "/v1/push/sessions", status_code=202, responses=problems(400, 409, 413, 422, 500, 503)
    )
    async def offer(body: PushOffer) -> PushStatus:
        """Take a session whose manifest every rank has accepted; the same one again is the same."""
        await pushes.compare_parts(body)
        return pushes.offer(body)

    @app.get("/v1/push/sessions/{session}", responses=problems(404, 422, 500))
    async def status(session: Session, timeout: Hold = 0.0) -> PushStatus:
        """How far a session came; held until it is over."""
        return await pushes.ended(session, timeout_s=timeout)

    @app.delete("/v1/push/sessions/{session}", responses=problems(400, 404, 413, 422, 500))
    async def give_up(session: Session, body: PushGiveUp | None = None) -> PushStatus:
        """The sender ends its session; it may say so twice."""
        return pushes.give_up(session, body.reason if body else "")

    @app.post("/v1/push/clear-caches", responses=problems(400, 409, 413, 422, 500, 503))
    async def clear_caches(body: ClearCachesRequest | None = None) -> CachesCleared:
        """As on the admin port, whose token a trainer does not have."""
        asked = body or ClearCachesRequest()
        return await supervisor.clear_caches(timeout_s=asked.timeout_s)

    @app.get("/v1/push/state", responses=problems(422, 500))
    async def state(
        after: Annotated[str | None, Query(max_length=128)] = None, timeout: Hold = 0.0
    ) -> StateDocument:
        """The state; with ``after`` (``<boot_id>:<revision>``) held until there is news."""
        return await supervisor.board.wait_news(after=after, timeout_s=timeout)

    return app

"""The bearer token of the admin port, read anew when its file changes."""

import hmac
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_pod.protocol import TOKEN_HEADER, ProblemCode
from rollout_pod.server.problems import problem_response


class Tokens:
    """The tokens in a folder: ``token``, and ``previous`` while a new one is being rolled out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def accepts(self, offered: str) -> bool:
        """Whether ``offered`` is one of the tokens; compared in constant time."""
        known = [token for name in ("token", "previous") if (token := self._read(name))]
        return sum(hmac.compare_digest(offered.encode(), token) for token in known) > 0

    def newest(self) -> str:
        """The token, to show to another pod of this replica; empty where there is none."""
        return self._read("token").decode()

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes().strip()
        except OSError:  # absent, or being replaced
            return b""


class RequireToken:
    """ASGI middleware: answers 401 unless the request carries a token, whatever else it is."""

    def __init__(self, app: ASGIApp, *, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it pass, or not."""
        passes = scope["type"] == "lifespan" or self._accepts(scope)
        await (self._app if passes else _unauthorized())(scope, receive, send)

    def _accepts(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = headers.get(TOKEN_HEADER) or (
            bearer.strip() if scheme.lower() == "bearer" else ""
        )
        return bool(offered) and self._tokens.accepts(offered)


def _unauthorized() -> ASGIApp:
    detail = f"give the pod's token as 'Authorization: Bearer' or '{TOKEN_HEADER}'"
    return problem_response(
        401, ProblemCode.UNAUTHORIZED, "Unauthorized", detail,
        headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip

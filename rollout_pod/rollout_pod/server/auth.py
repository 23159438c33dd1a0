"""The bearer token of the admin port, read anew when its file changes."""

import hmac
import time
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_pod.protocol import TOKEN_HEADER, ProblemCode
from rollout_pod.server.problems import problem_response

LATELY_S: Final = 300.0
"""Kubelets bring a new token to the nodes of a group with minutes in between."""


class Tokens:
    """The tokens in a folder: ``token``, and ``previous`` while a new one is being rolled out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[bytes, float] = {}
        """When each was in the folder last."""

    def accepts(self, offered: str) -> bool:
        """Whether ``offered`` is one of the tokens; compared in constant time."""
        return _is_among(offered, self._present())

    def accepts_late(self, offered: str) -> bool:
        """Whether it is, or was so within ``LATELY_S``: for another pod of this replica."""
        return _is_among(offered, self._lately())

    def lately(self) -> tuple[str, ...]:
        """What to show to another pod of this replica, one after the other: the token, and those
        that one may still know that has not got it yet. Empty where there is none.
        """
        return tuple(token.decode(errors="replace") for token in self._lately())

    def _present(self) -> list[bytes]:
        known = [token for name in ("token", "previous") if (token := self._read(name))]
        self._seen |= dict.fromkeys(known, time.monotonic())
        return known

    def _lately(self) -> list[bytes]:
        known = self._present()
        since = time.monotonic() - LATELY_S
        self._seen = {token: at for token, at in self._seen.items() if at >= since}
        before = sorted(self._seen.items(), key=lambda each: each[1], reverse=True)
        return [*dict.fromkeys([*known, *(token for token, _ in before)])]

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes().strip()
        except OSError:  # absent, or being replaced
            return b""


def _is_among(offered: str, known: list[bytes]) -> bool:
    return sum(hmac.compare_digest(offered.encode(), token) for token in known) > 0


class RequireToken:
    """ASGI middleware: answers 401 unless the request carries a token, whatever else it is.

    Args:
        app: What it guards.
        tokens: Those that pass.
        nodes: Beginning of the paths of which the callers are pods of this replica, which may
            still know a token of before.
    """

    def __init__(self, app: ASGIApp, *, tokens: Tokens, nodes: str | None = None) -> None:
        self._app = app
        self._tokens = tokens
        self._nodes = nodes

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
        if self._nodes is not None and scope.get("path", "").startswith(self._nodes):
            return bool(offered) and self._tokens.accepts_late(offered)
        return bool(offered) and self._tokens.accepts(offered)


def _unauthorized() -> ASGIApp:
    detail = f"give the pod's token as 'Authorization: Bearer' or '{TOKEN_HEADER}'"
    return problem_response(
        401, ProblemCode.UNAUTHORIZED, "Unauthorized", detail,
        headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip

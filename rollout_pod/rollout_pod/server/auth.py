"""The bearer token of the admin port, read anew when its file changes."""

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import HTTPException, Request

from rollout_pod.protocol import TOKEN_HEADER


class Tokens:
    """The tokens in a folder: ``token``, and ``previous`` while a new one is being rolled out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def accepts(self, offered: str) -> bool:
        """Whether ``offered`` is one of the tokens; compared in constant time."""
        known = [token for name in ("token", "previous") if (token := self._read(name))]
        return sum(hmac.compare_digest(offered.encode(), token) for token in known) > 0

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes().strip()
        except OSError:  # absent, or being replaced
            return b""


def require_token(tokens: Tokens) -> Callable[[Request], Awaitable[None]]:
    """A dependency that answers 401 unless the request carries a token."""

    async def check(request: Request) -> None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        offered = request.headers.get(TOKEN_HEADER) or (
            bearer.strip() if scheme.lower() == "bearer" else ""
        )
        if not offered or not tokens.accepts(offered):
            raise HTTPException(
                401,
                f"give the pod's token as 'Authorization: Bearer' or '{TOKEN_HEADER}'",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check

"""A bound on what a request body may hold, before anybody parses it."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_pod.protocol import ProblemCode
from rollout_pod.server.problems import problem_response


class BodyLimit:
    """ASGI middleware: answers 413 to a body of more than ``limit`` bytes, announced or not."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body as it comes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        detail = f"the body is larger than {self._limit} bytes"
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._limit:
            response = problem_response(413, ProblemCode.BODY_TOO_LARGE, "Body too large", detail)
            await response(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._limit:
                    raise HTTPException(413, detail)  # the app answers it as a problem
            return message

        await self._app(scope, counted, send)

"""What the pod adds to an answer of the engine's OpenAI server, on its way out.

Weight versions go into a field of their own; an error of the pod's (paused too long, draining) is
answered as a problem, where nothing has been sent yet. A reader whose socket takes nothing for
``SEND_TIMEOUT_S`` is cut, as one of the pod's own streams is. Where a stream that has begun is
silent (the gate is closed), comments say that it goes on: clients skip them, and no proxy takes the
connection for dead.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from rollout_pod.openai_call import GatedCall
from rollout_pod.protocol import ChoiceWeightVersionSpan
from rollout_pod.server.problems import problem_of, respond
from rollout_pod.server.streaming import HEARTBEAT_S, SEND_TIMEOUT_S

_UNAVAILABLE = 503
_FINISHES = re.compile(rb'"finish_reason":\s*"')
_NO_CHOICES = re.compile(rb'"choices":\s*\[\s*\]')
_DATA = b"data: "
_END = b"\n\n"
_BEAT = b": ping\n\n"


class Answer:
    """Stands for ASGI's ``send``.

    Args:
        send: The real one.
        call: What is answered.
        models_at: The answer lists models; this weight version is shown for each.
    """

    def __init__(self, send: Send, call: GatedCall, *, models_at: str | None) -> None:
        self._send_on = send
        self._call = call
        self._models_at = models_at
        self._start: Message | None = None
        self._body = b""
        self._is_replaced = False
        self._is_silent = True
        self._beats: asyncio.Task[None] | None = None
        self.is_begun = False
        """Something was sent."""

    async def send(self, message: Message) -> None:
        """Send what becomes of a message. The start is held back until it is known whether the
        request came through the gate.
        """
        if self._is_replaced:
            return
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] != "http.response.body" or self._start is None:
            await self._send(message)
        elif not self.is_begun and self._is_unavailable():
            await self._replace()
        elif self._media_type() == "text/event-stream":
            await self._begin()
            body = message.get("body", b"")
            if not message.get("more_body", False):
                await self.close()
            elif self._beats is None:
                self._beats = asyncio.create_task(self._beat(), name="heartbeats of a stream")
            await self._send({**message, "body": self._events(body)})
        elif self._media_type() == "application/json":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                body = self._document(self._body)
                MutableHeaders(raw=self._start["headers"])["content-length"] = str(len(body))
                await self._begin()
                await self._send({"type": "http.response.body", "body": body})
        else:
            await self._begin()
            await self._send(message)

    async def close(self) -> None:
        """No heartbeat comes after this. Idempotent."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)

    async def _beat(self) -> None:
        """Send a comment wherever nothing was sent for ``HEARTBEAT_S``. Until cancelled, or the
        reader takes nothing: whoever sends next is told that.
        """
        while True:
            self._is_silent = True
            await asyncio.sleep(HEARTBEAT_S)
            if self._is_silent:  # events are whole: vLLM's server sends each as one message
                await self._send({"type": "http.response.body", "body": _BEAT, "more_body": True})

    async def _send(self, message: Message) -> None:
        """Raises ``TimeoutError`` where the reader's socket takes nothing for too long."""
        self._is_silent = False
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._send_on(message)

    async def _begin(self) -> None:
        if not self.is_begun and self._start is not None:
            self.is_begun = True
            await self._send(self._start)

    async def _replace(self) -> None:
        self.is_begun = self._is_replaced = True
        if self._call.error is None:
            raise AssertionError("nothing to say")
        for message in _messages_of(self._call.error):
            await self._send(message)

    def _is_unavailable(self) -> bool:
        error = self._call.error
        return error is not None and problem_of(error).status == _UNAVAILABLE

    def _media_type(self) -> str:
        if self._start is None:
            return ""
        return MutableHeaders(raw=self._start["headers"]).get("content-type", "").split(";")[0]

    def _document(self, body: bytes) -> bytes:
        status = self._start["status"] if self._start else 0
        if status >= 400:
            return _in_openais_form(body, status)
        if status != 200 or not body.endswith(b"}"):
            return body
        spans = self._call.spans()
        if spans:
            return _with_spans(body, spans)
        if self._models_at is None:
            return body
        models = json.loads(body)
        for model in models["data"]:
            model["weight_version"] = self._models_at
        return json.dumps(models).encode()

    def _events(self, body: bytes) -> bytes:
        return _END.join(self._event(event) for event in body.split(_END))

    def _event(self, event: bytes) -> bytes:
        data = event.removeprefix(_DATA)
        if data is event or not data.endswith(b"}"):
            return event
        if self._is_unavailable() and data.startswith(b'{"error"'):
            problem = problem_of(self._call.error or Exception())
            error = {"message": problem.detail, "type": problem.code, "code": problem.status}
            return _DATA + json.dumps({"error": error}).encode()
        if _FINISHES.search(data):
            ended = [c["index"] for c in json.loads(data)["choices"] if c.get("finish_reason")]
            return _DATA + _with_spans(data, self._call.spans(ended))
        if _NO_CHOICES.search(data):  # the usage, after all of them
            return _DATA + _with_spans(data, self._call.spans())
        return event


def _in_openais_form(body: bytes, status: int) -> bytes:
    """An error that the framework below vLLM's server made by itself (a body that is no text)."""
    try:
        told = json.loads(body)
    except ValueError:
        return body
    if not isinstance(told, dict) or set(told) != {"detail"}:
        return body
    kind = HTTPStatus(status).phrase
    error = {"message": str(told["detail"]), "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


def _with_spans(document: bytes, spans: Sequence[ChoiceWeightVersionSpan]) -> bytes:
    """Put them into an object as its last field, without reading all of it."""
    field = json.dumps([span.model_dump() for span in spans]).encode()
    return document[:-1] + b',"weight_versions":' + field + b"}"


def _messages_of(error: BaseException) -> tuple[Message, Message]:
    response = respond(problem_of(error))
    return (
        {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        },
        {"type": "http.response.body", "body": response.body},
    )

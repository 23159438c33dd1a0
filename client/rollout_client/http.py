"""One attempt over HTTP: the tokens go into the draft as they come, and it ends in an outcome."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Final

import httpx
from pydantic import ValidationError

from rollout_client.planning import (
    Cut,
    Ended,
    EngineTrouble,
    Lost,
    Nonsense,
    Outcome,
    Refused,
    Unavailable,
)
from rollout_client.rollout import Draft, InvalidAnswer
from rollout_pod.protocol import (
    FinishReason,
    GenerateDelta,
    GenerateEnd,
    GenerateRequest,
    Problem,
    ProblemCode,
)

GENERATE_PATH: Final = "/v1/rollout/generate"
SILENCE_S: Final = 30.0
"""A pod sends a comment every 10 s: one that is silent for so long is gone."""

_DRAIN_S: Final = 0.5
_LATER: Final = (408, 425, 429)
_MAX_EVENT: Final = 64 << 20


async def attempt(
    http: httpx.AsyncClient, url: str, request: GenerateRequest, draft: Draft
) -> Outcome:
    """Send one request and feed ``draft``. Never raises for what a replica or the network does."""
    where = url + GENERATE_PATH
    limit = httpx.Timeout(SILENCE_S + request.timeout_s, connect=http.timeout.connect, pool=None)
    try:
        async with http.stream(
            "POST",
            where,
            content=request.model_dump_json(exclude_unset=True),
            headers={"content-type": "application/json", "accept": "text/event-stream"},
            timeout=limit,
        ) as answer:
            if answer.status_code != httpx.codes.OK:
                return _failure(url, answer, await answer.aread())
            return await _follow(where, answer, draft)
    except httpx.TransportError as error:
        if draft.finish_reason is not None:
            return Ended()
        return Lost(why=f"{url}: {type(error).__name__}: {error}")
    except httpx.DecodingError as error:
        return Nonsense(why=f"{where}: {error}")


async def _follow(where: str, answer: httpx.Response, draft: Draft) -> Outcome:
    received = 0
    async with aclosing(events(answer)) as stream:
        try:
            async for name, data in stream:
                if name == "delta":
                    delta = GenerateDelta.model_validate_json(data)
                    draft.append(delta)
                    received += len(delta.token_ids)
                elif name == "end":
                    end = GenerateEnd.model_validate_json(data)
                    draft.end(end, received=received)
                    await _drain(stream)
                    return _ending(where, end)
                elif name == "error":
                    problem = Problem.model_validate_json(data)
                    await _drain(stream)
                    return _of_problem(f"{where}: {_told(problem)}", problem.status, problem, None)
        except (ValidationError, InvalidAnswer) as error:
            return Nonsense(why=f"{where}: {error}")
    if draft.finish_reason is not None:
        return Ended()  # only the event that repeats it is missing
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return Nonsense(why=f"{where}: answered 200 with no event stream")
    return Lost(why=f"{where}: the stream broke off")


async def _drain(stream: AsyncIterator[object]) -> None:
    """Read to the end, so that the connection can be used again."""
    with suppress(TimeoutError, httpx.TransportError):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in stream:
                pass


async def events(answer: httpx.Response) -> AsyncGenerator[tuple[str, bytes], None]:
    """The events of a ``text/event-stream``: name and data. Ends where the stream ends.

    Raises:
        InvalidAnswer: an event of absurd size.
    """
    buffer, name, data = b"", "", []
    async for chunk in answer.aiter_bytes():
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        if len(buffer) > _MAX_EVENT:
            raise InvalidAnswer("an event has no end")
        for line in lines:
            field, _, value = line.rstrip(b"\r").partition(b":")
            value = value.removeprefix(b" ")
            if field == b"event":
                name = value.decode(errors="replace")
            elif field == b"data":
                data.append(value)
            elif not field and not value and data:
                yield name, b"\n".join(data)
                name, data = "", []


def _ending(where: str, end: GenerateEnd) -> Outcome:
    if end.is_cancel:
        return Cut(reason=end.cancel_reason)
    if end.finish_reason is FinishReason.ERROR:
        return EngineTrouble(why=f"{where}: finish_reason is 'error' ({end.stop_reason})")
    return Ended()


def _failure(url: str, answer: httpx.Response, body: bytes) -> Outcome:
    try:
        problem = Problem.model_validate_json(body)
    except ValidationError:
        problem = None
    told = _told(problem) if problem else body[:200].decode(errors="replace")
    why = f"{url} answered {answer.status_code} {told}"
    return _of_problem(why, answer.status_code, problem, retry_after(answer))


def _of_problem(
    why: str, status: int, problem: Problem | None, retry_after_s: float | None
) -> Outcome:
    code = problem.code if problem else None
    if status == httpx.codes.INTERNAL_SERVER_ERROR or (
        status > httpx.codes.INTERNAL_SERVER_ERROR and code is ProblemCode.ENGINE_ERROR
    ):
        return EngineTrouble(why=why, retry_after_s=retry_after_s)
    if status > httpx.codes.INTERNAL_SERVER_ERROR or status in _LATER:
        return Unavailable(why=why, code=code, retry_after_s=retry_after_s)
    return Refused(why=why, status=status, problem=problem)


def _told(problem: Problem) -> str:
    fields = "".join(f"; {error.field}: {error.message}" for error in problem.errors)
    return f"{problem.code}: {problem.detail}{fields}"


def retry_after(answer: httpx.Response) -> float | None:
    """Seconds that ``Retry-After`` asks for; None where it is absent or a date."""
    try:
        seconds = float(answer.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None

"""One HTTP exchange with a pod: the answer, or a typed reason why there is none."""

import hashlib
from collections.abc import Sequence

import httpx
from pydantic import ValidationError

from rollout_pod.protocol import FinishReason, GenerateRequest, GenerateResponse, Problem
from rollout_pod.protocol.problem import ProblemCode

GENERATE_PATH = "/v1/rollout/generate"


class Transient(Exception):
    """Nobody is to blame for good: worth another try."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConnectionLost(Transient):
    """No answer came. The pod may still run the attempt for a moment."""


class EngineTrouble(Transient):
    """The engine failed the attempt."""


class Refused(Exception):
    """The pod refused the request for good."""

    def __init__(self, message: str, *, status: int, problem: Problem | None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem

    @property
    def duplicate(self) -> bool:
        """The pod runs a request of this id at the moment."""
        return self.problem is not None and self.problem.code is ProblemCode.DUPLICATE_REQUEST


class NoDocument(Exception):
    """A status of 200 with something else than the document."""


async def exchange(
    http: httpx.AsyncClient, endpoint: str, request: GenerateRequest
) -> GenerateResponse:
    """Send one attempt and read its answer.

    Raises:
        ConnectionLost, EngineTrouble, Transient: worth another try.
        Refused, NoDocument: see there.
    """
    try:
        answer = await http.post(
            endpoint + GENERATE_PATH,
            content=request.model_dump_json(),
            headers={"content-type": "application/json"},
        )
    except httpx.TransportError as error:
        raise ConnectionLost(f"{endpoint}: {type(error).__name__}: {error}") from error
    if answer.status_code == httpx.codes.OK:
        return _document(answer)
    raise _failure(endpoint, answer)


def _document(answer: httpx.Response) -> GenerateResponse:
    try:
        document = GenerateResponse.model_validate_json(answer.content)
    except ValidationError as error:
        raise NoDocument(f"{answer.url}: {error}") from error
    if document.finish_reason is FinishReason.ERROR:
        raise EngineTrouble(f"{answer.url}: finish_reason is 'error'")
    return document


def _failure(endpoint: str, answer: httpx.Response) -> Exception:
    try:
        problem = Problem.model_validate_json(answer.content)
    except ValidationError:
        problem = None
    status = answer.status_code
    told = f"{problem.code}: {problem.detail}" if problem else answer.text[:200]
    fields = "".join(f"; {e.field}: {e.message}" for e in problem.errors) if problem else ""
    message = f"{endpoint} answered {status} {told}{fields}"
    code = problem.code if problem else None
    if code is ProblemCode.ENGINE_ERROR or status == httpx.codes.INTERNAL_SERVER_ERROR:
        return EngineTrouble(message, retry_after_s=retry_after(answer))
    if status >= 500 or status == httpx.codes.TOO_MANY_REQUESTS:
        return Transient(message, retry_after_s=retry_after(answer))
    return Refused(message, status=status, problem=problem)


def retry_after(answer: httpx.Response) -> float | None:
    """Seconds that ``Retry-After`` asks for; None where it is absent or a date."""
    try:
        seconds = float(answer.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def preferred(endpoints: Sequence[str], key: str) -> tuple[str, ...]:
    """Order endpoints for one key: the same key meets the same pod while the list is the same."""

    def weight(endpoint: str) -> bytes:
        return hashlib.blake2b(f"{key}\0{endpoint}".encode(), digest_size=8).digest()

    return tuple(sorted(endpoints, key=weight))

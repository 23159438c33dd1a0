"""Speaks to pods' admin ports: the desired document down, the state document up."""

from collections.abc import Callable
from functools import lru_cache
from typing import Final, Protocol, Self

import aiohttp
from pydantic import ValidationError

from rollout_operator.control.routes import Direct, PodAddress, Route
from rollout_operator.metrics import Metrics
from rollout_pod.protocol import (
    ADMIN_PORT,
    STATE_POLL_MAX_S,
    DesiredDocument,
    Problem,
    ProblemCode,
    StateDocument,
)

_PUT_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 3.0
_POLL_MARGIN_S: Final = 10.0
_MAX_BODY: Final = 1 << 20
_IDLE_S: Final = 0.5
"""A poll follows a poll at once. Who told thousands of pods something holds no second connection to
each."""


class Known(Protocol):
    """A state by its name."""

    @property
    def boot_id(self) -> str:
        """See ``StateDocument``."""

    @property
    def revision(self) -> int:
        """See ``StateDocument``."""


class PodError(Exception):
    """A pod did not do what it was asked; the text says why."""


class Unreachable(PodError):
    """It does not answer, or answers what no pod of ours would."""


class NotConnected(Unreachable):
    """Nobody takes a connection: whatever it is asked, it will not hear of it."""


class Unauthorized(PodError):
    """It does not know the token."""


class Fenced(PodError):
    """It obeys another owner, or has seen a later generation."""


class Refused(PodError):
    """It does not accept the document."""


class PodClient:
    """One connection pool for all pods. Holds thousands of long polls at once."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        admin_port: int = ADMIN_PORT,
        route: Route | None = None,
        may_work: Callable[[], bool] = lambda: True,
    ) -> None:
        self._metrics = metrics
        self._may_work = may_work
        self._port = admin_port
        self._route = route or Direct()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ssl=self._route.tls or True, keepalive_timeout=_IDLE_S
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def put_desired(
        self, pod: PodAddress, token: str, document: DesiredDocument
    ) -> StateDocument:
        """Tell the pod what to become; return what it is now.

        Raises:
            PodError: one of the four.
        """
        if not self._may_work():
            raise Unreachable("not asked: another operator may be working by now")
        return await self._ask(
            "PUT", pod, "desired", token, timeout=_PUT_TIMEOUT_S, body=document.model_dump_json()
        )

    async def get_state(
        self,
        pod: PodAddress,
        token: str,
        *,
        after: Known | None,
        timeout: float = STATE_POLL_MAX_S,
    ) -> StateDocument:
        """Return the pod's state: at once if it is not ``after``, else when it changes.

        After ``timeout`` seconds the unchanged state is returned.

        Raises:
            PodError: Unreachable, Unauthorized or Refused.
        """
        query = {"timeout": f"{timeout:g}"}
        if after is not None:
            query["after"] = f"{after.boot_id}:{after.revision}"
        return await self._ask(
            "GET", pod, "state", token, timeout=timeout + _POLL_MARGIN_S, query=query
        )

    async def _ask(
        self,
        verb: str,
        pod: PodAddress,
        what: str,
        token: str,
        *,
        timeout: float,
        body: str | None = None,
        query: dict[str, str] | None = None,
    ) -> StateDocument:
        if self._session is None:
            raise RuntimeError("PodClient is used outside its context")
        outcome = "unreachable"
        url, headers = await self._route.request(pod, self._port, f"/admin/v1/{what}", token)
        try:
            async with self._session.request(
                verb,
                url,
                params=query,
                data=body,
                headers={**headers, "Content-Type": "application/json"},
                timeout=_limits(timeout),
                allow_redirects=False,
            ) as response:
                data = await response.content.read(_MAX_BODY)
                while chunk := await response.content.read(_MAX_BODY):
                    data += chunk
                    if len(data) > _MAX_BODY:
                        raise Unreachable(f"its answer to {verb} {what} has no end")
                outcome = str(response.status)
                if response.status == 200:
                    return StateDocument.model_validate_json(data)
                raise _problem(response.status, data)
        except ValidationError as error:
            raise Unreachable(f"{verb} {what}: no state document: {error.errors()[0]}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotConnected(f"{verb} {what}: {str(error) or type(error).__name__}") from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{verb} {what}: {str(error) or type(error).__name__}") from error
        finally:
            self._metrics.pod_requests.labels(verb=verb, outcome=outcome).inc()


@lru_cache(maxsize=16)
def _limits(total: float) -> aiohttp.ClientTimeout:
    # one for thousands of polls
    return aiohttp.ClientTimeout(total=total, connect=_CONNECT_TIMEOUT_S)


def _problem(status: int, data: bytes) -> PodError:
    try:
        problem = Problem.model_validate_json(data)
    except ValidationError:
        text = f"HTTP {status}: {data[:200].decode(errors='replace')}"
        # a 401 in other words is of something in between: the API server, a mesh
        return Unreachable(text)
    text = "; ".join([problem.detail, *(f"{e.field}: {e.message}" for e in problem.errors)])
    if status == 401:
        return Unauthorized(text)
    if problem.code is ProblemCode.FENCED:
        return Fenced(text)
    if status in (400, 409, 422, 507):  # 507: it has no room to keep it
        return Refused(text)
    return Unreachable(f"HTTP {status}: {text}")

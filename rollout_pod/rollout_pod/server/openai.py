"""The OpenAI routes of the data port: the engine's own server, behind the pod's gate."""

import math

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from rollout_pod.engine.base import EngineDeadError
from rollout_pod.engine.front_end import CALL, MODELS, ROUTES
from rollout_pod.openai_call import GatedCall
from rollout_pod.protocol import OnPause, ProblemCode
from rollout_pod.protocol.problem import FieldError
from rollout_pod.server.openai_answer import Answer
from rollout_pod.server.pod import Pod
from rollout_pod.server.problems import problem_of, problem_response, respond

log = structlog.get_logger(__name__)

ON_PAUSE_HEADER = "X-Rollout-On-Pause"
"""``return``: a request that is cut is answered as it is, with finish reason ``abort``."""
TIMEOUT_HEADER = "X-Rollout-Timeout-S"
"""How many seconds a request may wait for generation to go on, all its waits together."""

_TIMEOUT_S = 600.0
_MAX_TIMEOUT_S = 86400.0
_OF_ROUTER = ("app", "router", "endpoint", "route", "path_params")


class _InvalidHeader(Exception):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name


def openai_routes(pod: Pod) -> list[BaseRoute]:
    """All of them; nothing else of the engine's server can be reached."""
    endpoint = _Endpoint(pod)
    return [Route(path, endpoint, methods=[method]) for path, method in ROUTES.items()]


class _Endpoint:
    """An ASGI app: hands one request on to the engine's server."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it.

        Raises:
            NotReady: no version is committed.
            Draining: the pod ends.
            NoFrontEnd: the engine has no such server.
        """
        pod = self._pod
        gate = pod.gate
        gate.check_ready()
        dead = pod.engine.dead_error()
        if dead is not None:
            raise EngineDeadError(dead)
        app = pod.engine.front_end()
        try:
            call = self._call(Request(scope).headers)
        except _InvalidHeader as error:
            field = FieldError(field=error.name, message=str(error))
            code, title = ProblemCode.INVALID_FIELD, "Invalid header"
            await problem_response(422, code, title, str(error), errors=[field])(
                scope, receive, send
            )
            return
        weights = gate.weights if scope["path"] == MODELS else None
        answer = Answer(send, call, models_at=weights.version if weights else None)
        inner = {name: value for name, value in scope.items() if name not in _OF_ROUTER}
        token = CALL.set(call)
        try:
            await app(inner, receive, answer.send)
        except Exception as error:
            # vLLM's app answers its exceptions, and raises them again
            log.error("the engine's server failed", path=scope["path"], error=repr(error))
            if not answer.is_begun:
                await respond(problem_of(call.error or error))(scope, receive, send)
        finally:
            CALL.reset(token)
            call.leave()
            await answer.close()
            if call.error is not None:
                problem = problem_of(call.error)
                pod.metrics.answered(problem.code)
                if problem.status != 500:
                    pod.metrics.refused(problem.code)

    def _call(self, headers: Headers) -> GatedCall:
        on_pause = headers.get(ON_PAUSE_HEADER, OnPause.WAIT)
        if on_pause not in list(OnPause):
            raise _InvalidHeader(ON_PAUSE_HEADER, "must be wait or return")
        given = headers.get(TIMEOUT_HEADER)
        try:
            timeout_s = _TIMEOUT_S if given is None else float(given)
        except ValueError:
            timeout_s = math.nan
        if not 0 < timeout_s <= _MAX_TIMEOUT_S:
            why = f"must be a number of seconds, at most {_MAX_TIMEOUT_S:g}"
            raise _InvalidHeader(TIMEOUT_HEADER, why)
        metrics = self._pod.metrics
        return GatedCall(
            self._pod.gate,
            returns_partials=on_pause == OnPause.RETURN,
            timeout_s=timeout_s,
            on_answered=lambda reason, tokens, cut, versions: metrics.answered(
                reason, tokens=tokens, cut=cut, versions=versions
            ),
            on_refused=metrics.refused,
        )

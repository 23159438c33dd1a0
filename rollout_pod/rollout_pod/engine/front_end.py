"""What an engine's own front end (its OpenAI server) and the pod say to each other.

The pod calls the front end as an ASGI app, with the ``Call`` that it belongs to in ``CALL``; all
that the front end wants of the engine passes the pod's gate by that call.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_pod.engine.base import EngineError, EngineOutput, EngineRequest
from rollout_pod.protocol import WeightVersionSpan

# Starlette's own types, without Starlette: an engine may bring another framework.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MODELS = "/v1/models"
ROUTES: dict[str, str] = {
    MODELS: "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
}
"""All of a front end that can be reached, by path."""


class NoFrontEnd(EngineError):
    """The engine has none, or cannot have one as it was started; the message says why."""


@dataclass(frozen=True)
class Passage:
    """How one attempt of a sequence in the engine ended."""

    output: EngineOutput
    spans: tuple[WeightVersionSpan, ...]
    """Cover the tokens of ``output``, whose log-probs may be missing."""
    goes_on: bool
    """It was cut by a pause or an update: the caller expects the rest of it."""


class Call(Protocol):
    """One HTTP request to the front end."""

    def new_choices(self, count: int) -> int:
        """So many sequences more belong to it; returns the index of the first one."""

    async def pass_gate(self, make: Callable[[str], EngineRequest], gone: asyncio.Event) -> Passage:
        """Pass the gate, waiting where it is closed, and run one attempt.

        ``gone`` is set when nobody wants more of the sequence: it is aborted in the engine.
        """

    def finished(
        self, choice: int, spans: Sequence[WeightVersionSpan], *, reason: str, tokens: int
    ) -> None:
        """A sequence is complete, and about to be answered."""

    def failed(self, error: BaseException) -> None:
        """A sequence ended by ``error``; it is raised through the front end as well."""


CALL: ContextVar[Call] = ContextVar("openai_call")

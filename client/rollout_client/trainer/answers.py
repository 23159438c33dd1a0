"""What a pod's answers mean for whoever steers it."""

from typing import Any, Final

import httpx
from pydantic import ValidationError

from rollout_client.trainer.errors import AdapterError, Asleep, Refused, Unreachable
from rollout_pod.protocol import Problem, ProblemCode

_MAX_CLEAR_S: Final = 600.0
_CLEAR_EXTRA_S: Final = 200.0
"""The engine's own deadlines for the calls of the last attempt."""


def checked(name: str, answer: httpx.Response) -> bytes:
    """The body of a good answer.

    Raises:
        AdapterError: of the replica ``name``, in the pod's own words.
    """
    if answer.is_success:
        return answer.content
    try:
        problem = Problem.model_validate_json(answer.content)
    except ValidationError:
        told = f"answered {answer.status_code}: {answer.text[:200]}"
        raise Unreachable(f"{name}: {told}", target=name) from None
    kind: type[AdapterError] = Refused
    if problem.code is ProblemCode.ASLEEP:
        kind = Asleep
    elif problem.status >= httpx.codes.INTERNAL_SERVER_ERROR:
        kind = Unreachable
    raise kind(f"{name}: {problem.title}: {problem.detail}", target=name)


def clearing(timeout_s: float) -> dict[str, Any]:
    """What a request to clear the caches takes."""
    return {
        "json": {"timeout_s": min(timeout_s, _MAX_CLEAR_S)},
        "timeout": timeout_s + _CLEAR_EXTRA_S,
    }

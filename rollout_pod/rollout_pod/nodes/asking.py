"""How the pods of a group ask each other, while they may know different tokens."""

from collections.abc import Callable, Sequence

import httpx
from pydantic import BaseModel

from rollout_pod.protocol import TOKEN_HEADER

Tokens = Callable[[], Sequence[str]]
"""Those to try one after the other; read for each call."""


async def post(
    http: httpx.AsyncClient,
    url: str,
    document: BaseModel,
    tokens: Tokens,
    *,
    timeout: httpx.Timeout | None = None,
) -> httpx.Response:
    """Post ``document`` with the first token that is taken; the last answer where none is.

    Raises:
        httpx.HTTPError: nobody answers.
    """
    body = document.model_dump(mode="json")
    timeout = timeout or http.timeout
    first, *others = tokens() or ("",)
    answer = await http.post(url, json=body, headers={TOKEN_HEADER: first}, timeout=timeout)
    for token in others:
        if answer.status_code != httpx.codes.UNAUTHORIZED:
            break
        answer = await http.post(url, json=body, headers={TOKEN_HEADER: token}, timeout=timeout)
    return answer

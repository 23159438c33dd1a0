"""A pod's push socket: what whoever shares its run folder may ask of it."""

from pathlib import Path
from typing import Final

import httpx
from pydantic import ValidationError

from rollout_client.trainer.answers import checked, clearing
from rollout_client.trainer.errors import Unreachable
from rollout_pod.protocol import PUSH_SOCKET, CachesCleared, StateDocument

HOLD_S: Final = 25.0
_ANSWER_S: Final = 10.0


def client_of(run_dir: Path) -> httpx.AsyncClient:
    """Requests go to the pod with this run folder; paths begin with ``/v1/push``."""
    # reading certificates would take longer than an update
    socket = httpx.AsyncHTTPTransport(uds=str(run_dir / PUSH_SOCKET), verify=False)
    return httpx.AsyncClient(transport=socket, base_url="http://pod", trust_env=False)


async def ask_state(
    http: httpx.AsyncClient, after: StateDocument | None = None
) -> StateDocument | None:
    """The state, at once or as soon as it is another one; None where nobody answers."""
    query = {"timeout": str(HOLD_S if after else 0.0)}
    if after is not None:
        query["after"] = f"{after.boot_id}:{after.revision}"
    try:
        answer = await http.get("/v1/push/state", params=query, timeout=_ANSWER_S + HOLD_S)
        return StateDocument.model_validate_json(answer.raise_for_status().content)
    except (httpx.HTTPError, ValidationError):
        return None


async def clear_caches(name: str, run_dir: Path, timeout_s: float) -> None:
    """Clear every cache of the replica ``name``.

    Raises:
        AdapterError: a cache was in use all the time, the engine sleeps, or nobody answers.
    """
    async with client_of(run_dir) as http:
        try:
            answer = await http.post("/v1/push/clear-caches", **clearing(timeout_s))
        except httpx.TransportError as error:
            raise Unreachable(f"{name}: {run_dir / PUSH_SOCKET}: {error}", target=name) from error
    CachesCleared.model_validate_json(checked(name, answer))


async def needed_version(run_dir: Path | None) -> str | None:
    """The version that a pod waits for; None where it waits for none, or is not to be reached."""
    if run_dir is None:
        return None
    async with client_of(run_dir) as http:
        state = await ask_state(http)
    return state.needs if state is not None else None

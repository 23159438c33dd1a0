"""What the tests of the weight protocol share; some files have a ``place`` of their own."""

from collections.abc import AsyncIterator, Iterator

import pytest

from rollout_pod.weights.agent_client import AgentClient
from tests.support.weights import Place, make_place


@pytest.fixture
def place() -> Iterator[Place]:
    with make_place() as made:
        yield made


@pytest.fixture
async def client(place: Place) -> AsyncIterator[AgentClient]:
    made = AgentClient(place.agent_socket)
    yield made
    await made.close()

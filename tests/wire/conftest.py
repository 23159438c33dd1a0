"""What the tests of the weight protocol share; some files have a ``place`` of their own."""

from collections.abc import AsyncIterator, Iterator

import pytest

from rollout_pod.weights.agent_client import AgentClient
from tests.support.fake_device import FakeDevice
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


@pytest.fixture
def gpu(place: Place) -> FakeDevice:
    """The trainer's view of it; ``ranks_view`` is the engine's."""
    return FakeDevice(place.root / "gpu")


@pytest.fixture
def ranks_view(place: Place) -> FakeDevice:
    return FakeDevice(place.root / "gpu")

"""What the tests of the weight protocol share; some files have a ``place`` of their own."""

import subprocess
from collections.abc import AsyncIterator, Callable, Iterator

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


@pytest.fixture
def small_memory(place: Place) -> Iterator[Callable[[str], None]]:
    """Shared memory of 512 KiB; call it to give it another size."""

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place.shm_dir)]
        subprocess.run(command, check=True)

    mount("size=512k")
    try:
        yield lambda size: mount(f"remount,size={size}")
    finally:
        place.close()
        subprocess.run(["umount", str(place.shm_dir)], check=True)

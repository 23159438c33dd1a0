"""Two pods of one node whose senders make their segments in one folder, and a folder with no room."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from rollout_pod.weights.agent_client import AgentClient, TransferError
from rollout_pod.weights.segment import RoomError
from tests.support.agent_site import Site
from tests.support.updates import sender, update
from tests.support.weights import Gate, ModelLoader, Place, expected_of, make_place, same

MIB = 1 << 20


@pytest.fixture
async def sites() -> AsyncIterator[tuple[Site, Site]]:
    """Pods with run folders of their own."""
    with make_place() as one, make_place() as two:
        own, two.shm_dir = two.shm_dir, one.shm_dir
        clients = AgentClient(one.agent_socket), AgentClient(two.agent_socket)
        yield Site(one, clients[0]), Site(two, clients[1])
        for client in clients:
            await client.close()
        two.close()
        two.shm_dir = own


async def test_two_pods_update_at_once(sites: tuple[Site, Site]) -> None:
    """Each gets its own version each time, and neither takes away what is the other's."""
    for number in range(6):
        await asyncio.gather(sites[0].commit(number % 2), sites[1].commit(1 - number % 2))
        assert len(sites[0].place.segments()) <= 4
    sites[1].place.close()
    left = sites[0].place.segments()
    assert 1 <= len(left) <= 2, "the first pod's stay"
    await sites[0].commit(0)
    sites[0].place.close()
    assert sites[0].place.segments() == []


async def test_an_agent_that_starts_anew_leaves_the_other_pods_transfer_alone(
    sites: tuple[Site, Site],
) -> None:
    """One is killed after a bucket, and its successor tidies up, while the other's ranks load."""
    doomed, other = sites
    gate, theirs = Gate(1), Gate(1)

    session = await other.stage(1)
    loaders = ModelLoader(theirs), ModelLoader()
    loads = other.load(session, 1, *loaders)
    sent = asyncio.ensure_future(other.client.send(session=session, timeout_s=60))
    assert await asyncio.to_thread(theirs.reached.wait, 30)

    async def kill_and_start(_: str) -> None:
        assert await asyncio.to_thread(gate.reached.wait, 30)
        doomed.agent.send_signal(signal.SIGKILL)
        doomed.agent.wait()
        doomed.agent = await asyncio.to_thread(doomed.place.start_agent)
        gate.open.set()

    await doomed.failing(0, ModelLoader(gate), ModelLoader(), during=kill_and_start)
    theirs.open.set()
    reports = (await sent).reports
    assert all([(await load).ok for load in loads]), reports
    assert all(same(loader.model, other.tensors[1]) for loader in loaders)
    await doomed.commit(0)
    await other.client.committed(session=session)


async def test_what_a_killed_agent_held_is_its_successors_to_remove(
    sites: tuple[Site, Site],
) -> None:
    """The other pod cannot know that it is dead."""
    dead, other = sites
    await dead.commit(0)
    dead.agent.send_signal(signal.SIGKILL)
    dead.agent.wait()
    kept = set(dead.place.segments())
    await other.commit(1)
    assert kept <= set(dead.place.segments())
    dead.agent = await asyncio.to_thread(dead.place.start_agent)
    assert not kept & set(dead.place.segments())
    with pytest.raises(TransferError):
        await dead.client.send(session="s0", timeout_s=5)
    await dead.commit(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
async def test_a_trainer_without_room_says_so(
    place: Place, small_memory: Callable[[str], None]
) -> None:
    """Two buckets of a trainer are larger than ``/dev/shm``: nothing is begun, and with room the
    same sender sends.
    """
    tensors = {"a": torch.arange(MIB, dtype=torch.int32), "b": torch.ones(3, dtype=torch.bfloat16)}
    place.start_receivers(expected_of(tensors))
    trainer = sender(place, None, bucket_bytes=MIB)
    loaders = [ModelLoader()]
    with pytest.raises(RoomError, match=r"2097152 bytes are needed.*sizeLimit"):
        await update(place, trainer, "v1", tensors, loaders)
    assert loaders[0].calls == [] and place.segments() == []
    small_memory("8m")
    await update(place, trainer, "v1", tensors, loaders)
    assert same(loaders[0].model, tensors)
    trainer.close()
    assert place.segments() == []

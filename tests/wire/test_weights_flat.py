"""Updates that fail in every way, again and again: after each the next one commits, and after all
of them no descriptor, thread, segment or memory is left over."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

import pytest

from rollout_pod.weights.agent_client import AgentClient, StageError, TransferError
from tests.support.agent_site import Site
from tests.support.weights import Gate, ModelLoader, Place, write_checkpoint

MIB = 1 << 20


Fault = Callable[[Site, int], Awaitable[None]]


async def _nothing(_: str) -> None:
    pass


async def another_model(site: Site, version: int) -> None:
    tensors = dict(site.tensors[version])
    del tensors["layers.0.norm"]
    path = write_checkpoint(site.place.root / "other", tensors)
    with pytest.raises(StageError, match="missing"):
        await site.stage(version, path)


async def a_shard_is_cut_off(site: Site, version: int) -> None:
    shard = site.paths[version] / "model-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    try:
        with pytest.raises(StageError, match="truncated"):
            await site.stage(version)
    finally:
        shard.write_bytes(whole)


async def a_loader_raises_at_a_bucket(site: Site, version: int) -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise RuntimeError("no such parameter")

    await site.failing(version, ModelLoader(), ModelLoader(fail), during=_nothing)


async def a_loader_raises_at_its_end(site: Site, version: int) -> None:
    class Bad(ModelLoader):
        def finish(self) -> None:
            raise RuntimeError("no more memory")

    await site.failing(version, Bad(), ModelLoader(), during=_nothing)


async def nobody_loads(site: Site, version: int) -> None:
    session = await site.stage(version)
    with pytest.raises(TransferError, match="timed out"):
        await site.client.send(session=session, timeout_s=0.2)
    late = [await load for load in site.load(session, version, ModelLoader(), ModelLoader())]
    assert not any(report.ok for report in late)


async def nobody_sends(site: Site, version: int) -> None:
    session = await site.stage(version)
    loads = site.load(session, version, ModelLoader(), ModelLoader(), timeout_s=0.2)
    assert not any([(await load).ok for load in loads])
    await site.client.discard(session=session)


async def given_up_at_a_bucket(site: Site, version: int) -> None:
    gate = Gate(1)

    async def discard(session: str) -> None:
        assert await asyncio.to_thread(gate.reached.wait, 30)
        await site.client.discard(session=session)
        gate.open.set()

    await site.failing(version, ModelLoader(gate), ModelLoader(), during=discard)


async def replaced_before_it_is_sent(site: Site, version: int) -> None:
    older = await site.stage(version)
    await site.commit(1 - version)
    with pytest.raises(TransferError):
        await site.client.send(session=older, timeout_s=5)


async def the_agent_is_killed_at_a_bucket(site: Site, version: int) -> None:
    gate = Gate(1)

    async def kill(_: str) -> None:
        assert await asyncio.to_thread(gate.reached.wait, 30)
        site.agent.send_signal(signal.SIGKILL)
        site.agent.wait()
        gate.open.set()

    await site.failing(version, ModelLoader(gate), ModelLoader(), during=kill)
    site.agent = site.place.start_agent()


PASSING: tuple[Fault, ...] = (
    another_model,
    a_shard_is_cut_off,
    a_loader_raises_at_a_bucket,
    a_loader_raises_at_its_end,
    nobody_loads,
    nobody_sends,
    given_up_at_a_bucket,
    replaced_before_it_is_sent,
)


async def test_a_hundred_failures_among_two_hundred_updates_leave_nothing(
    place: Place, client: AgentClient
) -> None:
    site = Site(place, client)
    before: list[int] = []
    memory: list[int] = []
    for number in range(100):
        if number == 2 * len(PASSING):  # pools have grown, and everything has been imported
            before, memory = site.usage(), site.memory()
        await PASSING[number % len(PASSING)](site, number % 2)
        await site.commit(number % 2)
        assert len(place.segments()) <= 2, "the committed version, and a slot for the next"
    more = [now - then for now, then in zip(site.usage(), before, strict=True)]
    assert max(more) <= 5, f"descriptors and threads here, there: {more}"
    grown = [now - then for now, then in zip(site.memory(), memory, strict=True)]
    assert max(grown) < 8 * MIB, grown
    place.close()
    assert place.segments() == []


async def test_agents_that_are_killed_one_after_another_leave_nothing(
    place: Place, client: AgentClient
) -> None:
    site = Site(place, client)
    before: list[int] = []
    for number in range(8):
        await the_agent_is_killed_at_a_bucket(site, number % 2)
        await site.commit(number % 2)
        assert len(place.segments()) <= 2, "the dead agent's were taken away by the next"
        if number == 1:
            before = site.usage()
    more = [now - then for now, then in zip(site.usage(), before, strict=True)]
    assert max(more) <= 5, f"descriptors and threads here, there: {more}"
    place.close()
    assert place.segments() == []

"""The head's supervisor: it starts no engine before its nodes are there, and takes no pushes."""

import asyncio
from pathlib import Path

import pytest

from rollout_pod.engine.base import EngineStartError, InvalidField
from rollout_pod.engine.lifeline import Lifeline
from rollout_pod.engine.output_tail import OutputTail
from rollout_pod.serve import lose_node
from rollout_pod.supervisor.supervisor import PodFailed
from tests.support.fakes import FakeAgent, FakeEngine
from tests.support.pods import Pod, pushed, ref, running_pod


class Gathering:
    """Waits until it is told how it ends."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> None:
        self.waits.set()
        await asyncio.shield(self.outcome)


async def test_the_engine_starts_when_the_nodes_are_there(tmp_path: Path) -> None:
    gather = Gathering()
    engine = FakeEngine(start_gate=asyncio.Event())
    async with running_pod(tmp_path, engine=engine, gather=gather) as pod:
        pod.want(ref("step-1"))
        await gather.waits.wait()
        assert not pod.supervisor.is_started
        assert pod.supervisor.liveness_error() is None
        assert engine.start_gate is not None
        engine.start_gate.set()
        await asyncio.sleep(0.05)
        assert pod.state.phase == "Loading", "the engine alone does not make it up"
        gather.outcome.set_result(None)
        await pod.serving("step-1")


async def test_nodes_that_do_not_come_end_the_process_with_their_names(tmp_path: Path) -> None:
    gather = Gathering()
    async with running_pod(tmp_path, gather=gather) as pod:
        await gather.waits.wait()
        gather.outcome.set_exception(EngineStartError("node 1 was not there within 9 s"))
        with pytest.raises(PodFailed, match="node 1 was not there"):
            async with asyncio.timeout(5):
                await asyncio.shield(pod.task)


async def test_a_head_that_is_asked_to_end_while_it_waits_ends(tmp_path: Path) -> None:
    gather = Gathering()
    async with running_pod(tmp_path, gather=gather) as pod:
        await gather.waits.wait()
        pod.supervisor.begin_drain()
        async with asyncio.timeout(5):
            await asyncio.shield(pod.task)
        gather.outcome.cancel()


async def test_a_node_that_is_lost_while_the_engine_starts_ends_the_process_at_once(
    tmp_path: Path,
) -> None:
    """Else nothing would end it before the startup probe does."""
    gather = Gathering()
    gather.outcome.set_result(None)
    engine = FakeEngine(start_gate=asyncio.Event())
    async with running_pod(tmp_path, engine=engine, gather=gather) as pod:
        async with asyncio.timeout(5):
            while "start" not in engine.calls:
                await asyncio.sleep(0.01)
        pod.supervisor.look()
        await asyncio.sleep(0.05)
        assert pod.state.phase == "Loading", "a look alone ends nothing"
        lose_node(engine, pod.supervisor, "node 1 was not heard for 30 s")
        with pytest.raises(PodFailed, match=r"^node 1 was not heard for 30 s$"):
            async with asyncio.timeout(1):
                await asyncio.shield(pod.task)
        assert pod.supervisor.liveness_error() == "node 1 was not heard for 30 s"
        assert not pod.supervisor.is_ready


async def test_a_node_that_is_lost_while_it_serves_ends_the_process_at_once(
    tmp_path: Path,
) -> None:
    gather = Gathering()
    gather.outcome.set_result(None)
    engine = FakeEngine()
    async with running_pod(tmp_path, engine=engine, gather=gather) as pod:
        pod.want()
        await pod.serving("base")
        lose_node(engine, pod.supervisor, "node 1 was not heard for 30 s")
        with pytest.raises(PodFailed, match="node 1 was not heard"):
            async with asyncio.timeout(0.5):
                await asyncio.shield(pod.task)


async def sends(pod: Pod, agent: FakeAgent) -> None:
    """It serves its base, and the bytes of the next version are on their way."""
    pod.want()
    await pod.serving("base")
    pod.want(ref("step-1"))
    async with asyncio.timeout(5):
        while "send step-1 ok" not in agent.calls:
            await asyncio.sleep(0.01)


async def test_a_node_that_is_lost_while_it_sends_is_not_waited_for(tmp_path: Path) -> None:
    """Its machine is gone without a word, so that the call would last until its deadline."""
    engine, agent = FakeEngine(), FakeAgent(send_gate=asyncio.Event())
    async with running_pod(tmp_path, engine=engine, agent=agent) as pod:
        await sends(pod, agent)
        lose_node(engine, pod.supervisor, "node 1 was not heard for 30 s")
        with pytest.raises(PodFailed, match="node 1 was not heard"):
            async with asyncio.timeout(1):
                await asyncio.shield(pod.task)
        assert pod.state.weight_version is None
        assert engine.holds == "base"
        assert agent.calls[-1] == "discard"


async def test_a_sender_is_waited_for_while_the_engine_lives(tmp_path: Path) -> None:
    """Also where the ranks are done: what it says belongs to the update."""
    engine, agent = FakeEngine(), FakeAgent(send_gate=asyncio.Event())
    async with running_pod(tmp_path, engine=engine, agent=agent) as pod:
        await sends(pod, agent)
        (session,) = agent.staged
        agent.push(session, "ok")
        await asyncio.sleep(0.1)
        assert engine.holds == "step-1"
        assert pod.state.phase == "Updating"
        assert agent.send_gate is not None
        agent.send_gate.set()
        await pod.serving("step-1")


async def test_a_push_to_several_nodes_is_refused_by_name(tmp_path: Path) -> None:
    async def gather() -> None:
        pass

    async with running_pod(tmp_path, gather=gather) as pod:
        pod.want()
        await pod.serving("base")
        with pytest.raises(InvalidField, match="with several, give path or url") as refused:
            pod.want(pushed("step-1"))
        assert refused.value.field == "weights.source.push"
        await pod.serving("base")


def test_the_first_reason_of_a_death_is_kept() -> None:
    lifeline = Lifeline(OutputTail())
    assert lifeline.death() is None
    lifeline.condemn("node 1 was not heard for 30 s")
    lifeline.condemn("node 2 was not heard for 30 s")
    assert lifeline.death() == "node 1 was not heard for 30 s"

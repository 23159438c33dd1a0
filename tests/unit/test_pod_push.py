"""Push mode on the fakes: a trainer's offers, in time, twice, late, and with its death in between."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_pod.engine.base import RankReport
from rollout_pod.protocol import Problem, PushStatus, StateDocument, UpdatePhase
from rollout_pod.server.push_app import make_push_app
from rollout_pod.supervisor import staging
from rollout_pod.supervisor.pushing import NoRanks, PushRefused, UnknownSession
from rollout_pod.supervisor.supervisor import PodFailed
from tests.support.fakes import FakeAgent, FakeEngine
from tests.support.pods import PROMPT, Pod, pushed, ref, running_pod, start_long


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_RETRY_BASE_S", 0.02)


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with running_pod(tmp_path) as made:
        made.want()
        await made.serving("base")
        yield made


async def needs(pod: Pod, version: str) -> StateDocument:
    return await pod.until(lambda s: s.needs == version)


def refused(pod: Pod, version: str, session: str = "q", **more: object) -> PushRefused:
    before = pod.state
    with pytest.raises(PushRefused) as caught:
        pod.offer(version, session, **more)
    after = pod.state
    assert (after.revision, after.phase) == (before.revision, before.phase), "it changed something"
    return caught.value


async def test_a_push_is_awaited_offered_and_committed(pod: Pod) -> None:
    pod.want(pushed("step-1", step=1))
    await needs(pod, "step-1")
    state = await pod.until(lambda s: bool(s.update and s.update.phase == "AwaitingPush"))
    assert (state.phase, state.ready, state.gate) == ("Serving", True, "open")
    answer = await pod.ask(PROMPT, 3)
    assert [s.version for s in answer.weight_versions] == ["base"], "it serves on"

    tasks = await start_long(pod)
    pod.engine.calls.clear()
    pod.engine.tells |= {"transport": "cuda_ipc", "mode": "direct", "path": "replayed", "note": ""}
    accepted = pod.offer("step-1", reason="no GPU")
    assert (accepted.phase, accepted.over) == (UpdatePhase.STAGED, False)
    assert pod.state.needs is None
    pod.agent.push("p", "ok")
    state = await pod.serving("step-1")
    assert pod.engine.calls == ["pause", "load step-1", "clear", "resume"]
    assert {p.cancel_reason for p in await asyncio.gather(*tasks)} == {"updating"}
    update = state.update
    assert update and update.phase is UpdatePhase.COMMITTED
    assert (update.session, update.bytes, update.note) == ("p", 4096, "no GPU")
    assert (update.transport, update.mode) == ("cuda_ipc", "direct"), "as the ranks report it"
    assert update.steps == {"load": 0.1} and update.seconds.prefetch is None
    assert update.seconds.transfer and update.seconds.paused
    assert [(r.path, r.note) for r in state.ranks] == [("replayed", "")]
    assert (state.needs, state.weight_step) == (None, 1)
    assert state.committed == pushed("step-1", step=1)
    assert "stage" not in str(pod.agent.calls) and "committed" not in str(pod.agent.calls)
    assert pod.supervisor.pushes.status("p").over


async def test_what_the_agent_brings_is_told_as_the_ranks_report_it(pod: Pod) -> None:
    pod.want(ref("step-1"))
    state = await pod.serving("step-1")
    assert state.update and (state.update.mode, state.update.session) == ("bucketed", None)
    assert [(r.path, r.note) for r in state.ranks] == [("reference", "it cannot be replayed")]


async def test_an_offer_again_is_the_same_and_loads_once(pod: Pod) -> None:
    pod.want(pushed("step-1"))
    await needs(pod, "step-1")
    pod.offer("step-1")
    assert pod.offer("step-1").session == "p"
    pod.agent.push("p", "ok")
    await pod.serving("step-1")
    assert pod.offer("step-1").phase is UpdatePhase.COMMITTED, "also when its answer was lost"
    assert refused(pod, "step-1", "p", bytes=1).code == "stale_session"
    assert [c for c in pod.engine.calls if c.startswith("load")] == ["load step-1"]


async def test_offers_that_are_refused_change_nothing(pod: Pod) -> None:
    error = refused(pod, "step-1")
    assert error.code == "not_desired" and "asks for base, not for step-1" in str(error)
    pod.want(pushed("step-2"))
    await needs(pod, "step-2")
    error = refused(pod, "step-1")
    assert error.code == "not_desired" and "it needs step-2" in str(error)
    assert refused(pod, "step-2", boot_id="another").code == "stale_session"
    pod.offer("step-2")
    error = refused(pod, "step-2")
    assert error.code == "push_in_progress" and "session p" in str(error)
    pod.agent.push("p", "ok")
    await pod.serving("step-2")
    assert refused(pod, "step-2").code == "not_desired", "it holds it already"
    with pytest.raises(UnknownSession):
        pod.supervisor.pushes.status("q")


async def test_a_transport_that_was_named_is_not_replaced(pod: Pod) -> None:
    pod.want(pushed("step-1"), transport="cuda_ipc")
    await needs(pod, "step-1")
    error = refused(pod, "step-1", reason="another GPU")
    assert error.code == "not_supported" and "another GPU" in str(error)
    pod.offer("step-1", transport="cuda_ipc")


async def test_nobody_can_push_before_the_engine_is_up(tmp_path: Path) -> None:
    engine = FakeEngine(start_gate=asyncio.Event())
    async with running_pod(tmp_path, engine=engine) as pod:
        pod.want(pushed("step-1"))
        with pytest.raises(NoRanks):
            pod.supervisor.pushes.target(shm_dir=Path("/dev/shm"))
        with pytest.raises(NoRanks):
            pod.offer("step-1")
        assert pod.state.needs is None
        assert engine.start_gate
        engine.start_gate.set()
        state = await needs(pod, "step-1")
        assert not state.ready, "there is nothing to fall back to"


async def test_a_sender_that_gives_up_before_the_gate_closes_costs_nothing(pod: Pod) -> None:
    pod.want(pushed("step-1"))
    await needs(pod, "step-1")
    tasks = await start_long(pod)
    pod.offer("step-1")
    status = pod.supervisor.pushes.give_up("p", "it was told to stop")
    assert (status.phase, status.over) == (UpdatePhase.GIVEN_UP, True)
    state = await needs(pod, "step-1")
    assert state.gate == "open" and state.phase == "Serving"
    assert "it was told to stop" in state.update.message
    assert pod.supervisor.pushes.give_up("p", "twice").phase is UpdatePhase.GIVEN_UP
    error = refused(pod, "step-1", "p")
    assert error.code == "stale_session" and "it was told to stop" in str(error)
    assert not any(t.done() for t in tasks)
    pod.offer("step-1", "second")
    pod.agent.push("second", "ok")
    await pod.serving("step-1")
    await asyncio.gather(*tasks)


async def test_senders_that_give_up_behind_a_closed_gate_are_attempts(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them cut requests: one that always fails must not do so for ever."""
    pod.want(pushed("step-1"), max_attempts=2)
    pause, may_pause = pod.engine.pause, asyncio.Event()

    async def late_pause(*args: object, **more: object) -> None:
        await may_pause.wait()
        await pause(*args, **more)

    monkeypatch.setattr(pod.engine, "pause", late_pause)
    for number in range(2):
        await needs(pod, "step-1")
        tasks = await start_long(pod)
        may_pause.clear()
        pod.offer("step-1", f"p{number}")
        await pod.until(lambda s: s.gate == "closed")
        status = pod.supervisor.pushes.give_up(f"p{number}", "no tensor could be gathered")
        may_pause.set()
        assert status.over and "no tensor could be gathered" in status.message
        await asyncio.gather(*tasks)
        await pod.serving("base")
    assert status.phase is UpdatePhase.REJECTED
    assert pod.state.needs is None
    error = refused(pod, "step-1")
    assert error.code == "not_desired" and "rejected" in str(error)
    pod.want(pushed("step-2"), max_attempts=2)
    await needs(pod, "step-2")
    pod.offer("step-2", "good")
    pod.agent.push("good", "ok")
    await pod.serving("step-2")


async def test_a_sender_that_dies_untouched_leaves_the_old_version_serving(pod: Pod) -> None:
    pod.want(pushed("step-1"))
    await needs(pod, "step-1")
    pod.offer("step-1")
    pod.agent.push("p", "untouched")
    state = await pod.until(lambda s: s.phase == "Serving" and s.needs == "step-1")
    assert (state.weight_version, state.ready) == ("base", True)
    ended = pod.supervisor.pushes.status("p")
    assert (ended.phase, ended.over) == (UpdatePhase.FAILED, True)
    assert "scripted" in ended.message
    assert (await pod.ask(PROMPT, 3)).finish_reason == "length"


async def test_ranks_that_were_given_different_tensors_commit_nothing(tmp_path: Path) -> None:
    """Each report is good by itself."""

    class Apart(FakeEngine):
        async def load_weights(self, session: str, **more: Any) -> tuple[RankReport, ...]:
            reports = await super().load_weights(session, **more)
            return tuple(replace(r, manifest=f"m{r.rank}") for r in reports)

    async with running_pod(tmp_path, engine=Apart(world=2)) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(pushed("step-1"))
        await needs(pod, "step-1")
        pod.offer("step-1")
        pod.agent.push("p", "ok")
        state = await pod.until(lambda s: bool(s.update and s.update.phase == "Failed"))
        assert "ranks 0 and 1 were given different tensors" in state.update.message
        assert state.weight_version is None


async def test_a_sender_that_dies_midway_poisons_and_the_old_version_comes_back(pod: Pod) -> None:
    """The agent can bring it at once, the trainer nobody knows when."""
    pod.want(ref("step-0"))
    await pod.serving("step-0")
    pod.want(pushed("step-1"))
    await needs(pod, "step-1")
    pod.offer("step-1")
    pod.agent.push("p", "midway")
    await pod.until(lambda s: s.phase == "Poisoned")
    state = await pod.serving("step-0")
    assert state.needs == "step-1"
    assert pod.engine.calls[-4:] == ["load step-1", "load step-0 flush", "clear", "resume"]
    pod.offer("step-1", "another-trainer")
    pod.agent.push("another-trainer", "ok")
    await pod.serving("step-1")


async def test_poisoned_with_nothing_but_pushes_it_waits_for_a_complete_one(pod: Pod) -> None:
    pod.want(pushed("step-1"))
    await needs(pod, "step-1")
    pod.offer("step-1", "one")
    pod.agent.push("one", "ok")
    await pod.serving("step-1")
    pod.want(pushed("step-2"))
    await needs(pod, "step-2")
    pod.offer("step-2", "two")
    pod.agent.push("two", "midway")
    state = await pod.until(lambda s: s.phase == "Poisoned" and s.needs == "step-2")
    assert not state.ready and state.weight_version is None
    await asyncio.sleep(0.2)
    assert pod.state.phase == "Poisoned" and not pod.task.done(), "it waits, and does not restart"
    pod.offer("step-2", "three")
    pod.agent.push("three", "ok")
    await pod.serving("step-2")
    assert "load step-2 flush" in pod.engine.calls


async def test_failures_are_bounded_then_it_is_rejected(pod: Pod) -> None:
    pod.want(ref("step-0"))
    await pod.serving("step-0")
    pod.want(pushed("step-1"), max_attempts=2)
    for number in range(2):
        await needs(pod, "step-1")
        pod.offer("step-1", f"s{number}")
        pod.agent.push(f"s{number}", "midway")
        await pod.until(lambda s, n=number: pod.supervisor.pushes.status(f"s{n}").over)
    state = await pod.serving("step-0")
    assert (state.needs, state.rejected) == (None, pushed("step-1"))
    error = refused(pod, "step-1")
    assert error.code == "not_desired" and "rejected" in str(error)


async def test_without_a_fallback_the_last_failure_restarts_the_container(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(pushed("step-1"), max_attempts=1)
        await needs(pod, "step-1")
        pod.offer("step-1")
        pod.agent.push("p", "midway")
        with pytest.raises(PodFailed, match="step-1 failed 1 times"):
            await pod.task
    async with running_pod(tmp_path) as pod:
        state = await needs(pod, "step-1")
        assert state.phase == "Stale" and not pod.task.done(), "and asks for it again"
        pod.offer("step-1")
        pod.agent.push("p", "ok")
        await pod.serving("step-1")


async def test_a_container_that_restarts_needs_what_it_held(tmp_path: Path) -> None:
    agent = FakeAgent()
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want(pushed("step-1"))
        await needs(pod, "step-1")
        late = pod.state.boot_id
        pod.offer("step-1", "one")
        agent.push("one", "ok")
        await pod.serving("step-1")
    async with running_pod(tmp_path, agent=agent) as pod:
        state = await needs(pod, "step-1")
        assert not state.ready and state.weight_version is None
        assert refused(pod, "step-1", "one", boot_id=late).code == "stale_session"
        pod.offer("step-1", "two")
        agent.push("two", "ok")
        await pod.serving("step-1")


async def test_a_newer_wish_ends_a_session_that_was_not_begun(pod: Pod) -> None:
    """Its sender must not wait for a load that never comes."""
    pod.want(pushed("step-1"), paused=True)
    await needs(pod, "step-1")
    waiter = asyncio.create_task(_ended_later(pod))
    pod.engine.pause_hangs = False
    pod.want(pushed("step-1"), interruption={"mode": "drain", "timeout_s": 60.0})
    await pod.serving("base")
    tasks = await start_long(pod)
    pod.offer("step-1")
    await pod.until(lambda s: s.phase == "Updating")
    pod.want(pushed("step-2"))
    state = await needs(pod, "step-2")
    ended = await waiter
    assert (ended.phase, ended.over) == (UpdatePhase.SUPERSEDED, True)
    assert "asked for" in ended.message
    assert state.weight_version == "base"
    await pod.serving("base")
    await asyncio.gather(*tasks)


async def _ended_later(pod: Pod) -> PushStatus:
    while True:
        try:
            return await pod.supervisor.pushes.ended("p", timeout_s=10)
        except UnknownSession:
            await asyncio.sleep(0)


async def test_an_offer_chases_the_fallback_off(tmp_path: Path) -> None:
    agent = FakeAgent(stage_gate=asyncio.Event())
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want(pushed("step-2"), fallback=ref("step-1"))
        await pod.until(lambda s: bool(s.update and s.update.target == "step-1"))
        assert pod.state.needs == "step-2"
        pod.offer("step-2")
        agent.push("p", "ok")
        assert agent.stage_gate
        agent.stage_gate.set()  # what the agent says now comes too late
        state = await pod.serving("step-2")
        assert state.update and state.update.target == "step-2"
        assert "load step-1" not in pod.engine.calls
        assert "discard" in agent.calls, "the agent does not go on for nobody"


async def test_a_fallback_serves_until_somebody_pushes(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(pushed("step-2"), fallback=ref("step-1"))
        state = await pod.serving("step-1")
        assert state.needs == "step-2"
        assert refused(pod, "step-1").code == "not_desired"
        pod.offer("step-2")
        pod.agent.push("p", "ok")
        await pod.serving("step-2")


async def test_asleep_nothing_is_pushed_and_level_2_ends_with_a_push(pod: Pod) -> None:
    pod.want(pushed("step-1"))
    await needs(pod, "step-1")
    pod.offer("step-1")
    pod.agent.push("p", "ok")
    await pod.serving("step-1")
    pod.want(pushed("step-2"), sleep={"level": 2})
    state = await pod.until(lambda s: s.phase == "Sleeping")
    assert state.needs is None
    state = await pod.until(lambda s: bool(s.update and s.update.target == "step-2"))
    assert "wake" in state.update.message
    assert refused(pod, "step-2").code == "asleep"
    pod.want(pushed("step-2"), sleep={"level": 2, "tags": ["kv_cache"]})
    await needs(pod, "step-2")
    pod.offer("step-2", "two")
    pod.agent.push("two", "ok")
    await pod.until(lambda s: s.weight_version == "step-2")
    pod.want(pushed("step-2"))
    await pod.serving("step-2")


async def test_a_drain_ends_what_was_offered(pod: Pod) -> None:
    pod.want(pushed("step-1"), interruption={"mode": "drain", "timeout_s": 60.0})
    await needs(pod, "step-1")
    tasks = await start_long(pod)
    pod.offer("step-1")
    pod.supervisor.begin_drain()
    assert refused(pod, "step-1").code == "draining"
    ended = await pod.supervisor.pushes.ended("p", timeout_s=10)
    assert ended.phase is UpdatePhase.SUPERSEDED and "this pod ends" in ended.message
    await asyncio.gather(*tasks)
    await pod.task


# --- over HTTP


@pytest.fixture
async def trainer(pod: Pod) -> AsyncIterator[httpx.AsyncClient]:
    app = make_push_app(pod.supervisor, shm_dir=Path("/dev/shm"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        yield client


def body(pod: Pod, version: str, session: str = "p", **more: object) -> dict:
    return {
        "session": session, "boot_id": pod.state.boot_id, "version": version, "bytes": 1,
        "tensors": 1, "transport": "shared_memory", "mode": "bucketed", **more,
    }  # fmt: skip


async def test_the_routes_of_the_socket(pod: Pod, trainer: httpx.AsyncClient) -> None:
    pod.want(pushed("step-1"), bucket_bytes=8192)
    await needs(pod, "step-1")
    target = (await trainer.get("/v1/push/target")).json()
    assert target == {
        "boot_id": pod.state.boot_id, "world": 1, "sockets": ["/nowhere/rank-0.sock"],
        "shm_dir": "/dev/shm", "bucket_bytes": 8192, "transport": "auto",
        "desired_version": "step-1", "needs": "step-1", "weight_version": "base",
        "update_timeout_s": 600.0, "gpu_uuids": [None],
    }  # fmt: skip
    state = (await trainer.get("/v1/push/state")).json()
    assert state["needs"] == "step-1"
    seen = f"{state['boot_id']}:{state['revision']}"
    held = asyncio.create_task(trainer.get("/v1/push/state", params={"after": seen, "timeout": 10}))
    offered = await trainer.post("/v1/push/sessions", json=body(pod, "step-1"))
    assert (offered.status_code, offered.json()["phase"]) == (202, "Staged")
    assert (await held).json()["needs"] is None
    ended = asyncio.create_task(trainer.get("/v1/push/sessions/p", params={"timeout": 10}))
    pod.agent.push("p", "ok")
    status = (await ended).json()
    assert (status["phase"], status["over"]) == ("Committed", True)
    assert status["state"]["weight_version"] == "step-1"
    assert (await trainer.delete("/v1/push/sessions/p")).json()["phase"] == "Committed"


@pytest.mark.parametrize(
    ("changes", "status", "code", "says"),
    [
        ({"version": "step-9"}, 409, "not_desired", "needs step-1"),
        ({"boot_id": "old"}, 409, "stale_session", "earlier start"),
        ({"session": "../x"}, 422, "invalid_field", "session"),
        ({"bytes": -1}, 422, "invalid_field", "bytes"),
        ({"transport": "pigeon"}, 422, "invalid_field", "transport"),
        ({"reason": "x" * 5000}, 422, "invalid_field", "reason"),
    ],
)
async def test_offers_that_the_socket_refuses(
    pod: Pod, trainer: httpx.AsyncClient, changes: dict, status: int, code: str, says: str
) -> None:
    pod.want(pushed("step-1"))
    await needs(pod, "step-1")
    answer = await trainer.post("/v1/push/sessions", json=body(pod, "step-1") | changes)
    problem = Problem.model_validate(answer.json())
    assert (answer.status_code, problem.code) == (status, code)
    assert says in problem.detail
    assert pod.state.needs == "step-1"


async def test_unknown_sessions_are_not_found(trainer: httpx.AsyncClient) -> None:
    for answer in (
        await trainer.get("/v1/push/sessions/gone", params={"timeout": 10}),
        await trainer.delete("/v1/push/sessions/gone"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")

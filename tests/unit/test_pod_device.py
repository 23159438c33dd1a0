"""Versions that wait on the device: fetched, taken there while it serves, and switched to."""

import asyncio
from pathlib import Path

import pytest

from rollout_pod.engine.base import EngineError, StagingRefused
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.protocol import UpdatePhase
from rollout_pod.supervisor import staging
from tests.support.fakes import FakeAgent, FakeEngine, fake_tokens
from tests.support.pods import PROMPT, ref, running_pod, start_long


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_RETRY_BASE_S", 0.02)


async def test_the_pause_pays_only_the_switch(tmp_path: Path) -> None:
    async with running_pod(tmp_path, stages_on_device=True) as pod:
        pod.want()
        await pod.serving("base")
        tasks = await start_long(pod)
        pod.engine.calls.clear()
        pod.want(ref("step-1", step=1))
        state = await pod.serving("step-1")
        assert {p.cancel_reason for p in await asyncio.gather(*tasks)} == {"updating"}
        assert pod.engine.calls == ["stage step-1", "pause", "switch step-1", "clear", "resume"]
        assert [call for call in pod.agent.calls if "step-1" in call] == [
            "stage step-1 /w/step-1", "send step-1 ok", "committed step-1",
        ]  # fmt: skip
        assert (state.update.mode, state.update.transport) == ("staged", "shared_memory")
        assert [rank.path for rank in state.ranks] == ["switched"]
        answer = await pod.ask(PROMPT, 3)
        assert answer.token_ids == fake_tokens("step-1", PROMPT, 3)


async def test_serving_goes_on_while_it_is_staged(tmp_path: Path) -> None:
    agent = FakeAgent(send_gate=asyncio.Event())
    async with running_pod(tmp_path, agent=agent, stages_on_device=True) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(ref("step-1"))
        while "send step-1 ok" not in agent.calls:
            await asyncio.sleep(0)
        answer = await pod.ask(PROMPT, 5)
        assert answer.token_ids == fake_tokens("base", PROMPT, 5)
        assert (pod.state.gate, pod.state.update.phase) == ("open", UpdatePhase.PREFETCHING)
        # and is given up where it is not wanted any more
        pod.want(ref("step-2"))
        while "stage step-2 /w/step-2" not in agent.calls:
            await asyncio.sleep(0)
        agent.send_gate.set()
        await pod.serving("step-2")
        assert "switch step-1" not in pod.engine.calls


async def test_what_cannot_wait_there_goes_the_ordinary_way_and_says_so(tmp_path: Path) -> None:
    """As the first update does, by which the ranks learn where bytes belong."""
    engine = FakeEngine(refuses_staging="the first update goes the ordinary way")
    async with running_pod(tmp_path, engine=engine, stages_on_device=True) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(ref("step-1"))
        state = await pod.serving("step-1")
        assert pod.engine.calls[-5:] == [
            "stage refused", "pause", "load step-1", "clear", "resume",
        ]  # fmt: skip
        assert state.update.note == (
            "it waits in host memory: the first update goes the ordinary way"
        )
        engine.refuses_staging = ""
        pod.want(ref("step-2"))
        state = await pod.serving("step-2")
        assert "switch step-2" in pod.engine.calls
        assert state.update.note == ""


async def test_a_staging_that_breaks_off_touches_nothing(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.send_script["step-1"] = ["midway"]
    async with running_pod(tmp_path, agent=agent, stages_on_device=True) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(ref("step-1"))
        waiting = await pod.until(
            lambda s: bool(s.update) and s.update.phase is UpdatePhase.WAITING
        )
        assert "scripted: midway" in waiting.update.message
        assert (waiting.phase, waiting.weight_version, waiting.gate) == ("Serving", "base", "open")
        state = await pod.serving("step-1")
        assert "load step-1" in pod.engine.calls, "the second attempt waits in host memory"
        assert "failed before" in state.update.note


async def test_a_session_that_some_ranks_have_begun_is_loaded_by_none(tmp_path: Path) -> None:
    engine = FakeEngine(staging_script=["another version is being staged"])
    async with running_pod(tmp_path, engine=engine, stages_on_device=True) as pod:
        pod.want()
        await pod.serving("base")
        pod.engine.calls.clear()
        pod.agent.calls.clear()
        pod.want(ref("step-1"))
        state = await pod.serving("step-1")
        assert pod.agent.calls[:4] == [
            "stage step-1 /w/step-1", "discard", "stage step-1 /w/step-1", "send step-1 ok",
        ]  # fmt: skip
        assert pod.engine.calls == [
            "stage begun in part", "pause", "load step-1", "clear", "resume",
        ]  # fmt: skip
        assert state.update.attempt == 1
        assert "failed before" in state.update.note


@pytest.mark.parametrize(
    ("answers", "raised"),
    [
        (["busy", "busy"], StagingRefused),
        (["busy", ""], EngineError),
        (["", "busy"], EngineError),
    ],
)
async def test_only_what_no_rank_has_begun_counts_as_refused(
    answers: list[str], raised: type[EngineError], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VllmEngine.__new__(VllmEngine)

    async def on_ranks(*_: object) -> list[str]:
        return answers

    monkeypatch.setattr(engine, "_on_ranks", on_ranks)
    with pytest.raises(EngineError, match=r"^busy$") as caught:
        await engine.stage_weights("s", version="v", timeout_s=5)
    assert type(caught.value) is raised


@pytest.mark.parametrize("outcome", ["untouched", "midway"])
async def test_a_switch_that_fails(tmp_path: Path, outcome: str) -> None:
    engine = FakeEngine(switch_script=[outcome])
    async with running_pod(tmp_path, engine=engine, stages_on_device=True) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(ref("step-1"))
        state = await pod.serving("step-1")
        assert state.update.attempt == 2
        after = pod.engine.calls[pod.engine.calls.index("switch step-1") + 1 :]
        if outcome == "untouched":  # base was served meanwhile, and it is staged once more
            assert "stage step-1" in after
            assert "switch step-1" in after
        else:  # poisoned: nothing is served that it could wait beside
            assert "load step-1 flush" in after
        answer = await pod.ask(PROMPT, 3)
        assert answer.token_ids == fake_tokens("step-1", PROMPT, 3)


async def test_a_pod_with_nothing_to_serve_loads_at_once(tmp_path: Path) -> None:
    async with running_pod(tmp_path, stages_on_device=True) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        assert "load step-1" in pod.engine.calls
        assert not [call for call in pod.engine.calls if call.startswith(("stage", "switch"))]


async def test_without_it_nothing_is_staged(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        assert not [call for call in pod.engine.calls if call.startswith(("stage", "switch"))]

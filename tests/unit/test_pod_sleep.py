"""Sleep and wake on the fakes: in every order with updates, pauses, faults and restarts.

Every answer's tokens are checked against its version by ``Pod.ask``; the fake engine fails a test
that makes it generate, load or clear while what that needs is released.
"""

import asyncio
from pathlib import Path

import pytest

from rollout_pod.admission import NotReady
from rollout_pod.engine.base import EngineError, SleepUnsupported
from rollout_pod.protocol import SleepTag, StateDocument
from rollout_pod.supervisor import acts, staging
from rollout_pod.supervisor.caches import CachesInUse, EngineAsleep, EngineNotUp
from rollout_pod.supervisor.supervisor import PodFailed
from tests.support.fakes import GARBAGE, FakeAgent, FakeEngine
from tests.support.pods import LONG, PROMPT, Pod, ref, running_pod, start_long

LEVEL_1, LEVEL_2 = {"level": 1}, {"level": 2}
ONLY_KV = {"level": 1, "tags": ["kv_cache"]}
BOTH = {"weights", "kv_cache"}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_RETRY_BASE_S", 0.02)
    monkeypatch.setattr(acts, "_CLEAR_PAUSE_S", 0.001)


def sleeps(*tags: str) -> "object":
    wanted = set(tags or BOTH)

    def done(state: StateDocument) -> bool:
        return state.phase == "Sleeping" and state.sleep is not None and (
            set(state.sleep.tags) == wanted
        )  # fmt: skip

    return done


async def ended(pod: Pod, match: str) -> None:
    with pytest.raises(PodFailed, match=match):
        async with asyncio.timeout(5):
            await asyncio.shield(pod.task)


async def test_level_1_cuts_releases_and_comes_back_with_the_same_version(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        tasks = await start_long(pod)
        pod.engine.calls.clear()
        pod.want(ref("step-1"), sleep=LEVEL_1)
        state = await pod.until(sleeps())
        assert pod.supervisor.gate.unfinished == 0, "asleep before every caller had its partial"
        for partial in await asyncio.gather(*tasks):
            assert partial.is_cancel and partial.cancel_reason == "sleeping"
            assert 0 < len(partial.token_ids) < LONG
        assert pod.engine.calls == ["pause", "sleep 1"]
        assert (state.sleep.level, state.sleep.released, state.sleep.bytes) == (1, True, 3 << 20)
        assert (state.resident, state.ready, state.gate) == ((), False, "closed")
        assert state.weight_version == "step-1"
        assert pod.supervisor.liveness_error() is None
        assert (await pod.ask(PROMPT, 3)).cancel_reason == "refused"
        parked = asyncio.create_task(pod.ask(PROMPT, 3, on_pause="wait"))
        pod.want(ref("step-1"))
        state = await pod.serving("step-1")
        assert (await parked).finish_reason == "length"
        assert state.sleep is None and state.ready and set(state.resident) == BOTH
        assert pod.engine.calls[2:] == ["wake kv_cache weights", "clear", "resume"]
        assert not any(c.startswith("stage") for c in pod.agent.calls[3:]), "nothing was reloaded"


@pytest.mark.parametrize("version", ["base", "step-1"])
async def test_level_2_forgets_the_version_until_a_complete_update(
    tmp_path: Path, version: str
) -> None:
    weights = None if version == "base" else ref(version)
    async with running_pod(tmp_path) as pod:
        pod.want(weights)
        await pod.serving(version)
        pod.want(weights, sleep=LEVEL_2)
        state = await pod.until(sleeps())
        assert (state.weight_version, state.committed, state.ready) == (None, None, False)
        with pytest.raises(NotReady):
            await pod.ask(PROMPT, 3)
        assert pod.engine.holds == GARBAGE
        pod.engine.calls.clear()
        pod.want(weights)
        await pod.serving(version)
        assert pod.engine.calls == [
            "wake kv_cache weights", f"load {version}", "clear", "resume",
        ]  # fmt: skip
        assert (await pod.ask(PROMPT, 3)).weight_versions[0].version == version


async def test_after_level_2_what_was_served_last_is_the_fallback(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.stage_script["step-404"] = ["no such folder"] * 99
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        pod.want(ref("step-1"), sleep=LEVEL_2)
        await pod.until(sleeps())
        pod.want(ref("step-404"))
        await pod.serving("step-1")


async def test_one_tag_after_the_other_with_the_update_in_between(tmp_path: Path) -> None:
    """What a trainer on the same GPU does: the cache's memory comes back last."""
    async with running_pod(tmp_path) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        pod.want(ref("step-1"), sleep=LEVEL_2)
        await pod.until(sleeps())
        only_kv = {"level": 2, "tags": ["kv_cache"]}
        pod.engine.calls.clear()
        pod.want(ref("step-2"), sleep=only_kv)
        state = await pod.until(lambda s: sleeps("kv_cache")(s) and s.weight_version == "step-2")
        assert state.ready and state.resident == (SleepTag.WEIGHTS,)
        assert (state.sleep.bytes, state.update.phase) == (1 << 20, "Committed")
        assert pod.engine.calls == ["wake weights", "load step-2", "clear"]
        assert (await pod.ask(PROMPT, 3)).cancel_reason == "refused"
        pod.want(ref("step-2"))
        await pod.serving("step-2")
        assert pod.engine.calls[3:] == ["wake kv_cache", "resume"]
        assert (await pod.ask(PROMPT, 3)).finish_reason == "length"


async def test_only_the_cache_sleeps_and_the_weights_are_never_dropped(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.engine.calls.clear()
        pod.want(sleep={"level": 2, "tags": ["kv_cache"]})
        state = await pod.until(sleeps("kv_cache"))
        assert pod.engine.calls == ["pause", "sleep 1", "wake weights"]
        assert state.ready and state.weight_version == "base"
        pod.want()
        await pod.serving("base")


async def test_levels_and_tags_change_while_it_sleeps(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(sleep=LEVEL_1)
        await pod.until(sleeps())
        pod.engine.calls.clear()
        pod.want(sleep=LEVEL_2)
        await pod.until(lambda s: sleeps()(s) and s.sleep.level == 2)
        assert pod.engine.calls == ["wake kv_cache weights", "sleep 2"]
        pod.want(sleep=LEVEL_1)  # deeper than asked: nothing to do, nothing to save
        await pod.until(lambda s: s.generation == 4 and sleeps()(s))
        pod.want(sleep={"tags": ["weights"]})
        await pod.until(sleeps("weights"))
        assert pod.engine.calls[2:] == ["wake kv_cache"]
        pod.want(sleep=ONLY_KV)
        await pod.until(lambda s: sleeps("kv_cache")(s) and s.weight_version == "base")
        pod.want()
        await pod.serving("base")
        assert (await pod.ask(PROMPT, 3)).finish_reason == "length"


@pytest.mark.parametrize("level", [1, 2])
async def test_an_update_waits_for_the_wake_and_says_so(tmp_path: Path, level: int) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        pod.want(ref("step-1"), sleep={"level": level})
        await pod.until(sleeps())
        pod.want(ref("step-2"), sleep={"level": level})
        state = await pod.until(
            lambda s: bool(s.update and (s.update.target, s.update.phase) == ("step-2", "Staged"))
        )
        assert "waits until the weights wake" in state.update.message
        assert state.phase == "Sleeping" and "load step-2" not in pod.engine.calls
        pod.want(ref("step-2"))
        state = await pod.serving("step-2")
        assert state.update.message == ""
        assert pod.engine.calls.count("load step-2") == 1


async def test_sleep_in_the_middle_of_a_transfer_comes_after_the_commit(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.agent.send_gate = asyncio.Event()
        pod.want(ref("step-1"))
        await pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"))
        pod.want(ref("step-1"), sleep=LEVEL_1)
        pod.agent.send_gate.set()
        state = await pod.until(sleeps())
        assert (state.weight_version, state.update.phase) == ("step-1", "Committed")
        pod.want(ref("step-1"))
        await pod.serving("step-1")


async def test_sleep_between_the_cut_and_the_transfer_leaves_the_update_staged(
    tmp_path: Path,
) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pause = pod.engine.pause

        async def pause_and_be_told_to_sleep(*, keep: bool = False) -> None:
            await pause(keep=keep)
            pod.engine.pause = pause
            pod.want(ref("step-1"), sleep=LEVEL_1)

        pod.engine.pause = pause_and_be_told_to_sleep
        pod.want(ref("step-1"))
        state = await pod.until(sleeps())
        assert (state.weight_version, state.update.phase) == ("base", "Staged")
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        assert pod.engine.calls.count("load step-1") == 1


async def test_a_poisoned_pod_sleeps_and_is_repaired_when_it_wakes(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.send_script["step-1"] = ["midway"]
    agent.send_gate = asyncio.Event()
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(ref("step-1"), max_attempts=1)
        await pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"))
        pod.want(ref("step-2"), sleep=LEVEL_1, max_attempts=1)
        agent.send_gate.set()
        state = await pod.until(sleeps())
        assert state.weight_version is None and not state.ready
        pod.want(ref("step-2"), max_attempts=1)
        await pod.serving("step-2")
        assert "load step-2 flush" in pod.engine.calls


async def test_pause_and_sleep_in_any_order(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(paused=True)
        await pod.until(lambda s: s.phase == "Paused")
        pod.want(paused=True, sleep=LEVEL_1)
        await pod.until(sleeps())
        pod.want(paused=True)
        state = await pod.until(lambda s: s.phase == "Paused")
        assert state.sleep is None and state.ready and state.gate == "closed"
        assert "resume" not in pod.engine.calls[2:]
        pod.want(sleep=LEVEL_1)
        await pod.until(sleeps())
        pod.want(sleep=LEVEL_1, paused=True)
        await pod.until(lambda s: s.generation == 6 and sleeps()(s))
        pod.want()
        await pod.serving("base")


async def test_kept_requests_are_cut_by_a_sleep(tmp_path: Path) -> None:
    keep = {"mode": "keep"}
    async with running_pod(tmp_path) as pod:
        pod.want(interruption=keep)
        await pod.serving("base")
        tasks = await start_long(pod)
        pod.want(interruption=keep, paused=True)
        await pod.until(lambda s: s.phase == "Paused")
        assert pod.engine.running == 4
        pod.want(interruption=keep, paused=True, sleep=ONLY_KV)
        await pod.until(sleeps("kv_cache"))
        assert {a.cancel_reason for a in await asyncio.gather(*tasks)} == {"sleeping"}


async def test_drain_mode_lets_requests_end_before_it_sleeps(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.engine.step_s = 0.001
        pod.want()
        await pod.serving("base")
        task = asyncio.create_task(pod.ask(PROMPT, 50))
        while not pod.engine.running:
            await asyncio.sleep(0)
        pod.want(sleep=LEVEL_1, interruption={"mode": "drain"})
        await pod.until(sleeps())
        assert len((await task).token_ids) == 50


async def test_documents_that_come_while_it_falls_asleep_and_wakes(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        gate = pod.engine.resize_gate = asyncio.Event()
        asked = pod.want(sleep=LEVEL_2)
        while "sleep 2" not in pod.engine.calls:
            await asyncio.sleep(0)
        pod.supervisor.put_desired(asked)  # twice
        pod.want()  # taken back too late: it has begun
        gate.set()
        await pod.serving("base")
        assert "load base" in pod.engine.calls
        pod.want(sleep=LEVEL_1)
        await pod.until(sleeps())
        gate = pod.engine.resize_gate = asyncio.Event()
        pod.engine.calls.clear()
        pod.want()
        while not pod.engine.calls:
            await asyncio.sleep(0)
        pod.want(sleep=LEVEL_1)
        gate.set()
        await pod.until(lambda s: "sleep 1" in pod.engine.calls and sleeps()(s))
        assert "resume" not in pod.engine.calls


async def test_an_engine_that_cannot_sleep_serves_on_and_says_why(tmp_path: Path) -> None:
    async with running_pod(tmp_path, engine=FakeEngine(refuses_sleep="no sleep mode")) as pod:
        pod.want()
        await pod.serving("base")
        pod.engine.calls.clear()
        pod.want(sleep=LEVEL_2)
        state = await pod.until(lambda s: s.sleep is not None)
        assert (state.sleep.tags, state.sleep.message) == ((), "no sleep mode")
        assert (state.phase, state.ready, state.sleep.released) == ("Serving", True, False)
        assert (await pod.ask(PROMPT, 3)).finish_reason == "length"
        assert pod.engine.calls == []
        pod.want()
        assert pod.state.sleep is None


async def test_a_refusal_that_comes_late_poisons_nothing(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        pod.engine.sleep_error = SleepUnsupported("not this one")
        pod.engine.calls.clear()
        pod.want(ref("step-1"), sleep=LEVEL_2)
        state = await pod.until(lambda s: s.sleep is not None and s.phase == "Serving")
        assert state.sleep.message == "not this one" and state.weight_version == "step-1"
        assert pod.engine.calls == ["pause", "sleep 2", "resume"]
        assert (await pod.ask(PROMPT, 3)).weight_versions[0].version == "step-1"


async def test_a_late_refusal_forgets_nothing_that_came_meanwhile(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        gate = pod.engine.resize_gate = asyncio.Event()
        pod.engine.sleep_error = SleepUnsupported("not this one")
        pod.want(sleep=LEVEL_1)
        while "sleep 1" not in pod.engine.calls:
            await asyncio.sleep(0)
        pod.supervisor.begin_drain()
        gate.set()
        async with asyncio.timeout(5):
            await asyncio.shield(pod.task)
        assert pod.supervisor.board.state.drained and pod.state.phase == "Draining"


async def test_on_cpu_it_says_that_nothing_was_released(tmp_path: Path) -> None:
    async with running_pod(tmp_path, engine=FakeEngine(on_cpu=True)) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(sleep=LEVEL_1)
        state = await pod.until(sleeps())
        assert not state.sleep.released and state.sleep.message == "nothing on CPU"
        assert set(state.resident) == BOTH and not state.ready


@pytest.mark.parametrize("fault", ["sleep", "wake", "dies in sleep", "dies in wake", "clear"])
async def test_a_fault_ends_the_process_and_the_next_one_obeys(tmp_path: Path, fault: str) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        engine = pod.engine
        if fault == "sleep":
            engine.sleep_error = EngineError("out of host memory")
        if fault == "dies in sleep":
            engine.resize_gate = asyncio.Event()
        document = pod.want(ref("step-1"), sleep=LEVEL_1)
        if fault == "dies in sleep":
            while "sleep 1" not in engine.calls:
                await asyncio.sleep(0)
            engine.kill("killed")
            engine.resize_gate.set()
        if "sleep" not in fault:
            await pod.until(sleeps())
            if fault == "wake":
                engine.wake_error = EngineError("out of device memory")
            if fault == "dies in wake":
                engine.resize_gate = asyncio.Event()
            if fault == "clear":
                engine.refuse_clear = 99
            document = pod.want(ref("step-1"))
            if fault == "dies in wake":
                while engine.calls[-1] != "wake kv_cache weights":
                    await asyncio.sleep(0)
                engine.kill("killed")
                engine.resize_gate.set()
        words = {"sleep": "host memory", "wake": "device memory", "clear": "not be cleared"}
        await ended(pod, words.get(fault, "killed"))
        assert not pod.state.ready and pod.state.phase == "Failed"
        assert engine.calls.count("resume") == 1, "it served what nobody knows"
    async with running_pod(tmp_path) as pod:  # the container restarted
        if document.sleep:
            state = await pod.until(sleeps())
            assert "load step-1" not in pod.engine.calls, "it sleeps first"
            assert state.weight_version is None
            pod.want(ref("step-1"))
        await pod.serving("step-1")
        assert (await pod.ask(PROMPT, 3)).weight_versions[0].version == "step-1"


async def test_killed_asleep_it_sleeps_again(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(sleep=LEVEL_1)
        await pod.until(sleeps())
    async with running_pod(tmp_path) as pod:
        state = await pod.until(sleeps())
        assert state.weight_version == "base", "what the boot loaded is what is wanted"
        pod.want()
        await pod.serving("base")


async def test_heartbeats_rest_while_memory_moves_and_go_on_asleep(tmp_path: Path) -> None:
    async with running_pod(tmp_path, heartbeat_s=0.02, heartbeat_timeout_s=0.05) as pod:
        pod.want()
        await pod.serving("base")
        gate = pod.engine.resize_gate = asyncio.Event()
        pod.want(sleep=LEVEL_1)
        while "sleep 1" not in pod.engine.calls:
            await asyncio.sleep(0)
        pod.engine.hangs = True  # calls wait behind it
        await asyncio.sleep(0.3)
        pod.engine.hangs = False
        gate.set()
        await pod.until(sleeps())
        await asyncio.sleep(0.2)
        assert pod.supervisor.liveness_error() is None, "a sleeping engine is alive"
        pod.engine.hangs = True
        await ended(pod, "its loop hangs")


async def test_a_sleeping_pod_drains(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(sleep=LEVEL_1)
        await pod.until(sleeps())
        pod.engine.calls.clear()
        pod.supervisor.begin_drain()
        async with asyncio.timeout(2):
            await asyncio.shield(pod.task)
        assert pod.engine.calls == []


async def test_caches_are_cleared_on_request(tmp_path: Path) -> None:
    engine = FakeEngine(start_gate=asyncio.Event())
    async with running_pod(tmp_path, engine=engine) as pod:
        clear = pod.supervisor.clear_caches
        with pytest.raises(EngineNotUp):
            await clear(timeout_s=1)
        engine.start_gate.set()
        pod.want()
        await pod.serving("base")
        done = await clear(timeout_s=0)
        assert (done.cleared, done.attempts) == (("prefix", "multimodal", "encoder"), 1)
        engine.refuse_clear = 2
        first, second = await asyncio.gather(clear(timeout_s=5), clear(timeout_s=5))
        assert (first.attempts, second.attempts) == (3, 1)
        engine.refuse_clear = 99
        with pytest.raises(CachesInUse, match=r"prefix, multimodal, encoder .* pause first"):
            await clear(timeout_s=0.15)
        engine.refuse_clear = 0
        assert (await pod.ask(PROMPT, 3)).finish_reason == "length"
        pod.want(sleep=ONLY_KV)
        await pod.until(sleeps("kv_cache"))
        with pytest.raises(EngineAsleep):
            await clear(timeout_s=1)


async def test_caches_are_not_cleared_under_a_load(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.agent.send_gate = asyncio.Event()
        pod.want(ref("step-1"))
        await pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"))
        pod.engine.calls.clear()
        with pytest.raises(CachesInUse, match="loading weights"):
            await pod.supervisor.clear_caches(timeout_s=0.05)
        assert "clear" not in pod.engine.calls
        clearing = asyncio.create_task(pod.supervisor.clear_caches(timeout_s=5))
        pod.agent.send_gate.set()
        assert (await clearing).attempts >= 1

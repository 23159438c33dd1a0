"""The supervisor on the fakes: every step, twice, late, out of order, and with a death in it."""

import asyncio
import errno
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_pod.admission import Draining, DuplicateRequest, GateStayedClosed, NotReady
from rollout_pod.engine.base import EngineDeadError, EngineDelta, EngineError, EngineStartError
from rollout_pod.protocol import (
    DesiredDocument,
    GenerateRequest,
    StateDocument,
    UpdatePhase,
    WeightsRef,
    WeightsSource,
)
from rollout_pod.supervisor import staging
from rollout_pod.supervisor.caches import CachesInUse, EngineAsleep, EngineNotUp
from rollout_pod.supervisor.state import BASE
from rollout_pod.supervisor.store import Record, Store, StoreError
from rollout_pod.supervisor.supervisor import Fenced, PodFailed, PreconditionFailed
from tests.support.fakes import FakeAgent, FakeEngine, fake_tokens
from tests.support.pods import LONG, PROMPT, Pod, check_tokens, ref, running_pod, start_long


def fill_disk(
    monkeypatch: pytest.MonkeyPatch, *, room: int = 0, number: int = errno.ENOSPC
) -> None:
    """Let ``room`` more files be written, then none."""
    left = itertools.count(room, -1)
    real = tempfile.NamedTemporaryFile

    def opened(*args: Any, **more: Any) -> Any:
        file = real(*args, **more)
        if next(left) <= 0:
            file.write = full
        return file

    def full(_: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", opened)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_RETRY_BASE_S", 0.02)


async def test_a_fresh_pod_serves_base(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        with pytest.raises(NotReady):
            await pod.ask(PROMPT, 4)
        assert not pod.supervisor.is_ready
        pod.want()
        state = await pod.serving("base")
        assert state.ready
        answer = await pod.ask(PROMPT, 4)
        assert answer.token_ids == fake_tokens("base", PROMPT, 4)
        assert (answer.finish_reason, answer.is_cancel) == ("length", False)
        assert pod.agent.calls == []


async def test_pause_returns_every_partial_and_loses_no_token(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        tasks = await start_long(pod)
        pod.want(paused=True)
        state = await pod.until(lambda s: s.phase == "Paused")
        assert pod.supervisor.gate.unfinished == 0, "paused before every caller had its partial"
        partials = await asyncio.gather(*tasks)
        assert state.ready
        assert pod.engine.running == pod.supervisor.gate.unfinished == 0
        for i, partial in enumerate(partials):
            assert (partial.is_cancel, partial.cancel_reason) == (True, "paused")
            assert 0 < len(partial.token_ids) < LONG
            refused = await pod.ask([*PROMPT, i], LONG)
            assert (refused.token_ids, refused.cancel_reason) == ([], "refused")
        pod.want()
        await pod.serving("base")
        for i, partial in enumerate(partials):
            rest = await pod.ask(
                [*PROMPT, i], LONG, generated_token_ids=partial.token_ids, attempt=2
            )
            assert rest.attempt == 2
            whole = partial.token_ids + rest.token_ids
            assert whole == fake_tokens("base", [*PROMPT, i], LONG)


async def test_parked_requests_wait_for_the_gate(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(paused=True)
        await pod.until(lambda s: s.phase == "Paused")
        parked = asyncio.create_task(pod.ask(PROMPT, 4, on_pause="wait"))
        with pytest.raises(GateStayedClosed):
            await pod.ask(PROMPT, 4, on_pause="wait", timeout_s=0.05)
        assert not parked.done() and pod.supervisor.gate.parked == 1
        pod.want()
        assert (await parked).finish_reason == "length"
        assert pod.supervisor.gate.parked == 0


async def test_an_update_cuts_transfers_clears_commits_and_opens(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        tasks = await start_long(pod)
        pod.engine.calls.clear()
        pod.want(ref("step-1", step=1))
        state = await pod.serving("step-1")
        partials = await asyncio.gather(*tasks)
        assert {p.cancel_reason for p in partials} == {"updating"}
        assert pod.engine.calls == ["pause", "load step-1", "clear", "resume"]
        assert state.update is not None
        assert state.update.phase is UpdatePhase.COMMITTED
        assert state.update.seconds.paused is not None and state.update.seconds.paused > 0
        assert (state.update.bytes, state.update.transport) == (4096, "shared_memory")
        answer = await pod.ask(PROMPT, 3)
        assert [(s.version, s.step) for s in answer.weight_versions] == [("step-1", 1)]
        assert pod.engine.published == "step-1"
        assert pod.agent.calls[-1] == "committed step-1"


async def test_a_version_that_cannot_be_had_touches_nothing(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.stage_script["step-404"] = ["no such folder: /w/step-404"] * 3
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want()
        await pod.serving("base")
        pod.engine.calls.clear()
        pod.want(ref("step-404"))
        state = await pod.until(lambda s: bool(s.update and s.update.phase == "Waiting"))
        assert state.phase == "Serving" and state.ready and state.weight_version == "base"
        assert "no such folder" in state.update.message
        assert pod.engine.calls == []
        assert (await pod.ask(PROMPT, 3)).finish_reason == "length"
        retried = await pod.supervisor.board.wait_news(
            after=f"{state.boot_id}:{state.revision}", timeout_s=5
        )
        assert retried.update.phase is not UpdatePhase.PREFETCHING, "a retry is no news"
        await pod.serving("step-404")  # mended: it heals by itself


@pytest.mark.parametrize("ends", ["ok", "badly", "superseded"])
async def test_the_progress_of_a_fetch_is_a_figure_and_no_news(tmp_path: Path, ends: str) -> None:
    agent = FakeAgent(stage_gate=asyncio.Event())
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want()
        await pod.serving("base")
        if ends == "badly":
            agent.stage_script["step-1"] = ["gone"]
        pod.want(ref("step-1"))
        state = await pod.until(lambda s: bool(s.update and s.update.target == "step-1"))
        while not (progress := pod.state.update.progress) or not progress.bytes:
            await asyncio.sleep(0)
        assert (progress.bytes, progress.total) == (5, 10)
        assert pod.state.revision == state.revision
        assert pod.state.phase == "Serving"
        metrics = pod.supervisor.metrics.text().decode()
        assert "rollout_weight_fetch_bytes 5.0" in metrics
        assert "rollout_weight_fetch_total_bytes 10.0" in metrics
        if ends == "superseded":
            pod.want()
            await pod.until(lambda s: s.update.phase is UpdatePhase.SUPERSEDED)
        else:
            agent.stage_gate.set()
            phase = {"ok": UpdatePhase.COMMITTED, "badly": UpdatePhase.WAITING}[ends]
            await pod.until(lambda s: s.update.phase is phase)
        assert pod.state.update.progress is None
        assert "rollout_weight_fetch_total_bytes 0.0" in pod.supervisor.metrics.text().decode()


async def test_the_agent_gets_the_url(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        source = WeightsSource(url="s3://ckpt/step-1")
        pod.want(WeightsRef(version="step-1", source=source))
        state = await pod.serving("step-1")
        assert "stage step-1 s3://ckpt/step-1" in pod.agent.calls
        assert state.model_dump()["committed"]["source"] == {"url": "s3://ckpt/step-1"}
        assert DesiredDocument.model_validate_json(
            pod.supervisor.board.desired.model_dump_json()
        ).weights == WeightsRef(version="step-1", source=source)


async def test_a_failure_before_the_first_byte_poisons_nothing(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.send_script["step-1"] = ["untouched"]
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want()
        await pod.serving("base")
        pod.engine.calls.clear()
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        assert pod.engine.calls.count("load step-1") == 2
        assert "load step-1 flush" not in pod.engine.calls


async def test_a_failure_in_the_middle_poisons_until_a_complete_resend(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.send_script["step-1"] = ["midway"]
    agent.send_gate = asyncio.Event()
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(ref("step-1"))
        seen: list[StateDocument] = []

        async def watch() -> None:
            state = pod.state
            while state.weight_version != "step-1":
                seen.append(state)
                state = await pod.supervisor.board.wait_news(
                    after=f"{state.boot_id}:{state.revision}", timeout_s=5
                )

        watcher = asyncio.create_task(watch())
        await pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"))
        during = await pod.ask(PROMPT, 3)
        assert during.cancel_reason == "refused"
        agent.send_gate.set()
        await pod.serving("step-1")
        await asyncio.wait_for(watcher, 5)
        assert any(s.phase == "Poisoned" and not s.ready and s.gate == "closed" for s in seen)
        assert "load step-1 flush" in pod.engine.calls
        assert pod.engine.calls.count("resume") == 2  # base, then step-1: never in between
        assert (await pod.ask(PROMPT, 3)).finish_reason == "length"


async def test_a_version_that_fails_again_and_again_is_rejected(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.send_script["step-2"] = ["midway"] * 9
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        opened = pod.engine.calls.count("resume")
        pod.want(ref("step-2"))
        state = await pod.serving("step-1")
        state = await pod.until(lambda s: s.rejected == ref("step-2") and s.ready)
        assert pod.agent.calls.count("send step-2 midway") == 3
        assert pod.engine.calls.count("resume") == opened + 1, "the gate flapped"
        await asyncio.sleep(0.05)
        assert pod.agent.calls.count("send step-2 midway") == 3, "a rejected version was tried"
        assert (await pod.ask(PROMPT, 3)).weight_versions[0].version == "step-1"
    async with running_pod(tmp_path, agent=FakeAgent()) as pod:  # the container restarted
        state = await pod.serving("step-1")
        assert state.rejected == ref("step-2")
        pod.agent.send_script["step-2"] = ["ok"]
        pod.want(ref("step-2", path="/mended/step-2"))
        await pod.serving("step-2")
        assert pod.state.rejected is None


@pytest.mark.parametrize("how", ["midway", "untouched"])
async def test_base_is_rejected_as_any_other(tmp_path: Path, how: str) -> None:
    agent = FakeAgent()
    agent.send_script["base"] = [how] * 9
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        opened = pod.engine.calls.count("resume")
        pod.want()
        state = await pod.until(lambda s: s.rejected is not None and s.phase == "Serving")
        assert state.rejected == BASE
        assert (await pod.ask(PROMPT, 3)).weight_versions[0].version == "step-1"
        await asyncio.sleep(0.05)
        assert agent.calls.count(f"send base {how}") == 3
        assert pod.engine.calls.count("resume") <= opened + 3
        pod.want(ref("step-2"))
        await pod.serving("step-2")


async def test_a_fallback_that_fails_ends_the_process(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.send_script["step-2"] = ["midway"] * 9
    agent.send_script["step-1"] = ["ok"] + ["midway"] * 9
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        pod.want(ref("step-2"))
        with pytest.raises(PodFailed, match="step-1 failed 3 times"):
            await asyncio.wait_for(asyncio.shield(pod.task), 10)
    async with running_pod(tmp_path, agent=FakeAgent()) as pod:
        state = await pod.serving("step-1")
        assert state.rejected == ref("step-2")


async def test_a_version_is_never_given_up_with_nothing_else_to_serve(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.send_script["step-1"] = ["midway"] * 4
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want(ref("step-1"))
        with pytest.raises(PodFailed, match="step-1 failed 3 times"):
            await asyncio.wait_for(asyncio.shield(pod.task), 10)
    async with running_pod(tmp_path, agent=agent) as pod:  # fails once more
        with pytest.raises(PodFailed, match="step-1 failed 4 times"):
            await asyncio.wait_for(asyncio.shield(pod.task), 10)
    async with running_pod(tmp_path, agent=agent) as pod:
        await pod.serving("step-1")
        assert pod.state.rejected is None


async def test_the_pods_own_record_is_its_fallback(tmp_path: Path) -> None:
    agent = FakeAgent()
    agent.stage_script["step-404"] = ["no such folder"] * 99
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        pod.want(ref("step-404"))
        await pod.until(lambda s: bool(s.update and s.update.phase == "Waiting"))
    async with running_pod(tmp_path, agent=agent) as pod:
        await pod.serving("step-1")


async def test_a_rank_that_does_not_report_is_a_failure(tmp_path: Path) -> None:
    async with running_pod(tmp_path, engine=FakeEngine(world=2)) as pod:
        pod.want()
        await pod.serving("base")
        pod.engine.silent_ranks = {1}
        pod.want(ref("step-1"))
        await pod.until(lambda s: s.phase == "Poisoned")
        assert "1 of 2 ranks reported" in (pod.state.last_error or "")
        pod.engine.silent_ranks = set()
        await pod.serving("step-1")


async def test_a_wish_that_is_taken_back_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        pod.agent.stage_gate = asyncio.Event()
        pod.want(ref("step-2"))
        await pod.until(lambda s: bool(s.update and s.update.phase == "Prefetching"))
        pod.want(ref("step-1"))
        state = await pod.until(lambda s: bool(s.update and s.update.phase == "Superseded"))
        assert (state.update.target, state.phase) == ("step-2", "Serving")
        assert set(pod.agent.staged.values()) <= {"step-1"}
        pod.want(ref("step-1", path="/moved/step-1", step=9))
        state = await pod.until(lambda s: s.weight_step == 9)
        assert state.committed.source.path == "/w/step-1", "bytes that nobody read were adopted"


@pytest.mark.parametrize("call", ["pause", "resume", "publish_version"])
async def test_an_engine_that_cannot_be_steered_ends_the_process(tmp_path: Path, call: str) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")

        async def fails(*_: object, **__: object) -> None:
            raise EngineError("not today")

        setattr(pod.engine, call, fails)
        pod.want(ref("step-1"))
        with pytest.raises(PodFailed, match="not today"):
            await asyncio.wait_for(asyncio.shield(pod.task), 5)


async def test_an_agent_that_does_not_listen_keeps_no_poisoned_pod_ready(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        told = asyncio.Event()
        discard = pod.agent.discard

        async def deaf(*, session: str) -> None:
            await told.wait()
            await discard(session=session)

        pod.agent.discard = deaf
        pod.agent.send_script["step-1"] = ["midway"]
        pod.want(ref("step-1"))
        state = await pod.until(lambda s: s.phase == "Poisoned")
        assert not told.is_set() and not state.ready
        told.set()
        await pod.serving("step-1")


async def test_a_cancelled_start_leaves_no_task_behind(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with running_pod(tmp_path, engine=FakeEngine(start_gate=asyncio.Event())):
        await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == before


async def test_whatever_the_agents_client_raises_is_a_failed_update(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        send, failures = pod.agent.send, iter([OSError("socket gone")])

        async def flaky(*, session: str, timeout_s: float) -> object:
            pod.agent._outcome(session).set_result("midway")
            error = next(failures, None)
            if error is None:
                pod.agent._outcomes.pop(session)
                pod.agent.send = send
                return await send(session=session, timeout_s=timeout_s)
            raise error

        pod.agent.send = flaky
        pod.want(ref("step-1"))
        await pod.until(lambda s: "socket gone" in (s.last_error or ""))
        pod.agent.send = send
        await pod.serving("step-1")


async def test_a_caller_that_disconnects_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        left = asyncio.Event()
        request = GenerateRequest.model_validate(
            {"request_id": "r", "prompt_token_ids": PROMPT, "sampling_params": {"max_tokens": LONG}}
        )

        async def gone() -> None:
            await left.wait()

        task = asyncio.create_task(pod.generation.generate(request, gone=gone))
        while not pod.engine.running:
            await asyncio.sleep(0)
        left.set()
        answer = await asyncio.wait_for(task, 5)
        assert answer.cancel_reason == "cancelled" and len(answer.token_ids) < LONG
        assert pod.engine.running == pod.supervisor.gate.unfinished == 0


async def test_two_quick_wishes_end_in_the_newest(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.agent.stage_gate = asyncio.Event()
        pod.want(ref("step-1"))
        await pod.until(lambda s: bool(s.update and s.update.phase == "Prefetching"))
        pod.want(ref("step-2"))
        pod.agent.stage_gate.set()
        await pod.serving("step-2")
        assert "load step-1" not in pod.engine.calls


async def test_a_wish_in_the_middle_of_a_transfer_comes_next(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.agent.send_gate = asyncio.Event()
        pod.want(ref("step-1"))
        await pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"))
        pod.want(ref("step-2"))
        pod.want(ref("step-2"), paused=True)
        pod.agent.send_gate.set()
        state = await pod.until(lambda s: s.weight_version == "step-2" and s.phase == "Paused")
        assert state.gate == "closed"


async def test_documents_are_fenced(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        late = DesiredDocument(owner="o", generation=0, paused=True)
        state = await pod.serving("base")
        with pytest.raises(Fenced, match="generation 0 is older than 1"):
            pod.supervisor.put_desired(late)
        with pytest.raises(Fenced, match="owned by o, not by other"):
            pod.supervisor.put_desired(DesiredDocument(owner="other", generation=9))
        with pytest.raises(PreconditionFailed):
            pod.supervisor.put_desired(
                DesiredDocument(owner="o", generation=2), if_match=f"{state.boot_id}:0"
            )
        twice = pod.supervisor.put_desired(DesiredDocument(owner="o", generation=1))
        assert twice.revision == state.revision, "an equal document is a no-op"
        pod.supervisor.put_desired(DesiredDocument(owner="o", generation=1, paused=True))
        await pod.until(lambda s: s.phase == "Paused")


async def test_a_restarted_container_goes_on_by_itself(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
    async with running_pod(tmp_path) as pod:
        assert not pod.state.ready
        with pytest.raises(NotReady):
            await pod.ask(PROMPT, 3)
        await pod.serving("step-1")


async def test_killed_between_cancel_and_commit_the_update_completes(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        pod.agent.send_gate = asyncio.Event()
        pod.want(ref("step-2"))
        await pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"))
    async with running_pod(tmp_path) as pod:
        await pod.serving("step-2")


async def test_an_engine_that_does_not_start_ends_the_process(tmp_path: Path) -> None:
    engine = FakeEngine(start_error=EngineStartError("ValueError: no such model"))
    async with running_pod(tmp_path, engine=engine) as pod:
        with pytest.raises(PodFailed, match="no such model"):
            await asyncio.wait_for(asyncio.shield(pod.task), 5)
        assert pod.supervisor.liveness_error() == "ValueError: no such model"


@pytest.mark.parametrize("when", ["serving", "transfer"])
async def test_a_dead_engine_ends_the_process(tmp_path: Path, when: str) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        if when == "serving":
            tasks = await start_long(pod, 2)
            pod.engine.kill("segmentation fault")
            for task in tasks:
                with pytest.raises(EngineDeadError):
                    await task
        else:
            pod.agent.send_script["step-1"] = ["dies"]
            pod.want(ref("step-1"))
        cause = "segmentation fault" if when == "serving" else "died in a load"
        with pytest.raises(PodFailed, match=cause):
            await asyncio.wait_for(asyncio.shield(pod.task), 5)
        assert not pod.state.ready and pod.state.phase == "Failed"


async def test_a_full_run_folder_ends_the_process_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(ref("step-1"))
        fill_disk(monkeypatch)
        cause = f"run folder {tmp_path}: No space left on device; .*ephemeral-storage"
        with pytest.raises(PodFailed, match=cause):
            await asyncio.wait_for(asyncio.shield(pod.task), 5)
        assert not pod.state.ready and pod.state.phase == "Failed"
        monkeypatch.undo()
    async with running_pod(tmp_path) as pod:  # there is room again
        await pod.serving("step-1")


@pytest.mark.parametrize("room", [0, 1], ids=["document", "record"])
async def test_a_document_that_cannot_be_kept_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    agent = FakeAgent()
    agent.send_script["step-2"] = ["midway"] * 3
    async with running_pod(tmp_path, agent=agent) as pod:
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        pod.want(ref("step-2"))
        await pod.until(lambda s: s.rejected is not None and s.phase == "Serving")
        before = (pod.supervisor.board.desired, pod.supervisor.board.state)
        files = contents(tmp_path)
        with monkeypatch.context() as full:
            fill_disk(full, room=room)
            with pytest.raises(StoreError):
                pod.want(ref("step-3"))
        assert (pod.supervisor.board.desired, pod.supervisor.board.state) == before
        assert contents(tmp_path) == files
        await asyncio.sleep(0.05)
        assert (await pod.ask(PROMPT, 3)).weight_versions[0].version == "step-1"
        pod.want(ref("step-3"))
        await pod.serving("step-3")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free space"), (errno.EDQUOT, "free space"), (errno.EROFS, "may write")],
)
def test_a_store_that_cannot_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    store = Store(tmp_path)
    store.write_record(Record(last_committed=ref("step-1")))
    fill_disk(monkeypatch, number=number)
    with pytest.raises(
        StoreError, match=f"^run folder {tmp_path}: {os.strerror(number)}; "
    ) as told:
        store.write_record(Record(last_committed=ref("step-2")))
    assert remedy in str(told.value)
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    assert store.read_record().last_committed == ref("step-1")


async def test_an_engine_that_does_not_let_go_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_pod.gate._PAUSE_S", 0.05)
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.engine.pause_hangs = True
        pod.want(paused=True, interruption={"timeout_s": 0.05})
        with pytest.raises(PodFailed, match="did not pause within"):
            await asyncio.wait_for(asyncio.shield(pod.task), 5)


async def test_a_hung_engine_ends_the_process(tmp_path: Path) -> None:
    async with running_pod(tmp_path, heartbeat_s=0.02, heartbeat_timeout_s=0.05) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(paused=True)
        await pod.until(lambda s: s.phase == "Paused")
        await asyncio.sleep(0.2)
        assert pod.supervisor.liveness_error() is None, "a paused engine is alive"
        pod.engine.hangs = True
        with pytest.raises(PodFailed, match="its loop hangs"):
            await asyncio.wait_for(asyncio.shield(pod.task), 5)
        assert pod.supervisor.liveness_error() is not None


async def test_a_faulted_device_ends_the_process_before_a_request_meets_it(tmp_path: Path) -> None:
    async with running_pod(tmp_path, heartbeat_s=0.02, heartbeat_timeout_s=0.05) as pod:
        pod.want(paused=True)
        await pod.until(lambda s: s.phase == "Paused")
        pod.engine.fault = "a device has faulted: rank 0: CUDA error"
        with pytest.raises(PodFailed, match="CUDA error"):
            await asyncio.wait_for(asyncio.shield(pod.task), 5)
        assert pod.supervisor.liveness_error() == pod.engine.fault


async def test_an_engine_that_hangs_in_a_load_may_not_be_the_versions_fault(tmp_path: Path) -> None:
    """The next engine loads the version."""
    await _hang_twice(tmp_path)
    async with running_pod(tmp_path) as pod:
        await pod.serving("step-1")


async def test_a_version_that_every_engine_hangs_in_is_rejected(tmp_path: Path) -> None:
    await _hang_twice(tmp_path)
    async with running_pod(tmp_path, engine=FakeEngine(load_hangs=True)) as pod:
        await _no_report(pod, UpdatePhase.REJECTED)
        assert pod.state.rejected == ref("step-1")
    async with running_pod(tmp_path, engine=FakeEngine(load_hangs=True)) as pod:
        state = await pod.serving("base")
        assert state.rejected == ref("step-1")
        assert "no report of the load" in (state.rejected_message or "")


async def _hang_twice(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        pod.want(ref("step-1"))
        pod.engine.load_hangs = True
        await _no_report(pod)
        assert pod.state.rejected is None
    async with running_pod(tmp_path, engine=FakeEngine(load_hangs=True)) as pod:
        await _no_report(pod)
        assert pod.state.rejected is None


async def test_an_engine_that_never_reports_a_load_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_pod.supervisor.transfer._REPORT_S", 0.05)

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        monkeypatch.setattr(pod.engine, "load_weights", never)
        pod.want(ref("step-1"), update_timeout_s=0.1)
        with pytest.raises(PodFailed, match="no report of the load of step-1: time is over"):
            await asyncio.wait_for(asyncio.shield(pod.task), 5)
        assert pod.state.rejected is None


async def _no_report(pod: Pod, phase: UpdatePhase = UpdatePhase.FAILED) -> None:
    with pytest.raises(PodFailed, match=r"no report of the load of step-1: .* within"):
        await asyncio.wait_for(asyncio.shield(pod.task), 5)
    assert pod.state.update and pod.state.update.phase is phase


async def test_a_load_is_no_hang(tmp_path: Path) -> None:
    async with running_pod(tmp_path, heartbeat_s=0.02, heartbeat_timeout_s=0.05) as pod:
        pod.want()
        await pod.serving("base")
        pod.agent.send_gate = asyncio.Event()
        pod.want(ref("step-1"))
        await pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"))
        pod.engine.hangs = True  # calls wait behind the load
        await asyncio.sleep(0.3)
        pod.engine.hangs = False
        pod.agent.send_gate.set()
        await pod.serving("step-1")


async def test_a_cache_that_is_not_cleared_is_no_commit(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running_pod(tmp_path, engine=engine) as pod:
        pod.want()
        await pod.serving("base")
        await pod.ask(PROMPT, 2)
        engine.refuse_clear = 3
        pod.want(ref("step-1"))
        await pod.serving("step-1")
        assert (await pod.ask(PROMPT, 2)).finish_reason == "length"
        assert engine.calls.count("clear") == 4


async def test_drain_lets_requests_end_then_cuts_them(tmp_path: Path) -> None:
    async with running_pod(tmp_path, drain_timeout_s=0.2) as pod:
        pod.engine.step_s = 0.001
        pod.want()
        await pod.serving("base")
        short = asyncio.create_task(pod.ask([9], 20))
        long = asyncio.create_task(pod.ask(PROMPT, LONG))
        while pod.engine.running < 2:
            await asyncio.sleep(0)
        pod.supervisor.begin_drain()
        assert not pod.state.ready
        with pytest.raises(Draining):
            await pod.ask([8], 3)
        await asyncio.wait_for(asyncio.shield(pod.task), 5)
        assert (await short).finish_reason == "length"
        cut = await long
        assert (cut.is_cancel, cut.cancel_reason) == (True, "draining") and cut.token_ids


async def test_drain_while_the_engine_starts(tmp_path: Path) -> None:
    engine = FakeEngine(start_gate=asyncio.Event())
    async with running_pod(tmp_path, engine=engine) as pod:
        await asyncio.sleep(0.01)
        pod.supervisor.begin_drain()
        await asyncio.wait_for(asyncio.shield(pod.task), 5)


async def test_duplicate_ids_and_a_caller_that_goes(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        first = asyncio.create_task(pod.ask(PROMPT, LONG, request_id="same"))
        while not pod.engine.running:
            await asyncio.sleep(0)
        with pytest.raises(DuplicateRequest):
            await pod.ask(PROMPT, 3, request_id="same")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert pod.engine.running == pod.supervisor.gate.unfinished == 0
        assert (await pod.ask(PROMPT, 3, request_id="same")).finish_reason == "length"


async def test_keep_goes_on_under_the_new_weights_and_tells_which(tmp_path: Path) -> None:
    keep = {"mode": "keep"}
    async with running_pod(tmp_path) as pod:
        pod.want(interruption=keep)
        await pod.serving("base")
        tasks = await start_long(pod)
        pod.want(interruption=keep, paused=True)
        state = await pod.until(lambda s: s.phase == "Paused")
        assert pod.engine.running == 4 and not any(task.done() for task in tasks)
        assert state.ready
        assert (await pod.ask([7], 3)).cancel_reason == "refused"
        pod.want(ref("step-1"), interruption=keep, paused=True)
        await pod.until(lambda s: s.phase == "Paused" and s.weight_version == "step-1")
        assert pod.engine.running == 4
        pod.want(ref("step-1"), interruption=keep)
        for answer in await asyncio.gather(*tasks):  # each token is checked against its span
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", LONG)
            assert [s.version for s in answer.weight_versions] == ["base", "step-1"]


async def test_kept_requests_are_cut_when_the_update_poisons(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(interruption={"mode": "keep"})
        await pod.serving("base")
        tasks = await start_long(pod)
        pod.agent.send_script["step-1"] = ["midway"]
        pod.want(ref("step-1"), interruption={"mode": "keep"})
        await pod.serving("step-1")
        for answer in await asyncio.gather(*tasks):
            assert (answer.is_cancel, answer.cancel_reason) == (True, "updating")
            assert [s.version for s in answer.weight_versions] == ["base"]


async def test_what_was_admitted_before_keep_is_cut_by_an_update(tmp_path: Path) -> None:
    """But for what streams: its tokens are told as they come, so it is known whose they are."""
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        tasks = await start_long(pod)
        streamed: list[EngineDelta] = []
        body = {
            "request_id": "s",
            "prompt_token_ids": PROMPT,
            "sampling_params": {"max_tokens": LONG},
        }
        streaming = asyncio.create_task(
            pod.generation.generate(
                GenerateRequest.model_validate(body),
                on_delta=lambda delta, _: streamed.append(delta),
            )
        )
        while not streamed:
            await asyncio.sleep(0)
        pod.want(ref("step-1"), interruption={"mode": "keep"})
        await pod.serving("step-1")
        for answer in await asyncio.gather(*tasks):
            assert (answer.is_cancel, answer.cancel_reason) == (True, "updating")
        kept = await streaming
        check_tokens(PROMPT, kept)
        assert (kept.finish_reason, len(kept.token_ids)) == ("length", LONG)
        assert [span.version for span in kept.weight_versions] == ["base", "step-1"]


async def test_kept_requests_are_cut_by_another_mode_and_by_a_drain(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(interruption={"mode": "keep"})
        await pod.serving("base")
        tasks = await start_long(pod, 2)
        pod.want(interruption={"mode": "keep"}, paused=True)
        await pod.until(lambda s: s.phase == "Paused")
        pod.want(paused=True)
        assert {a.cancel_reason for a in await asyncio.gather(*tasks)} == {"paused"}
        pod.want(interruption={"mode": "keep"})
        await pod.serving("base")
        tasks = await start_long(pod, 2)
        pod.want(interruption={"mode": "keep"}, paused=True)
        await pod.until(lambda s: s.phase == "Paused")
        pod.supervisor.begin_drain()
        await asyncio.wait_for(asyncio.shield(pod.task), 2)
        assert {a.cancel_reason for a in await asyncio.gather(*tasks)} == {"draining"}


@pytest.mark.parametrize(("seconds", "reason"), [(5.0, None), (0.05, "paused")])
async def test_drain_mode_lets_requests_end_by_a_deadline(
    tmp_path: Path, seconds: float, reason: str | None
) -> None:
    async with running_pod(tmp_path) as pod:
        pod.engine.step_s = 0.001
        pod.want()
        await pod.serving("base")
        task = asyncio.create_task(pod.ask(PROMPT, 200))
        while not pod.engine.running:
            await asyncio.sleep(0)
        pod.want(paused=True, interruption={"mode": "drain", "timeout_s": seconds})
        await pod.until(lambda s: s.phase == "Paused")
        answer = await task
        assert answer.cancel_reason == reason
        assert (len(answer.token_ids) == 200) == (reason is None)


DRAINS = {"interruption": {"mode": "drain", "timeout_s": 3600.0}}
INTERRUPTIONS = {
    "paused": {"paused": True},
    "updating": {"weights": ref("step-1")},
    "sleeping": {"sleep": {"level": 1}},
}


async def start_drain(pod: Pod, reason: str) -> asyncio.Task:
    """A rollout without an end, and a pause, update or sleep that waits for it."""
    pod.engine.step_s = 0.005
    pod.want(**DRAINS)
    await pod.serving("base")
    task = asyncio.create_task(pod.ask(PROMPT, LONG))
    while not pod.engine.running:
        await asyncio.sleep(0)
    pod.want(**INTERRUPTIONS[reason], **DRAINS)
    await pod.until(lambda s: s.gate == "closed")
    await asyncio.sleep(0.02)  # into the wait
    return task


@pytest.mark.parametrize("reason", INTERRUPTIONS)
async def test_a_drain_ends_early_for_who_resumes_aborts_or_stops(
    tmp_path: Path, reason: str
) -> None:
    async with running_pod(tmp_path, drain_timeout_s=0.05) as pod:
        task = await start_drain(pod, reason)
        pod.want(**DRAINS)
        await pod.serving("base")
        assert not task.done() and pod.engine.running == 1, "a resume cut it"
        pod.want(paused=True)
        assert (await task).cancel_reason == "paused"
        task = await start_drain(pod, reason)
        pod.want(**INTERRUPTIONS[reason])  # the mode is abort
        assert (await task).cancel_reason == reason
        pod.want()
        await pod.serving("base")
        task = await start_drain(pod, reason)
        pod.supervisor.begin_drain()
        async with asyncio.timeout(5):
            await asyncio.shield(pod.task)
        assert (await task).cancel_reason == "draining"
        assert len((await task).token_ids) < LONG


async def test_a_drain_keeps_its_deadline_whatever_comes(tmp_path: Path) -> None:
    async with running_pod(tmp_path) as pod:
        task = await start_drain(pod, "paused")
        while not task.done():  # each of them wakes it before its time is over
            pod.want(paused=True, interruption={"mode": "drain", "timeout_s": 0.3})
            await asyncio.sleep(0.01)
        assert (await task).cancel_reason == "paused"
        await pod.until(lambda s: s.phase == "Paused")


async def test_the_end_of_a_pod_prolongs_no_drain(tmp_path: Path) -> None:
    async with running_pod(tmp_path, drain_timeout_s=3600.0) as pod:
        task = await start_drain(pod, "paused")
        pod.want(paused=True, interruption={"mode": "drain", "timeout_s": 0.2})
        pod.supervisor.begin_drain()
        assert (await task).cancel_reason == "draining"
        assert len((await task).token_ids) < LONG


@pytest.mark.parametrize("wish", ["the same", "paused", "sleep", "drain", "dead"])
async def test_what_comes_while_the_engine_resumes_is_obeyed(tmp_path: Path, wish: str) -> None:
    async with running_pod(tmp_path) as pod:
        pod.want(paused=True)
        await pod.until(lambda s: s.phase == "Paused")
        resume, opened = pod.engine.resume, pod.supervisor.gate.open
        generations: list[int] = []

        def note(weights: WeightsRef, generation: int) -> None:
            generations.append(generation)
            opened(weights, generation)

        async def slow() -> None:
            pod.engine.resume = resume
            if wish == "drain":
                pod.supervisor.begin_drain()
            elif wish == "dead":
                pod.supervisor._hung("its loop hangs")
            else:
                more = {"paused": {"paused": True}, "sleep": {"sleep": {"level": 1}}}
                pod.want(**more.get(wish, {}))
            await resume()

        pod.supervisor.gate.open, pod.engine.resume = note, slow
        pod.want()
        if wish == "the same":
            await pod.serving("base")
            assert generations == [(await pod.ask(PROMPT, 2)).generation] == [3]
            return
        if wish in ("paused", "sleep"):
            while "resume" not in pod.engine.calls[:-1]:  # and then something more
                await asyncio.sleep(0)
            phase = {"paused": "Paused", "sleep": "Sleeping"}[wish]
            await pod.until(lambda s: s.phase == phase)
            assert pod.engine.paused
        else:
            await asyncio.wait({pod.task}, timeout=5)
            assert (
                pod.task.done() and pod.state.phase == {"drain": "Draining", "dead": "Failed"}[wish]
            )
        assert generations == []


SLEEPS = (None, {"level": 1}, {"level": 2}, {"level": 2, "tags": ["kv_cache"]})
WISHES = st.lists(
    st.tuples(
        st.sampled_from(
            ["want", "pause", "unpause", "ask", "late", "twice", "mode", "sleep", "clear"]
        ),
        st.integers(0, 3),
    ),
    max_size=25,
)
SCRIPTS = st.lists(st.sampled_from(["ok", "untouched", "midway"]), max_size=3)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ops=WISHES, sends=SCRIPTS, stages=st.lists(st.booleans(), max_size=2))
def test_whatever_comes_no_mix_is_served_and_the_newest_wish_wins(
    tmp_path_factory: pytest.TempPathFactory, ops: list, sends: list, stages: list
) -> None:
    """Every answer's tokens are checked against its version by ``Pod.ask``."""

    async def run() -> None:
        agent = FakeAgent()
        agent.send_script["step-1"] = list(sends)
        agent.stage_script["step-2"] = ["nothing there" for fails in stages if fails]
        async with running_pod(tmp_path_factory.mktemp("pod"), agent=agent) as pod:
            weights, paused, mode, sleep = None, False, "abort", None
            last = pod.want()
            tasks: list[asyncio.Task] = []
            for op, n in ops:
                if op == "want":
                    weights = ref(f"step-{n}") if n else None
                elif op in ("pause", "unpause"):
                    paused = op == "pause"
                elif op == "mode":
                    mode = ("abort", "keep", "drain", "keep")[n]
                elif op == "sleep":
                    sleep = SLEEPS[n]
                elif op == "clear":
                    clearing = pod.supervisor.clear_caches(timeout_s=0)
                    tasks.append(asyncio.create_task(clearing))
                if op in ("want", "pause", "unpause", "mode", "sleep"):
                    last = pod.want(
                        weights, paused=paused, max_attempts=4, interruption={"mode": mode},
                        sleep=sleep,
                    )  # fmt: skip
                elif op == "ask":
                    on_pause = "wait" if n == 3 else "return"
                    tasks.append(asyncio.create_task(pod.ask([n], 30 * n + 1, on_pause=on_pause)))
                elif op == "twice":
                    pod.supervisor.put_desired(last)
                elif op == "late" and last.generation > 1:
                    with pytest.raises(Fenced):
                        pod.supervisor.put_desired(
                            last.model_copy(update={"generation": last.generation - 1})
                        )
                for _ in range(n * 7):
                    await asyncio.sleep(0)
            pod.want(weights, max_attempts=4)
            version = weights.version if weights else "base"
            await pod.serving(version)
            for answer in await asyncio.gather(*tasks, return_exceptions=True):
                assert not isinstance(answer, AssertionError), answer
                assert not isinstance(answer, BaseException) or isinstance(
                    answer, (NotReady, CachesInUse, EngineAsleep, EngineNotUp)
                ), answer
            assert (await pod.ask([5], 5)).weight_versions[0].version == version
            assert pod.engine.running == pod.supervisor.gate.unfinished == 0

    asyncio.run(run())

"""Several front ends behind one gate: cut together, counted together, and none forgotten."""

import asyncio
import time

import pytest

from rollout_pod.admission import CancelTimeout, DuplicateRequest, NotReady
from rollout_pod.engine.base import EngineDeadError
from rollout_pod.front_ends.channel import CallFailed, ChannelClosed
from rollout_pod.front_ends.merge import merge_metrics
from rollout_pod.front_ends.settings import split_count
from rollout_pod.front_ends.shared_gate import SharedGate
from rollout_pod.protocol import CancelReason, GenerateRequest, InterruptionMode, WeightsRef
from tests.support.fakes import FakeEngine
from tests.support.front_ends import Attached, channel_pair, front_ends_of

BASE = WeightsRef(version="base")


class Pod:
    def __init__(self, count: int = 3) -> None:
        self.engine = FakeEngine()
        self.gate = SharedGate(self.engine)
        self.members: list[Attached] = front_ends_of(self.gate, self.engine, count)

    async def __aenter__(self) -> "Pod":
        await self.engine.start()
        self.gate.open(BASE, 1)
        await self.gate.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            await member.end()

    def ask(self, at: int, name: str, **more: object) -> asyncio.Task:
        request = GenerateRequest.model_validate(
            {
                "request_id": name,
                "prompt_token_ids": [1, 2],
                "sampling_params": {"max_tokens": 5000},
            }
            | more
        )
        return asyncio.create_task(self.members[at].generation.generate(request))

    async def until(self, unfinished: int) -> None:
        deadline = time.monotonic() + 5
        while sum(m.front_end.gate.unfinished for m in self.members) != unfinished:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)


class TestTheSharedGate:
    async def test_all_are_cut_by_one_pause_and_told_why(self) -> None:
        async with Pod() as pod:
            pod.engine.step_s = 0.001
            asked = [pod.ask(i % 3, f"r{i}") for i in range(9)]
            await pod.until(9)
            before = pod.engine.calls.count("pause")
            pod.gate.close(CancelReason.UPDATING)
            counts = await pod.gate.cancel(timeout_s=5)
            answers = await asyncio.gather(*asked)
            assert counts is not None
            assert counts.aborted == 9
            assert pod.engine.calls.count("pause") == before + 1
            assert {answer.cancel_reason for answer in answers} == {CancelReason.UPDATING}
            assert counts.tokens_returned == sum(len(answer.token_ids) for answer in answers)
            assert pod.gate.unfinished == 0

    async def test_nothing_passes_after_a_cancel_and_all_pass_after_an_open(self) -> None:
        async with Pod() as pod:
            pod.gate.close(CancelReason.PAUSED)
            await pod.gate.cancel(timeout_s=5)
            refused = await asyncio.gather(*(pod.ask(i, f"r{i}") for i in range(3)))
            assert {answer.cancel_reason for answer in refused} == {CancelReason.REFUSED}
            assert not pod.engine.requests
            parked = [pod.ask(i, f"p{i}", on_pause="wait") for i in range(3)]
            await asyncio.sleep(0.1)
            assert pod.gate.parked == 3
            other = WeightsRef.model_validate(
                {"version": "v2", "step": 2, "source": {"path": "/x"}}
            )
            await pod.engine.resume()
            pod.gate.open(other, 2)
            answers = await asyncio.gather(*parked)
            assert {a.weight_versions[0].version for a in answers} == {"v2"}
            assert {a.generation for a in answers} == {2}

    async def test_a_drain_that_is_woken_cuts_nobody(self) -> None:
        async with Pod() as pod:
            pod.engine.step_s = 0.001
            asked = pod.ask(0, "long")  # the others are idle: they must not pause the engine
            await pod.until(1)
            woken = asyncio.Event()
            pod.gate.close(CancelReason.PAUSED)
            drain = asyncio.create_task(
                pod.gate.cancel(timeout_s=60, mode=InterruptionMode.DRAIN, woken=woken)
            )
            await asyncio.sleep(0.05)
            woken.set()
            assert await drain is None
            assert "pause" not in pod.engine.calls
            counts = await pod.gate.cancel(timeout_s=0, mode=InterruptionMode.DRAIN)
            assert counts is not None
            assert counts.aborted == 1
            assert (await asked).cancel_reason is CancelReason.PAUSED

    async def test_kept_requests_go_on_under_the_name_that_was_told_before_the_resume(self) -> None:
        async with Pod() as pod:
            pod.gate.keeps = True
            await pod.gate.settle()
            pod.engine.step_s = 0.001
            asked = [pod.ask(i, f"r{i}") for i in range(3)]
            await pod.until(3)
            pod.gate.close(CancelReason.UPDATING)
            counts = await pod.gate.cancel(timeout_s=5, mode=InterruptionMode.KEEP)
            assert counts is not None
            assert counts.kept == 3
            pod.gate.weights = WeightsRef.model_validate(
                {"version": "v2", "source": {"path": "/x"}}
            )
            await pod.gate.settle()
            await pod.engine.resume()
            await asyncio.sleep(0.05)
            pod.gate.close(CancelReason.PAUSED)
            await pod.gate.cancel(timeout_s=5)
            for answer in await asyncio.gather(*asked):
                assert [span.version for span in answer.weight_versions] == ["base", "v2"]

    async def test_a_front_end_that_is_gone_fails_the_cancel_and_keeps_no_other_waiting(
        self,
    ) -> None:
        async with Pod() as pod:
            pod.engine.step_s = 0.001
            asked = [pod.ask(i, f"r{i}") for i in range(3)]
            await pod.until(3)
            pod.gate.close(CancelReason.UPDATING)
            pod.members[1].die()
            with pytest.raises(CancelTimeout, match="front end 2 is gone"):
                await pod.gate.cancel(timeout_s=5)
            assert (await asked[0]).is_cancel
            assert (await asked[2]).is_cancel

    async def test_one_that_goes_in_the_middle_of_the_cancel_does_not_hold_the_pause(self) -> None:
        async with Pod() as pod:
            pod.engine.pause_hangs = True
            pod.gate.close(CancelReason.UPDATING)
            cancel = asyncio.create_task(pod.gate.cancel(timeout_s=0.2))
            await asyncio.sleep(0.05)
            pod.members[0].die()
            with pytest.raises(CancelTimeout):
                await cancel

    async def test_before_any_has_joined_there_is_nothing_to_cut(self) -> None:
        gate = SharedGate(FakeEngine())
        gate.close(CancelReason.PAUSED)
        counts = await gate.cancel(timeout_s=1)
        assert counts is not None
        assert (counts.aborted, counts.kept) == (0, 0)
        assert await gate.wait_idle(timeout_s=0)

    async def test_an_engine_that_cannot_pause_fails_the_cancel(self) -> None:
        async with Pod() as pod:
            pod.engine.dead = "it died"
            pod.gate.close(CancelReason.UPDATING)
            with pytest.raises(CancelTimeout, match="it died"):
                await pod.gate.cancel(timeout_s=5)

    async def test_who_joins_late_is_told_what_is_in_force(self) -> None:
        async with Pod() as pod:
            pod.gate.close(CancelReason.PAUSED)
            late = Attached(pod.gate, pod.engine, 9)
            pod.members.append(late)
            await pod.gate.settle()
            assert late.front_end.gate.weights == BASE
            assert late.front_end.gate.closed_for is CancelReason.PAUSED
            pod.gate.unpublish()
            await pod.gate.settle()
            with pytest.raises(NotReady):
                await pod.ask(3, "r")

    async def test_one_that_is_not_attached_yet_is_not_ready_whatever_it_was_told(self) -> None:
        async with Pod() as pod:
            pod.gate.close(CancelReason.PAUSED)
            late = Attached(pod.gate, pod.engine, 9, is_attached=False)
            pod.members.append(late)
            other = WeightsRef(version="base", step=2)
            pod.gate.weights = other
            with pytest.raises(NotReady):
                await pod.ask(3, "r", on_pause="wait")
            pod.gate.open(other, 7)
            await asyncio.sleep(0.01)
            with pytest.raises(NotReady):
                await pod.ask(3, "r", on_pause="wait")
            late.front_end.take_requests()
            answer = await pod.ask(3, "r", sampling_params={"max_tokens": 2})
            assert (answer.generation, answer.weight_versions[0].step) == (7, 2)

    async def test_one_that_attaches_behind_a_closed_gate_parks(self) -> None:
        async with Pod() as pod:
            late = Attached(pod.gate, pod.engine, 9, is_attached=False)
            pod.members.append(late)
            pod.gate.close(CancelReason.PAUSED)
            await asyncio.sleep(0.01)
            late.front_end.take_requests()
            parked = pod.ask(3, "r", on_pause="wait", sampling_params={"max_tokens": 2})
            await asyncio.sleep(0.01)
            assert late.front_end.gate.parked == 1
            pod.gate.open(BASE, 1)
            assert len((await parked).token_ids) == 2

    async def test_a_dead_engine_sends_all_away(self) -> None:
        async with Pod() as pod:
            pod.gate.close(CancelReason.PAUSED)
            parked = pod.ask(0, "r", on_pause="wait")
            await asyncio.sleep(0.01)
            pod.gate.fail()
            with pytest.raises(NotReady):
                await parked


class TestRequestsElsewhere:
    async def test_an_id_that_is_alive_in_another_is_refused_until_it_is_answered(self) -> None:
        async with Pod() as pod:
            pod.engine.step_s = 0.001
            first = pod.ask(0, "same")
            await pod.until(1)
            with pytest.raises(DuplicateRequest):
                await pod.ask(1, "same")
            answer = await pod.members[2].front_end.cancel("same")
            assert answer is not None
            assert answer.token_ids == (await first).token_ids
            assert (await first).cancel_reason is CancelReason.CANCELLED
            assert await pod.members[2].front_end.cancel("same") is None
            again = pod.ask(1, "same", sampling_params={"max_tokens": 2})
            assert len((await again).token_ids) == 2

    async def test_engine_ids_of_two_front_ends_are_never_the_same(self) -> None:
        async with Pod() as pod:
            for at in range(3):
                await pod.ask(at, "same", sampling_params={"max_tokens": 1})
            assert len({request.engine_id for request in pod.engine.requests}) == 3

    async def test_without_the_steering_process_nothing_is_taken(self) -> None:
        async with Pod() as pod:
            pod.members[0].die()
            with pytest.raises(EngineDeadError):
                await pod.ask(0, "r")
            assert not pod.engine.requests
            with pytest.raises(EngineDeadError):
                await pod.members[0].front_end.cancel("r")
            with pytest.raises(EngineDeadError):
                await pod.members[0].front_end.metrics_text()


class TestTheChannel:
    async def test_notes_and_calls_come_in_order_and_answers_find_their_calls(self) -> None:
        seen: list[object] = []

        async def double(n: int) -> int:
            seen.append(n)
            await asyncio.sleep(0.02 if n == 1 else 0)
            return 2 * n

        one, _ = channel_pair({}, {}, {"note": seen.append}, {"double": double})
        one.tell("note", "x")
        first = asyncio.create_task(one.call("double", 1))
        await asyncio.sleep(0)
        assert await one.call("double", 2) == 4
        assert await first == 2
        assert seen == ["x", 1, 2]

    async def test_a_handlers_error_is_the_callers_and_a_closed_channel_answers_nobody(
        self,
    ) -> None:
        async def fail() -> None:
            raise ValueError("no")

        async def wait() -> None:
            await asyncio.sleep(60)

        one, other = channel_pair({}, {}, {}, {"fail": fail, "wait": wait})
        with pytest.raises(CallFailed, match="ValueError: no"):
            await one.call("fail")
        waiting = asyncio.create_task(one.call("wait"))
        await asyncio.sleep(0.01)
        one.close()
        with pytest.raises(ChannelClosed):
            await waiting
        with pytest.raises(ChannelClosed):
            await one.call("wait")
        one.tell("nothing happens")
        other.close()
        await other.join()

    async def test_a_late_answer_reaches_nobody(self) -> None:
        async def slow() -> int:
            await asyncio.sleep(0.05)
            return 1

        one, _ = channel_pair({}, {}, {}, {"slow": slow})
        call = asyncio.create_task(one.call("slow"))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await one.call("slow") == 1


class TestSettings:
    @pytest.mark.parametrize(
        ("args", "rest", "count"),
        [
            ([], (), 1),
            (["--max-model-len=8"], ("--max-model-len=8",), 1),
            (["--a", "--api-server-count", "4", "--b=1"], ("--a", "--b=1"), 4),
            (["--api-server-count=1"], (), 1),
            (["--api_server_count=2", "-x"], ("-x",), 2),
        ],
    )
    def test_the_count_is_taken_out_of_the_engines_arguments(self, args, rest, count) -> None:
        assert split_count(args) == (rest, count)

    @pytest.mark.parametrize("value", ["0", "-1", "65", "four", ""])
    def test_another_count_is_refused_by_name(self, value: str) -> None:
        with pytest.raises(ValueError, match="api-server-count"):
            split_count([f"--api-server-count={value}"])


def test_metrics_of_several_processes_are_told_apart() -> None:
    text = (
        b'# HELP a_total What.\n# TYPE a_total counter\na_total{x="1"} 3.0\n'
        b'# HELP h Seconds.\n# TYPE h histogram\nh_bucket{le="+Inf"} 2.0\nh_count 2.0\nh_sum 1.0\n'
    )
    merged = merge_metrics({"main": text, "1": text}).decode().splitlines()
    assert merged.count("# TYPE a_total counter") == 1
    assert 'a_total{front_end="main",x="1"} 3.0' in merged
    assert 'h_bucket{front_end="1",le="+Inf"} 2.0' in merged

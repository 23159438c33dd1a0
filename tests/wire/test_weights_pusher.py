"""A trainer that pushes to a pod with real ranks, and that is killed at each step of it."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from rollout_pod.protocol import PushOffer, PushTarget, UpdatePhase
from rollout_pod.supervisor import staging
from rollout_pod.weights.push_errors import (
    NotDesired,
    PodGone,
    PushFailed,
    PushRefused,
    PushTimeout,
)
from rollout_pod.weights.push_link import PushLink, Refusal
from rollout_pod.weights.pusher import Pusher
from rollout_pod.weights.spec import Expected, UpdatesUnsupportedError
from tests.support.fake_device import FakeDevice
from tests.support.pods import PROMPT, Pod, pushed
from tests.support.pushed_pod import RanksEngine, TrainerProcess, pushed_pod
from tests.support.weights import Gate, ModelLoader, Place, expected_of, mixed_tensors, same

FIRST = mixed_tensors(0)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_RETRY_BASE_S", 0.02)


def engine_of(pod: Pod) -> RanksEngine:
    assert isinstance(pod.engine, RanksEngine)
    return pod.engine


@pytest.fixture
async def pod(place: Place) -> AsyncIterator[Pod]:
    place.start_receivers(*[expected_of(FIRST)] * 2)
    async with pushed_pod(place) as made:
        made.want()
        await made.serving("base")
        yield made


@asynccontextmanager
async def pusher_of(place: Place, **given: Any) -> AsyncIterator[Pusher]:
    made = await asyncio.to_thread(Pusher, place.run_dir, **{"bucket_bytes": 4096, **given})
    async with made:
        yield made


def holds(pod: Pod, seed: int) -> bool:
    return all(same(loader.model, mixed_tensors(seed)) for loader in engine_of(pod).loaders)


@pytest.fixture
async def trainers(place: Place) -> AsyncIterator[list[TrainerProcess]]:
    made: list[TrainerProcess] = []
    yield made
    for trainer in made:
        trainer.kill()


async def test_versions_are_pushed_one_after_the_other(place: Place, pod: Pod) -> None:
    async with pusher_of(place) as pusher:
        for number in range(3):
            version = f"step-{number}"
            pod.want(pushed(version))
            done = await pusher.push_async(version, mixed_tensors(number), timeout_s=20)
            assert done.sent and done.sent.version == done.state.weight_version == version
            assert done.state.update and done.state.update.phase is UpdatePhase.COMMITTED
            assert (done.state.update.transport, done.state.update.mode) == (
                "shared_memory", "bucketed",
            )  # fmt: skip
            assert {"first", "load", "finish"} <= done.state.update.steps.keys()
            assert holds(pod, number)
            await pod.serving(version)
            assert (await pod.ask(PROMPT, 3)).weight_versions[0].version == version
        again = await pusher.push_async(version, mixed_tensors(7), timeout_s=5)
        assert again.sent is None and holds(pod, 2), "it is committed already: nothing is sent"
    assert place.segments() == []


async def test_it_waits_until_the_version_is_needed(place: Place, pod: Pod) -> None:
    async with pusher_of(place) as pusher:
        push = asyncio.create_task(pusher.push_async("step-1", FIRST, timeout_s=20))
        await asyncio.sleep(0.1)
        assert not push.done() and pod.state.phase == "Serving"
        pod.want(pushed("step-1"))
        assert (await push).state.weight_version == "step-1"


async def test_a_deadline_says_what_was_waited_for(place: Place, pod: Pod) -> None:
    async with pusher_of(place) as pusher:
        with pytest.raises(NotDesired, match="asks for base, not for step-1"):
            await pusher.push_async("step-1", FIRST, timeout_s=0.2)
        pod.want(pushed("step-1"), sleep={"level": 2})
        await pod.until(lambda s: s.phase == "Sleeping")
        with pytest.raises(PushTimeout, match=r"Sleeping.*wake"):
            await pusher.push_async("step-1", FIRST, timeout_s=0.2)


async def test_nobody_there(place: Place) -> None:
    place.run_dir.mkdir()
    async with pusher_of(place) as pusher:
        with pytest.raises(PodGone, match=r"push\.sock"):
            await pusher.push_async("step-1", FIRST, timeout_s=0.5)


def test_the_run_folder_comes_from_the_environment(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLOUT_RUN_DIR", raising=False)
    with pytest.raises(ValueError, match="ROLLOUT_RUN_DIR"):
        Pusher()
    monkeypatch.setenv("ROLLOUT_RUN_DIR", str(place.run_dir))
    with Pusher() as pusher, pytest.raises(PodGone, match=str(place.run_dir)):
        pusher.target()


async def test_a_version_that_does_not_fit_interrupts_nobody(place: Place, pod: Pod) -> None:
    pod.want(pushed("step-1"))
    wrong = dict(FIRST)
    del wrong["layers.0.norm"]
    async with pusher_of(place) as pusher:
        with pytest.raises(PushRefused, match=r"layers\.0\.norm"):
            await pusher.push_async("step-1", wrong, timeout_s=20)
        assert (pod.state.gate, pod.state.needs, pod.state.weight_version) == (
            "open", "step-1", "base",
        )  # fmt: skip
        assert (await pusher.push_async("step-1", FIRST, timeout_s=20)).sent


async def test_an_engine_that_takes_no_updates_ends_the_push_at_once(
    place: Place, pod: Pod
) -> None:
    def unsupported() -> Expected:
        raise UpdatesUnsupportedError("it was started with --enable-eplb")

    place.receivers[1]._talker._expected = unsupported
    pod.want(pushed("step-1"))
    async with pusher_of(place) as pusher:
        with pytest.raises(PushRefused, match="rank 1: it was started with --enable-eplb"):
            await pusher.push_async("step-1", FIRST, timeout_s=20)
    assert (pod.state.gate, pod.state.weight_version) == ("open", "base")


@pytest.mark.parametrize(
    ("asked", "mine", "says"),
    [
        ("auto", "cuda_ipc", "tensors are on the host"),
        ("cuda_ipc", "auto", "tensors are on the host"),
        ("shared_memory", "cuda_ipc", "the pod's document shared_memory"),
    ],
)
async def test_a_named_transport_that_cannot_work_is_refused(
    place: Place, pod: Pod, asked: str, mine: str, says: str
) -> None:
    pod.want(pushed("step-1"), transport=asked)
    device = FakeDevice(place.root / "gpu") if asked == "shared_memory" else None
    async with pusher_of(place, transport=mine, device=device) as pusher:
        with pytest.raises(PushRefused, match=says):
            await pusher.push_async("step-1", FIRST, timeout_s=20)
    assert pod.state.needs == "step-1"


async def test_a_gpu_that_is_not_the_ranks_own(place: Place, pod: Pod) -> None:
    pod.want(pushed("step-1"))
    gpu = FakeDevice(place.root / "gpu")
    async with pusher_of(place, transport="cuda_ipc", device=gpu) as pusher:
        with pytest.raises(PushRefused, match=rf"on {gpu.uuid}, rank 0 on no GPU"):
            await pusher.push_async("step-1", gpu.give(FIRST), timeout_s=20)
    async with pusher_of(place, device=gpu) as pusher:  # left to choose, it says what it chose
        done = await pusher.push_async("step-1", gpu.give(FIRST), timeout_s=20)
        assert done.sent and done.sent.transport == "shared_memory"
        assert done.state.update and "no GPU" in done.state.update.note


async def test_straight_out_of_the_trainers_gpu_memory(place: Place) -> None:
    """The document names the transport; what is exported once is used for all versions."""
    gpu, ranks_view = FakeDevice(place.root / "gpu"), FakeDevice(place.root / "gpu")
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    held = gpu.give(FIRST)
    async with pushed_pod(place) as pod, pusher_of(place, device=gpu) as pusher:
        engine_of(pod).gpu_uuid = gpu.uuid
        for number in range(3):
            for name, tensor in mixed_tensors(number).items():
                held[name].copy_(tensor)
            pod.want(pushed(f"step-{number}"), transport="cuda_ipc")
            done = await pusher.push_async(f"step-{number}", held, timeout_s=20)
            assert holds(pod, number)
            update = done.state.update
            assert update and (update.transport, update.mode, update.note) == (
                "cuda_ipc", "direct", "",
            )  # fmt: skip
            if number == 0:
                exports = gpu.calls["export"]
        assert gpu.calls["export"] == exports
    assert ranks_view.in_use == 0, "the ranks let go of it"


async def test_two_processes_serve_one_session(place: Place, pod: Pod) -> None:
    """Each its own rank; one of them speaks to the pod when all are accepted."""
    pod.want(pushed("step-1"))
    joined = threading.Event()
    async with (
        pusher_of(place, ranks=[0]) as one,
        pusher_of(place, ranks=[1]) as other,
    ):
        part = asyncio.create_task(
            asyncio.to_thread(
                other.join,
                "step-1",
                mixed_tensors(1),
                session="both",
                timeout_s=20,
                on_accepted=lambda _: joined.set(),
            )
        )
        done = await one.push_async(
            "step-1", mixed_tensors(1), session="both", timeout_s=20,
            on_accepted=lambda _: joined.wait(10) or None,
        )  # fmt: skip
        assert done.state.weight_version == "step-1" and holds(pod, 1)
        assert (await part).session == "both"


async def test_two_processes_with_the_tensors_in_two_orders_are_refused(
    place: Place, pod: Pod
) -> None:
    """Each rank accepts what it is shown; whether it is one version, nobody would know."""
    pod.want(pushed("step-0"))
    await takes_over(place, pod, "step-0", 0)
    pod.want(pushed("step-1"))
    engine_of(pod).calls.clear()
    joined = threading.Event()
    async with pusher_of(place, ranks=[0]) as one, pusher_of(place, ranks=[1]) as other:
        part = asyncio.create_task(
            asyncio.to_thread(
                other.join, "step-1", dict(reversed(mixed_tensors(1).items())), session="both",
                timeout_s=20, on_accepted=lambda _: joined.set(),
            )
        )  # fmt: skip
        with pytest.raises(PushRefused, match="all of them send the same ones in one order"):
            await one.push_async(
                "step-1", mixed_tensors(1), session="both", timeout_s=20,
                on_accepted=lambda _: joined.wait(10) or None,
            )  # fmt: skip
        other.cancel()
        with pytest.raises(PushFailed):
            await part
    assert (pod.state.phase, pod.state.weight_version) == ("Serving", "step-0")
    assert engine_of(pod).calls == [], "nobody was interrupted"
    await takes_over(place, pod, "step-1", 1)


async def test_one_of_two_processes_alone_interrupts_nobody(place: Place, pod: Pod) -> None:
    pod.want(pushed("step-1"))
    engine_of(pod).calls.clear()
    async with pusher_of(place, ranks=[0]) as one:
        with pytest.raises(PushRefused, match="rank 1 accepted nothing of it"):
            await one.push_async("step-1", mixed_tensors(1), session="both", timeout_s=20)
    assert (pod.state.phase, pod.state.weight_version) == ("Serving", "base")
    assert engine_of(pod).calls == []
    await takes_over(place, pod, "step-1", 1)


# --- a trainer that is killed


async def takes_over(
    place: Place, pod: Pod, version: str, seed: int, gpu: FakeDevice | None = None
) -> None:
    """Another trainer pushes the same version."""
    tensors = gpu.give(mixed_tensors(seed)) if gpu else mixed_tensors(seed)
    async with pusher_of(place, device=gpu) as pusher:
        done = await pusher.push_async(version, tensors, timeout_s=30)
    assert done.sent is not None, "it was sent"
    assert holds(pod, seed)
    await pod.serving(version)
    assert (await pod.ask(PROMPT, 3)).weight_versions[0].version == version


async def test_killed_before_its_offer_nothing_happened(place, pod, trainers) -> None:
    pod.want(pushed("step-1"))
    trainers.append(TrainerProcess(place, "step-1", 1))
    await trainers[0].until("offer")
    trainers[0].kill()
    assert (pod.state.phase, pod.state.needs) == ("Serving", "step-1")
    await takes_over(place, pod, "step-1", 1)
    assert not [c for c in engine_of(pod).calls if c.endswith("flush")]


async def test_killed_after_its_offer_the_old_version_serves_on(place, pod, trainers) -> None:
    pod.want(pushed("step-1"))
    trainers.append(TrainerProcess(place, "step-1", 1))
    await trainers[0].until("tensor 0")
    trainers[0].kill()
    state = await pod.until(lambda s: s.phase == "Serving" and s.needs == "step-1")
    assert (state.weight_version, state.ready) == ("base", True)
    assert state.update and "sender" in state.update.message
    await takes_over(place, pod, "step-1", 1)


@pytest.mark.parametrize("step", ["tensor 3", "tensor 9", "finish"])
async def test_killed_in_the_middle_nothing_is_served_until_another_takes_over(
    place, pod, trainers, step
) -> None:
    pod.want(pushed("step-0"))
    await takes_over(place, pod, "step-0", 0)
    pod.want(pushed("step-1"))
    trainers.append(TrainerProcess(place, "step-1", 1))
    await trainers[0].until(step)
    await pod.until(lambda s: s.phase == "Updating" and pod.supervisor.board.state.transferring)
    trainers[0].kill()
    state = await pod.until(lambda s: s.phase != "Updating")
    if state.phase == "Poisoned":
        assert (state.ready, state.weight_version, state.needs) == (False, None, "step-1")
    else:  # not a bucket was loaded by then
        assert (state.ready, state.weight_version) == (True, "step-0")
        assert step == "tensor 3"
    await takes_over(place, pod, "step-1", 1)


async def test_killed_before_the_commit_it_commits_all_the_same(place, pod, trainers) -> None:
    """Every rank has it, verified: what the sender does then is of no account."""
    engine_of(pod).before_clear = asyncio.Event()
    pod.want(pushed("step-1"))
    trainers.append(TrainerProcess(place, "step-1", 1))
    await trainers[0].until("finish")
    trainers[0].go()
    await pod.until(lambda s: bool(s.update and s.update.phase == "Committing"))
    trainers[0].kill()
    engine_of(pod).before_clear.set()
    await pod.serving("step-1")
    assert holds(pod, 1)


async def test_frozen_in_the_middle_it_is_given_up_at_the_deadline(place, pod, trainers) -> None:
    pod.want(pushed("step-0"))
    await takes_over(place, pod, "step-0", 0)
    pod.want(pushed("step-1"), update_timeout_s=1.0)
    trainers.append(TrainerProcess(place, "step-1", 1))
    await trainers[0].until("tensor 5")  # and there it stands
    state = await pod.until(lambda s: s.phase == "Poisoned" and s.needs == "step-1")
    assert state.update and "timed out" in state.update.message
    pod.want(pushed("step-1"), update_timeout_s=30.0)
    await takes_over(place, pod, "step-1", 1)


# --- twice, late, at once


async def test_two_senders_race_and_one_version_is_served(place, pod, trainers) -> None:
    pod.want(pushed("step-1"))
    trainers += [TrainerProcess(place, "step-1", 1), TrainerProcess(place, "step-1", 1)]
    first, second = await asyncio.gather(*(trainer.end() for trainer in trainers))
    await pod.serving("step-1")
    assert holds(pod, 1), "whole, and of one sender"
    told = [first, second]
    assert any(t.get("committed") == "step-1" for t in told), told
    for each in told:
        assert each.get("committed") == "step-1" or each["error"] in ("PushFailed", "PodGone"), told


async def test_the_later_of_two_waits_for_the_earlier(place, pod, trainers) -> None:
    pod.want(pushed("step-1"))
    trainers.append(TrainerProcess(place, "step-1", 1))
    await trainers[0].until("tensor 2")
    trainers.append(TrainerProcess(place, "step-1", 1))
    later = asyncio.create_task(trainers[1].end())
    trainers[0].go()
    assert (await trainers[0].end())["committed"] == "step-1"
    assert (await later)["committed"] == "step-1"
    assert len([c for c in engine_of(pod).calls if c.startswith("load")]) == 1


async def test_superseded_while_it_is_on_its_way(place: Place, pod: Pod) -> None:
    """Requests drain for a minute; the sender must not wait for a load that never comes."""
    pod.want(pushed("step-1"), interruption={"mode": "drain", "timeout_s": 60.0})
    rollouts = [asyncio.create_task(pod.ask([*PROMPT, i], 4000)) for i in range(2)]
    while pod.engine.running < 2:
        await asyncio.sleep(0)
    pod.engine.step_s = 0.002
    async with pusher_of(place) as pusher:
        push = asyncio.create_task(pusher.push_async("step-1", FIRST, timeout_s=60))
        await pod.until(lambda s: s.phase == "Updating")
        pod.want(pushed("step-2"))
        with pytest.raises(PushFailed, match="asked for meanwhile"):
            async with asyncio.timeout(15):
                await push
        done = await pusher.push_async("step-2", mixed_tensors(2), timeout_s=30)
        assert done.state.weight_version == "step-2" and holds(pod, 2)
    await asyncio.gather(*rollouts)


async def test_an_offer_from_an_old_boot_is_refused(place: Place, pod: Pod) -> None:
    pod.want(pushed("step-1"))
    await pod.until(lambda s: s.needs == "step-1")
    late = PushOffer(
        session="late", boot_id="before", version="step-1", bytes=1, tensors=1,
        transport="shared_memory", mode="bucketed",
    )  # fmt: skip
    with pytest.raises(Refusal, match="earlier start"):
        await asyncio.to_thread(PushLink(place.run_dir).offer, late)
    assert pod.state.needs == "step-1" and pod.state.gate == "open"


async def test_a_pod_that_starts_anew_is_pushed_to_again(place: Place) -> None:
    """The same pusher, whose connections are those of the start before."""
    place.start_receivers(expected_of(FIRST))
    async with pusher_of(place) as pusher:
        async with pushed_pod(place) as pod:
            pod.want(pushed("step-1"))
            await pusher.push_async("step-1", mixed_tensors(1), timeout_s=20)
        with pytest.raises(PodGone):
            await pusher.push_async("step-1", mixed_tensors(1), timeout_s=0.5)
        async with pushed_pod(place) as pod:
            engine_of(pod).loaders = [ModelLoader()]
            done = await pusher.push_async("step-1", mixed_tensors(1), timeout_s=20)
            assert done.sent and holds(pod, 1)


async def test_cancelled_it_gives_up_before_it_returns(place: Place, pod: Pod) -> None:
    stand = threading.Event()

    def slow():
        for number, pair in enumerate(mixed_tensors(1).items()):
            if number == 4:
                assert stand.wait(20)
            yield pair

    pod.want(pushed("step-1"))
    async with pusher_of(place) as pusher:
        first = await pusher.push_async("step-1", mixed_tensors(0), timeout_s=20)
        assert first.sent
        pod.want(pushed("step-2"))
        push = asyncio.create_task(pusher.push_async("step-2", slow(), timeout_s=20))
        await pod.until(lambda s: pod.supervisor.board.state.transferring)
        push.cancel()
        stand.set()
        with pytest.raises(asyncio.CancelledError):
            await push
        await pod.until(lambda s: s.needs == "step-2")
        done = await pusher.push_async("step-2", mixed_tensors(2), timeout_s=20)
        assert done.state.weight_version == "step-2" and holds(pod, 2)


async def test_a_cancel_is_of_the_push_that_is_on(place: Place, pod: Pod) -> None:
    """One that comes when none is on stops none, and no close takes memory from one."""
    go = threading.Event()

    def slow():
        assert go.wait(20)
        yield from mixed_tensors(1).items()

    async with pusher_of(place) as pusher:
        pod.want(pushed("step-0"))
        assert (await pusher.push_async("step-0", mixed_tensors(0), timeout_s=20)).sent
        pusher.cancel()
        pod.want(pushed("step-1"))
        push = asyncio.create_task(
            pusher.push_async("step-1", slow(), session="named", timeout_s=20)
        )
        await pod.until(lambda s: pod.supervisor.board.state.transferring)
        with pytest.raises(PushRefused, match="pushing already"):
            pusher.close()
        go.set()
        assert (await push).state.weight_version == "step-1"


async def test_a_cancel_before_there_is_a_sender(
    place: Place, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.want(pushed("step-1"))
    async with pusher_of(place) as pusher:
        ask = pusher._link.target

        def cancelled() -> PushTarget:
            pusher.cancel()
            return ask()

        monkeypatch.setattr(pusher._link, "target", cancelled)
        with pytest.raises(PushFailed, match="given up"):
            await asyncio.to_thread(pusher.join, "step-1", FIRST, session="s", timeout_s=20)
        with pytest.raises(PushFailed, match="given up"):
            await pusher.push_async("step-1", FIRST, timeout_s=20)
    assert (pod.state.needs, pod.state.weight_version) == ("step-1", "base")


async def test_the_sender_is_told_of_a_rank_that_fails(place: Place, pod: Pod) -> None:
    def fail(number: int) -> None:
        if number == 1:
            raise RuntimeError("out of memory")

    pod.want(pushed("step-0"))
    await takes_over(place, pod, "step-0", 0)
    pod.want(pushed("step-1"))
    engine_of(pod).loaders[1] = ModelLoader(fail)
    async with pusher_of(place) as pusher:
        with pytest.raises(PushFailed, match="out of memory") as caught:
            await pusher.push_async("step-1", FIRST, timeout_s=20)
        assert caught.value.state and caught.value.state.weight_version is None
        engine_of(pod).loaders[1] = ModelLoader()
        done = await pusher.push_async("step-1", mixed_tensors(1), timeout_s=20)
        assert done.sent and holds(pod, 1)


async def test_many_pushes_leave_nothing(place: Place, pod: Pod) -> None:
    me = psutil.Process(os.getpid())
    async with pusher_of(place) as pusher:
        for number in range(60):
            if number == 10:
                await pod.serving(f"step-{number - 1}")
                base = (me.num_fds(), me.num_threads(), len(place.segments()))
            version = f"step-{number}"
            pod.want(pushed(version))
            await pusher.push_async(version, mixed_tensors(number), timeout_s=20)
        await pod.serving(version)
        now = (me.num_fds(), me.num_threads(), len(place.segments()))
        assert now[0] <= base[0] + 2 and now[1] <= base[1] + 2 and now[2] == base[2]
    assert place.segments() == []


@pytest.mark.parametrize("when", ["before its offer", "while they read"])
async def test_killed_while_the_ranks_read_its_gpu_memory(
    place: Place, trainers: list[TrainerProcess], when: str
) -> None:
    """Mode direct: no bucket says that the sender is gone, and what it exported is still mapped."""
    folder = place.root / "gpu"
    ranks_view = FakeDevice(folder)
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    async with pushed_pod(place) as pod:
        gate = Gate(0)
        engine_of(pod).gpu_uuid = ranks_view.uuid
        pod.want(pushed("step-0"), transport="cuda_ipc")
        await takes_over(place, pod, "step-0", 0, gpu=FakeDevice(folder))
        engine_of(pod).loaders[0] = ModelLoader(gate)
        pod.want(pushed("step-1"), transport="cuda_ipc")
        trainers.append(TrainerProcess(place, "step-1", 1, gpu=folder))
        await trainers[0].until("offer")
        if when != "before its offer":
            trainers[0].go()
            assert await asyncio.to_thread(gate.reached.wait, 30)
        trainers[0].kill()
        gate.open.set()
        state = await pod.until(lambda s: s.phase != "Updating" and s.needs == "step-1")
        if when == "before its offer":
            assert (state.phase, state.ready, state.weight_version) == ("Serving", True, "step-0")
        else:
            assert (state.phase, state.ready, state.weight_version) == ("Poisoned", False, None)
        engine_of(pod).loaders[0] = ModelLoader()
        await takes_over(place, pod, "step-1", 2, gpu=FakeDevice(folder))
    assert ranks_view.in_use == 0, "the ranks let go of the dead one's memory"

"""The trainer's adapter steers pods without an operator over their real admin ports."""

import asyncio

import pytest

from rollout_client.trainer import (
    AdapterError,
    Asleep,
    Late,
    OwnedByOperator,
    PodTarget,
    Refused,
    ReplicaErrors,
    ServerAdapter,
    Superseded,
    SyncServerAdapter,
    WeightsUnavailable,
)
from rollout_pod.protocol import DesiredDocument, SleepTag, WeightsSource
from tests.support.local_pods import Local, local_pods
from tests.support.operator_kit import free_port
from tests.support.pods import start_long

PATH = WeightsSource(path="/w/step-1")


def adapter_of(*pods: Local, **settings) -> ServerAdapter:
    return ServerAdapter([pod.target for pod in pods], **{"timeout_s": 10, **settings})


async def test_every_call_of_a_trainer() -> None:
    async with local_pods(2) as pods, adapter_of(*pods) as adapter:
        rollouts = [task for pod in pods for task in await start_long(pod.pod, 2)]
        results = await adapter.cancel()
        assert set(results) == {pod.url for pod in pods}
        assert all(r.ok and r.phase == "Paused" and r.weight_version == "base"
                   for r in results.values())  # fmt: skip
        for rollout in rollouts:
            assert (await rollout).is_cancel
        await adapter.release(1, ("kv_cache",))
        assert all(pod.state.resident == (SleepTag.WEIGHTS,) for pod in pods)
        await adapter.release()
        assert all(pod.state.sleep.level == 2 and not pod.state.resident for pod in pods)
        with pytest.raises(ReplicaErrors, match="2 of 2") as told:
            await adapter.clear_kv_cache()
        assert {type(error) for error in told.value.exceptions} == {Asleep}
        with pytest.raises(ReplicaErrors, match=r'resume\(\("weights",\)\) first'):
            await adapter.update_weights(version="step-1", source=PATH)
        await adapter.resume(("weights",))
        assert all(pod.state.resident == (SleepTag.WEIGHTS,) for pod in pods)
        await adapter.resume()
        results = await adapter.update_weights(global_steps=1, source=PATH)
        for pod in pods:
            assert results[pod.url].weight_version == "step-1"
            assert pod.state.weight_step == 1
            assert pod.state.gate == "closed", "cancelled, and not resumed since"
        await adapter.resume_generation()
        assert all(pod.state.gate == "open" for pod in pods)
        cleared = await adapter.clear_kv_cache()
        assert {r.phase for r in cleared.values()} == {"Serving"}
        assert all(pod.engine.calls[-1] == "clear" for pod in pods)
        assert (await adapter.update_weights(version="base"))[pods[0].url].weight_version == "base"


async def test_a_wish_is_a_state_and_not_a_change() -> None:
    async with local_pods() as (pod,), adapter_of(pod) as adapter:
        await adapter.cancel()
        generation = pod.desired.generation
        for _ in range(3):
            await adapter.cancel()
        assert pod.desired.generation == generation
        await asyncio.gather(adapter.cancel(), adapter.release(1), adapter.cancel())
        assert (pod.desired.paused, pod.desired.sleep.level) == (True, 1)


async def test_no_half_success_is_hidden() -> None:
    async with local_pods(2) as (well, ill), adapter_of(well, ill) as adapter:
        await ill.kill()
        ill.refuses_sleep = "the engine was started without sleep mode"
        await (await ill.boot()).serving("base")
        with pytest.raises(ReplicaErrors, match="1 of 2 replicas failed") as told:
            await adapter.release(timeout_s=5)
        results = told.value.results
        assert results[well.url].ok
        assert results[well.url].phase == "Sleeping"
        assert isinstance(results[ill.url].error, Refused)
        assert "without sleep mode" in str(results[ill.url].error)
        refused, others = told.value.split(Refused)
        assert isinstance(refused, ReplicaErrors)
        assert refused.results is results
        assert others is None


async def test_one_replica_raises_its_own_error_and_a_deadline_says_how_far_it_was() -> None:
    async with local_pods() as (pod,), adapter_of(pod) as adapter:
        pod.pod.agent.stage_gate = asyncio.Event()
        with pytest.raises(
            Late, match=r"not on step-1 after 0\.5 s: Serving; holds base; pref"
        ) as e:
            await adapter.update_weights(version="step-1", source=PATH, timeout_s=0.5)
        assert e.value.results[pod.url].error is e.value
        pod.pod.agent.stage_gate.set()
        await pod.pod.serving("step-1")
        pod.pod.agent.stage_script["step-2"] = ["no such folder"] * 50
        with pytest.raises(WeightsUnavailable, match="no such folder"):
            await adapter.update_weights(
                version="step-2", source=WeightsSource(path="/w/step-2"), timeout_s=5
            )
    nobody = PodTarget(url=f"http://127.0.0.1:{free_port()}", token="t")
    async with ServerAdapter(nobody, timeout_s=0.5) as adapter:
        with pytest.raises(Late, match="no pod answers there"):
            await adapter.cancel()
    async with local_pods() as (pod,):
        wrong = PodTarget(url=pod.url, token="wrong")
        async with ServerAdapter(wrong, timeout_s=5) as adapter:
            with pytest.raises(Refused, match="token"):
                await adapter.cancel()


async def test_a_pod_of_an_operator_is_refused() -> None:
    async with local_pods() as (pod,):
        await pod.kill()
        await pod.boot(first=DesiredDocument(owner="7f0c", generation=3))
        async with adapter_of(pod) as adapter:
            with pytest.raises(OwnedByOperator, match="ReplicaTarget"):
                await adapter.cancel()
        assert pod.desired == DesiredDocument(owner="7f0c", generation=3)


async def test_the_last_of_two_adapters_wins_and_the_other_is_told() -> None:
    async with (
        local_pods() as (pod,),
        adapter_of(pod) as one,
        adapter_of(pod) as two,
    ):
        pod.pod.agent.stage_gate = asyncio.Event()
        losing = one.begin_update(version="step-1", source=PATH)
        while pod.desired.weights is None:
            await asyncio.sleep(0.01)
        winning = two.begin_update(version="step-2", source=WeightsSource(path="/w/step-2"))
        with pytest.raises(Superseded, match="version step-2 before the pod was on step-1"):
            await losing.wait()
        assert not winning.done()
        with pytest.raises(RuntimeError, match="update to step-2 has not ended"):
            two.begin_update(version="step-3")
        await one.cancel()  # of another field
        pod.pod.agent.stage_gate.set()
        assert (await winning.wait())[pod.url].weight_version == "step-2"
        # twenty writers at once: each change is in
        await asyncio.gather(*(a.cancel() for a in (one, two) * 5), one.release(1), two.release(1))
        assert (pod.desired.paused, pod.desired.sleep.level) == (True, 1)


async def test_a_pod_that_restarts_meanwhile_is_told_again() -> None:
    async with local_pods() as (pod,), adapter_of(pod) as adapter:
        pod.pod.agent.stage_gate = asyncio.Event()
        update = adapter.begin_update(version="step-1", source=PATH)
        while pod.desired.weights is None:
            await asyncio.sleep(0.01)
        await pod.kill()
        await asyncio.sleep(0.2)
        await pod.boot(forgets=True)
        assert (await update.wait())[pod.url].weight_version == "step-1"
        assert pod.state.weight_version == "step-1"


async def test_an_update_is_given_up() -> None:
    async with local_pods() as (pod,), adapter_of(pod) as adapter:
        pod.pod.agent.stage_gate = asyncio.Event()
        update = adapter.begin_update(version="step-1", source=PATH)
        await asyncio.sleep(0)
        await update.give_up()
        await update.give_up()
        with pytest.raises(asyncio.CancelledError):
            await update.wait()
        waiting = asyncio.create_task(adapter.update_weights(version="step-1", source=PATH))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        pod.pod.agent.stage_gate.set()
        await adapter.update_weights(version="step-1", source=PATH)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "version: give one, or global_steps"),
        ({"version": "base", "source": PATH}, "base is the model's own checkpoint"),
        ({"weights": {}, "version": "base"}, "base is the model's own checkpoint"),
        ({"weights": {}, "version": "v", "source": PATH}, "leave out one of the two"),
    ],
)
async def test_wrong_arguments_are_told_before_anybody_is_asked(asked: dict, told: str) -> None:
    async with local_pods() as (pod,), adapter_of(pod) as adapter:
        with pytest.raises(ValueError, match=told):
            await adapter.update_weights(**asked)
        with pytest.raises(Refused, match="no operator knows where v lies"):
            await adapter.update_weights(version="v")
        assert pod.desired.generation == 0
    for targets in ([], [pod.target, pod.target]):
        with pytest.raises(ValueError, match="targets"):
            ServerAdapter(targets)


async def test_without_an_event_loop() -> None:
    async with local_pods() as (pod,):

        def steer() -> None:
            with SyncServerAdapter(pod.target, timeout_s=10) as adapter:
                assert adapter.cancel()[pod.url].phase == "Paused"
                adapter.release(1)
                adapter.resume()
                adapter.resume_generation()
                update = adapter.begin_update(version="step-1", source=PATH)
                assert update.wait()[pod.url].weight_version == "step-1"
                assert update.done()
                adapter.clear_kv_cache()
                assert adapter.status()[pod.url].weight_version == "step-1"
                with pytest.raises(AdapterError):
                    adapter.update_weights(version="step-2")

        await asyncio.to_thread(steer)

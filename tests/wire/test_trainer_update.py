"""The trainer's adapter sends versions into pods whose ranks are real, and whose engine is not."""

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rollout_client.trainer import (
    Asleep,
    Late,
    PodTarget,
    Refused,
    ReplicaErrors,
    ServerAdapter,
    Superseded,
    SyncServerAdapter,
    UpdateFailed,
    keeper,
    muster,
)
from rollout_pod.protocol import DesiredDocument
from rollout_pod.weights.fill import spec_of
from tests.support.local_pods import Local, local_pods
from tests.support.pods import start_long
from tests.support.weights import Tensors, mixed_tensors, same, write_checkpoint

TRAINER = Path(__file__).resolve().parents[1] / "support" / "trainer_process.py"

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "SETTLE_S", 0.05)
    monkeypatch.setattr(keeper, "_RETRY_S", 0.1)


def adapter_of(*pods: Local, **settings) -> ServerAdapter:
    return ServerAdapter([pod.target for pod in pods], **{"timeout_s": 20, **settings})


def pairs(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


def holds(pod: Local, version: str, tensors: Tensors) -> bool:
    return pod.state.weight_version == version and all(same(m, tensors) for m in pod.models)


FORMS = {
    "mapping": lambda t: t,
    "pairs": pairs,
    "function of a mapping": lambda t: lambda: t,
    "function of pairs": lambda t: lambda: pairs(t),
    "list": lambda t: list(t.items()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", ["reference", "copy", "nothing"])
async def test_versions_arrive_whole_on_every_rank_of_every_replica(form: str, keep: str) -> None:
    async with local_pods(2, ranks=2) as pods, adapter_of(*pods, keep=keep) as adapter:
        rollouts = await start_long(pods[0].pod, 3)
        for step in (1, 2, 3):
            sent = mixed_tensors(step)
            results = await adapter.update_weights(FORMS[form](sent), global_steps=step)
            for pod in pods:
                assert holds(pod, f"step-{step}", sent)
                result = results[pod.url]
                assert (result.weight_version, result.phase) == (f"step-{step}", "Serving")
                assert result.sent.tensors == len(sent)
                assert pod.state.weight_step == step
                assert "clear" in pod.engine.calls
                pod.engine.calls.clear()
        for rollout in rollouts:
            assert (await rollout).is_cancel


async def test_names_types_and_tensors_that_are_not_sent() -> None:
    theirs = {f"module.{n}": t.double() if t.dtype is torch.float32 else t
              for n, t in mixed_tensors(1).items()}  # fmt: skip
    theirs["module.rotary.cache"] = torch.ones(3)

    def name(theirs: str) -> str | None:
        return None if "rotary" in theirs else theirs.removeprefix("module.")

    def cast(name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype is torch.float64 and name != "layers.1.double" else dtype

    async with local_pods() as (pod,), adapter_of(pod, names=name, cast=cast) as adapter:
        await adapter.update_weights(theirs, version="v1")
        assert holds(pod, "v1", mixed_tensors(1))
        with pytest.raises(ValueError, match=r"both became 'embed\.weight'"):
            await adapter.update_weights({**theirs, "embed.weight": theirs["module.embed.weight"]},
                                         version="v2")  # fmt: skip
        assert pod.desired.weights.version == "v1", "nothing was asked"
    mapping = {f"module.{n}": n for n in mixed_tensors(0)}
    async with local_pods() as (pod,), adapter_of(pod, names=mapping) as adapter:
        sent = mixed_tensors(2)
        await adapter.update_weights({f"module.{n}": t for n, t in sent.items()}, version="v1")
        assert holds(pod, "v1", sent)


async def test_pairs_are_read_once_and_one_after_another() -> None:
    """A generator is the only one that holds what it gathers; its manifest comes from metadata."""
    alive = most = 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    big = {f"t{i}": torch.full((1000,), float(i)) for i in range(60)}
    specs = [spec_of(name, tensor) for name, tensor in big.items()]

    def gather(step: int) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, most
        for name, tensor in big.items():
            alive += 1
            most = max(most, alive)
            yield name, (tensor + step).as_subclass(Counted)

    async with local_pods(2, expected=big) as pods, adapter_of(*pods) as adapter:
        for step in (1, 2):
            await adapter.update_weights(gather(step), global_steps=step, manifest=specs)
            gc.collect()
            assert holds(pods[0], f"step-{step}", {n: t + step for n, t in big.items()})
        assert most <= 12, "of 60"


async def test_pairs_may_come_in_another_order_than_a_mapping_before() -> None:
    async with local_pods() as (pod,), adapter_of(pod) as adapter:
        for step in range(4):
            sent = mixed_tensors(step)
            backwards = dict(reversed(sent.items()))
            await adapter.update_weights(pairs(backwards) if step % 2 else sent, global_steps=step)
            assert holds(pod, f"step-{step}", sent)
        # the same pairs in yet another order: told, and mended by the next
        with pytest.raises(UpdateFailed, match="manifest"):
            await adapter.update_weights(pairs(mixed_tensors(5)), global_steps=5)
        await adapter.update_weights(pairs(mixed_tensors(6)), global_steps=6)
        assert holds(pod, "step-6", mixed_tensors(6))


async def test_what_does_not_fit_is_refused_and_serving_goes_on() -> None:
    async with local_pods(2) as pods, adapter_of(*pods) as adapter:
        wrong = {**mixed_tensors(1), "layers.0.norm": torch.randn(8)}
        with pytest.raises(ReplicaErrors) as told:
            await adapter.update_weights(wrong, version="v1", timeout_s=5)
        for pod in pods:
            error = told.value.results[pod.url].error
            assert isinstance(error, UpdateFailed)
            assert "layers.0.norm" in str(error)
            assert "shape [8], expected [7]" in str(error)
            assert pod.state.phase == "Serving"
            assert pod.state.weight_version == "base"
        await adapter.update_weights(mixed_tensors(1), version="v2")
        short = dict(list(mixed_tensors(2).items())[:-1])
        with pytest.raises(ReplicaErrors, match="missing"):
            await adapter.update_weights(pairs(short), version="v3", timeout_s=5,
                                         manifest=[spec_of(*p) for p in short.items()])  # fmt: skip
        await adapter.update_weights(pairs(mixed_tensors(3)), version="v4")
        assert all(holds(pod, "v4", mixed_tensors(3)) for pod in pods)


async def test_a_source_that_fails_in_the_middle_is_told_and_the_next_version_mends_it() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(mixed_tensors(1).items()):
            if number == 5:
                raise MemoryError("no room to gather layers.0.mask")
            yield pair

    specs = [spec_of(*pair) for pair in mixed_tensors(1).items()]
    async with local_pods(2) as pods, adapter_of(*pods) as adapter:
        with pytest.raises(ReplicaErrors, match="MemoryError: no room to gather"):
            await adapter.update_weights(broken(), version="v1", manifest=specs)
        assert {pod.state.weight_version for pod in pods} <= {"base", None}
        await adapter.update_weights(mixed_tensors(2), version="v2")
        assert all(holds(pod, "v2", mixed_tensors(2)) for pod in pods)
        assert {pod.state.phase for pod in pods} == {"Serving"}


async def test_a_replica_that_is_down_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert muster.LAG_S > 5
    monkeypatch.setattr("rollout_client.trainer.delivery.LAG_S", 0.5)
    specs = [spec_of(*pair) for pair in mixed_tensors(1).items()]
    async with local_pods(2) as (well, ill), adapter_of(well, ill) as adapter:
        await ill.kill()
        for step, weights in enumerate((mixed_tensors(1), pairs(mixed_tensors(1)))):
            with pytest.raises(ReplicaErrors, match="1 of 2") as told:
                await adapter.update_weights(
                    weights, global_steps=step, manifest=specs, timeout_s=5
                )
            assert told.value.results[well.url].weight_version == f"step-{step}"
            assert isinstance(told.value.results[ill.url].error, Late)
            assert holds(well, f"step-{step}", mixed_tensors(1))


async def test_two_adapters_racing() -> None:
    async with local_pods() as (pod,), adapter_of(pod) as one, adapter_of(pod) as two:
        first, second = threading.Event(), threading.Event()

        def slowly() -> Iterator[tuple[str, torch.Tensor]]:
            for pair in mixed_tensors(1).items():
                first.set()
                second.wait(20)
                yield pair

        specs = [spec_of(*pair) for pair in mixed_tensors(1).items()]
        losing = one.begin_update(slowly, version="v1", manifest=specs)
        await asyncio.to_thread(first.wait, 20)
        winning = two.begin_update(mixed_tensors(2), version="v2")
        while pod.desired.weights.version != "v2":
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.5, second.set)  # its tensors go on being read
        with pytest.raises(Superseded):
            await losing.wait()
        await winning.wait()
        assert holds(pod, "v2", mixed_tensors(2))
        await one.update_weights(mixed_tensors(3), version="v3")
        assert holds(pod, "v3", mixed_tensors(3))


async def test_a_version_that_is_held_is_not_sent_again() -> None:
    async with local_pods() as (pod,), adapter_of(pod) as adapter:
        await adapter.update_weights(mixed_tensors(1), version="v1")
        results = await adapter.update_weights(mixed_tensors(1), version="v1")
        assert results[pod.url].ok
        assert results[pod.url].sent is None
        # also pairs that nobody reads
        results = await adapter.update_weights(pairs(mixed_tensors(1)), version="v1")
        assert results[pod.url].sent is None


@pytest.mark.parametrize("keep", ["reference", "copy"])
@pytest.mark.parametrize("forgets", [False, True])
async def test_a_pod_that_restarts_is_sent_its_version_again(keep: str, forgets: bool) -> None:
    async with local_pods() as (pod,), adapter_of(pod, keep=keep) as adapter:
        sent = mixed_tensors(1)
        await adapter.update_weights(sent, version="v1")
        for _ in range(2):
            await pod.kill()
            await pod.boot(forgets=forgets)
            await pod.pod.serving("v1")
            assert holds(pod, "v1", sent)


async def test_what_was_written_to_since_is_never_sent_under_the_old_name() -> None:
    weights = mixed_tensors(1)
    for form in (weights, lambda: {n: t.detach() for n, t in weights.items()}):
        async with local_pods() as (pod,), adapter_of(pod) as adapter:
            await adapter.update_weights(form, version="v1")
            with torch.no_grad():
                weights["layers.0.norm"].add_(1)  # the next step of the optimizer
            await pod.kill()
            await pod.boot()
            await pod.pod.until(lambda s: s.needs == "v1")
            with pytest.raises(Refused, match=r"'layers\.0\.norm' was written to since"):
                await adapter.resend()
            assert pod.state.weight_version is None
            await adapter.update_weights(form, version="v2")
            assert holds(pod, "v2", weights)


async def test_writing_while_it_is_sent_again_fails_it_before_the_commit(caplog) -> None:
    weights, reached, go = mixed_tensors(1), threading.Event(), threading.Event()
    is_slow = False

    async with local_pods() as (pod,), adapter_of(pod, names=lambda n: n) as adapter:
        await adapter.update_weights(weights, version="v1")
        real = torch.Tensor.detach

        def slowly(self: torch.Tensor) -> torch.Tensor:
            if self is weights["layers.1.big"] and is_slow:
                reached.set()
                go.wait(20)
            return real(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", slowly)
            is_slow = True
            await pod.kill()
            await pod.boot()
            await asyncio.to_thread(reached.wait, 20)
            weights["embed.weight"].add_(1)
            go.set()
            while "is not sent again" not in caplog.text:
                await asyncio.sleep(0.05)
        assert pod.state.weight_version is None
        await adapter.update_weights(weights, version="v2")
        assert holds(pod, "v2", weights)


async def test_an_update_that_nobody_was_asked_for_leaves_the_version_before_kept() -> None:
    async with local_pods() as (pod,), adapter_of(pod) as adapter:
        await adapter.update_weights(mixed_tensors(1), version="v1")
        await adapter.release(1)
        with pytest.raises(Asleep):
            await adapter.update_weights(mixed_tensors(2), version="v2")
        await adapter.resume()
        await pod.kill()
        await (await pod.boot()).serving("v1")
        assert holds(pod, "v1", mixed_tensors(1))


async def test_nothing_is_kept_where_nothing_is_to_be() -> None:
    async with local_pods() as (pod,), adapter_of(pod, keep="nothing") as adapter:
        await adapter.update_weights(mixed_tensors(1), version="v1")
        assert await adapter.resend() == {}
        await pod.kill()
        await pod.boot()
        await pod.pod.until(lambda s: s.needs == "v1")
        with pytest.raises(Refused, match="nothing is kept"):
            await adapter.resend()


async def test_no_way_for_bytes_is_told(tmp_path) -> None:
    async with local_pods() as (pod,):
        far = PodTarget(url=pod.url, token=pod.run_dir / "admin" / "token")
        async with ServerAdapter(far, timeout_s=5) as adapter:
            with pytest.raises(Refused, match="run_dir"):
                await adapter.update_weights(mixed_tensors(1), version="v1")
        nobody = PodTarget(url=pod.url, token=far.token, run_dir=tmp_path)
        async with ServerAdapter(nobody, timeout_s=1) as adapter:
            with pytest.raises(Late, match=r"not on v1 after 1 s|no answer on"):
                await adapter.update_weights(mixed_tensors(1), version="v1")


async def test_an_update_that_is_given_up_in_the_middle_leaves_a_pod_that_can_be_mended() -> None:
    reached, go = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(mixed_tensors(1).items()):
            if number == 4:
                reached.set()
                go.wait(30)
            yield pair

    specs = [spec_of(*pair) for pair in mixed_tensors(1).items()]
    async with local_pods() as (pod,), adapter_of(pod) as adapter:
        update = adapter.begin_update(slowly(), version="v1", manifest=specs)
        await asyncio.to_thread(reached.wait, 20)
        giving_up = asyncio.create_task(update.give_up())
        await asyncio.sleep(0.2)
        go.set()
        await giving_up
        assert update.done()
        await adapter.update_weights(mixed_tensors(2), version="v2")
        assert holds(pod, "v2", mixed_tensors(2))
        assert pod.state.phase == "Serving"


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
async def test_a_trainer_that_is_killed_in_the_middle_and_the_next_one(
    tmp_path: Path, bucket_bytes: int
) -> None:
    """With small buckets half of them are loaded by then: a mix, which is never served."""
    is_mixed = bucket_bytes == 4096
    write_checkpoint(tmp_path / "killed", mixed_tensors(1))
    async with local_pods(2) as pods, adapter_of(*pods) as adapter:
        first = DesiredDocument(owner="local", generation=0, bucket_bytes=bucket_bytes)
        for pod in pods:
            pod.pod.supervisor.put_desired(first.model_copy(update={"generation": 1}))
        await adapter.update_weights(mixed_tensors(2), version="before")
        pod, other = pods
        trainer = await asyncio.create_subprocess_exec(
            *(sys.executable, str(TRAINER), pod.url, str(pod.run_dir), "killed"),
            str(tmp_path / "killed"), cwd=TRAINER.parents[2], env={"PYTHONPATH": "."},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert await trainer.stdout.readline() == b"middle\n"
            async with asyncio.timeout(20):
                while "load killed" not in pod.engine.calls or (
                    is_mixed and len(pod.models[0]) not in range(1, len(mixed_tensors(1)))
                ):
                    await asyncio.sleep(0.01)
        finally:
            trainer.kill()
            await trainer.wait()
        state = await pod.pod.until(lambda s: s.needs == "killed" and s.phase != "Updating")
        assert state.phase == ("Poisoned" if is_mixed else "Serving")
        assert state.weight_version == (None if is_mixed else "before")
        assert holds(other, "before", mixed_tensors(2))
        await adapter.update_weights(mixed_tensors(3), version="taken-over")
        for each in pods:
            assert holds(each, "taken-over", mixed_tensors(3))
            assert each.state.phase == "Serving"


async def test_two_hundred_updates_leave_nothing_behind() -> None:
    me = psutil.Process()
    tensors = {f"t{i}": torch.randn(256, 256) for i in range(8)}  # 2 MiB

    def used() -> tuple[int, int, int]:
        gc.collect()
        return me.memory_info().rss, me.num_fds(), me.num_threads()

    async with local_pods(2, expected=tensors) as pods, adapter_of(*pods, keep="copy") as adapter:
        before = (0, 0, 0)
        for step in range(200):
            tensors["t0"] += 1
            weights = tensors if step % 2 else pairs(tensors)
            await adapter.update_weights(weights, global_steps=step)
            if step == 40:
                before = used()
        after = used()
        assert holds(pods[1], "step-199", tensors)
        assert len(pods[0].place.segments()) <= 2
    assert after[0] - before[0] < 24 << 20, "a leaked copy a step would be 320 MiB"
    assert after[1] - before[1] <= 2
    assert after[2] - before[2] <= 4


async def test_the_sync_form() -> None:
    async with local_pods() as (pod,):

        def train() -> None:
            with SyncServerAdapter(pod.target, timeout_s=20) as adapter:
                adapter.release()
                adapter.resume(("weights",))
                update = adapter.begin_update(mixed_tensors(1), global_steps=1)
                assert update.wait()[pod.url].weight_version == "step-1"
                adapter.resume()
                assert adapter.resend() == {}

        await asyncio.to_thread(train)
        assert holds(pod, "step-1", mixed_tensors(1))
        assert pod.state.phase == "Serving"


async def test_a_pod_that_ends_is_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers at once what it would have held, and so it went, until its connection was lost."""
    asks, ask = [], keeper.ask_state

    async def counted(*args):
        asks.append(args)
        return await ask(*args)

    monkeypatch.setattr(keeper, "ask_state", counted)
    monkeypatch.setattr(keeper, "_RETRY_S", 0.5)
    async with local_pods() as (pod,), adapter_of(pod, keep="copy") as adapter:
        await adapter.update_weights(mixed_tensors(1), version="v1")
        pod.pod.supervisor.board.close()
        asks.clear()
        await asyncio.sleep(1.2)
        assert len(asks) <= 8
        # and it goes on to watch
        await pod.kill()
        await (await pod.boot()).serving("v1")

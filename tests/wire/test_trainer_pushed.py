"""A trainer pushes to RolloutReplicas: the operator between a fake API server and real supervisors."""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_models import make
from rollout_client.trainer import (
    Asleep,
    Refused,
    ServerAdapter,
    Superseded,
    UpdateFailed,
    keeper,
)
from rollout_pod.weights.fill import spec_of
from tests.support.local_pods import Local
from tests.support.operator_kit import Bench, bench
from tests.support.operator_process import kubeconfig
from tests.support.pushed_replica import adapter_of, replica, target_of
from tests.support.weights import mixed_tensors, same

pytestmark = pytest.mark.timeout(180)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "colocated_trainer.py"


@asynccontextmanager
async def pushed_replica(b: Bench, **settings) -> AsyncIterator[tuple[Local, ServerAdapter]]:
    """A replica and its trainer."""
    async with replica(b) as pod, adapter_of(b, target_of(pod), **settings) as adapter:
        yield pod, adapter


async def test_a_version_is_pushed_and_the_replica_says_so() -> None:
    async with bench() as b, pushed_replica(b) as (pod, adapter):
        for step in (1, 2):
            results = await adapter.update_weights(mixed_tensors(step), global_steps=step)
            result = results["ns/qwen"]
            assert (result.weight_version, result.phase) == (f"step-{step}", "Serving")
            assert result.sent.transport == "shared_memory"
            assert same(pod.models[0], mixed_tensors(step))
            assert b.status()["lastCommitted"]["source"] == {"push": {}}
        assert (await adapter.clear_kv_cache())["ns/qwen"].ok
        assert pod.engine.calls[-1] == "clear"
        await adapter.release()
        with pytest.raises(Asleep):
            await adapter.clear_kv_cache()
        await adapter.resume(("weights",))
        await adapter.update_weights(mixed_tensors(3), global_steps=3)
        await adapter.resume()
        assert same(pod.models[0], mixed_tensors(3))
        with pytest.raises(Refused, match="source is push: hand over the weights"):
            await adapter.update_weights(global_steps=4)
        wrong = {**mixed_tensors(4), "layers.0.norm": torch.randn(3)}
        with pytest.raises(UpdateFailed, match=r"layers\.0\.norm"):
            await adapter.update_weights(wrong, global_steps=4)
        assert pod.state.phase == "Serving"


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["at once", "half a second"])
async def test_a_pushed_update_is_at_most_four_writes_and_tells_what_it_took(
    seconds: float,
) -> None:
    def weights(step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in mixed_tensors(step).items():
            time.sleep(seconds / len(mixed_tensors(step)))
            yield name, tensor

    specs = [spec_of(*pair) for pair in mixed_tensors(1).items()]
    async with bench() as b, pushed_replica(b) as (_, adapter):
        for step in (1, 2):
            await b.quiet()
            start, known = len(b.server.requests), len(b.server.events())
            await adapter.update_weights(weights(step), global_steps=step, manifest=specs)
            await b.until(lambda step=step: b.status().get("weightVersion") == f"step-{step}")
            await b.quiet()
            written = [str(r) for r in b.server.requests[start:] if r.write]
            assert b.server.writes(start).count("PATCH rolloutreplicas/qwen") == 1
            assert len(written) - 1 <= 4, written  # beside the trainer's own
            assert b.server.events()[known:] == [("Normal", "WeightsCommitted")]
        update = b.status()["weightUpdate"]
        assert (update["target"], update["phase"]) == ("step-2", "Committed")
        assert (update["transport"], update["mode"]) == ("shared_memory", "bucketed")
        assert update["bytes"] == sum(spec.nbytes for spec in specs)
        assert update["pausedSeconds"] >= seconds / 2
        assert {"cancel", "transfer", "commit"} <= update["seconds"].keys()
        assert {"load", "wait", "finish"} <= update["seconds"]["steps"].keys()


async def test_two_adapters_race_and_the_last_writer_of_the_replica_wins() -> None:
    reached, go = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in mixed_tensors(1).items():
            reached.set()
            go.wait(20)
            yield pair

    specs = [spec_of(*pair) for pair in mixed_tensors(1).items()]
    async with (
        bench() as b,
        pushed_replica(b, manager="one") as (pod, one),
        adapter_of(b, target_of(pod), manager="two") as two,
    ):
        losing = one.begin_update(slowly, version="v1", manifest=specs)
        await asyncio.to_thread(reached.wait, 20)
        winning = two.begin_update(mixed_tensors(2), version="v2")
        await b.until(lambda: b.server.get("rolloutreplicas", "qwen")["spec"]
                      .get("weightVersion") == "v2")  # fmt: skip
        asyncio.get_running_loop().call_later(0.5, go.set)
        with pytest.raises(Superseded):
            await losing.wait()
        assert (await winning.wait())["ns/qwen"].weight_version == "v2"
        assert same(pod.models[0], mixed_tensors(2))
        assert b.status()["history"][0]["by"] == "two"


async def test_a_pod_that_restarts_is_sent_its_version_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "SETTLE_S", 0.05)
    monkeypatch.setattr(keeper, "_RETRY_S", 0.1)
    async with bench() as b, pushed_replica(b) as (pod, adapter):
        await adapter.update_weights(mixed_tensors(1), global_steps=1)
        await pod.kill()
        await pod.boot(first=None)
        await pod.pod.serving("step-1")
        assert same(pod.models[0], mixed_tensors(1))
        await b.ready("Serving")


async def test_the_colocated_example_trains_pushes_and_parks(tmp_path: Path) -> None:
    """examples/colocated_trainer.py; tests/cluster runs it in a real pod, beside the real engine."""
    make(tmp_path / "base")
    async with bench() as b:
        config = kubeconfig(b.server.url, namespace="ns")
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        expected = load_file(tmp_path / "base" / "model.safetensors")
        async with replica(b, expected=expected) as pod:
            given = {
                "KUBECONFIG": str(tmp_path / "kubeconfig"), "ROLLOUT_REPLICA": "qwen",
                "ROLLOUT_NAMESPACE": "ns", "ROLLOUT_RUN_DIR": str(pod.run_dir),
                "TRAINER_MODEL": str(tmp_path / "base"), "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
            trainer = await asyncio.create_subprocess_exec(
                sys.executable, str(EXAMPLE), env=os.environ | given,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                async with asyncio.timeout(120):
                    first, last, end = [
                        json.loads(await trainer.stdout.readline()) for _ in range(3)
                    ]
                assert end == {"parked": True}
                assert last["loss"] < first["loss"]
                assert pod.state.weight_version == last["version"]
                history = [(u["version"], u["by"]) for u in b.status()["history"][:2]]
                assert history == [(u["version"], "rollout-trainer") for u in (last, first)]
                held = pod.models[0]["model.embed_tokens.weight"]
                assert not torch.equal(held, expected["model.embed_tokens.weight"])
                # what was pushed is lost with the engine; the trainer that parks has it
                await pod.kill()
                await pod.boot(first=None)
                await pod.pod.serving(last["version"])
                assert torch.equal(pod.models[0]["model.embed_tokens.weight"], held)
            finally:
                trainer.terminate()
            assert await trainer.wait() == 0

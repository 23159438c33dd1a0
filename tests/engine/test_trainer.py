"""The trainer's adapter and two whole pods: real engines, real processes."""

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from rollout_client.trainer import PodTarget, SyncServerAdapter
from tests.support.engine_kit import checkpoint, prompts, tensors_of
from tests.support.process import ServeProcess, serve_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(270)]

PROMPT = prompts(1)[0]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
SCRIPT, FSDP = SUPPORT / "trainer_process.py", SUPPORT / "trainer_fsdp.py"


@pytest.fixture(scope="module")
def pods() -> Iterator[list[ServeProcess]]:
    with ExitStack() as stack:
        made = [stack.enter_context(serve_process(checkpoint("dense", 0))) for _ in range(2)]
        for pod in made:
            pod.start()
        for pod in made:
            pod.serving("base")
        yield made


def target(pod: ServeProcess) -> PodTarget:
    return PodTarget.of_run_dir(pod.run_dir, f"http://{pod.admin}")


def says(pod: ServeProcess, seed: int) -> bool:
    """Its next tokens are those that transformers computes with this checkpoint."""
    return pod.is_greedy(checkpoint("dense", seed), PROMPT, pod.generate(PROMPT, 24))


def test_three_versions_over_two_replicas(pods: list[ServeProcess]) -> None:
    with SyncServerAdapter([target(pod) for pod in pods], timeout_s=60) as adapter:
        assert all(says(pod, 0) for pod in pods)
        for seed in (1, 2, 3):
            begun = pods[0].begin(PROMPT, 1500)
            weights = tensors_of(checkpoint("dense", seed))
            results = adapter.update_weights(
                iter(weights.items()) if seed == 2 else weights, global_steps=seed
            )
            assert [r.weight_version for r in results.values()] == [f"step-{seed}"] * 2
            assert {r.sent.transport for r in results.values()} == {"shared_memory"}
            assert begun.result().is_cancel
            for pod in pods:
                assert says(pod, seed)
                rollout = pod.generate(PROMPT, 4)
                assert [(s.version, s.step) for s in rollout.weight_versions] == [
                    (f"step-{seed}", seed)
                ]
        adapter.release(2)
        adapter.resume(("weights",))
        adapter.update_weights(tensors_of(checkpoint("dense", 1)), global_steps=4)
        adapter.resume(("kv_cache",))
        assert all(says(pod, 1) for pod in pods)


def test_a_trainer_is_killed_in_the_middle_and_another_one_takes_over(
    pods: list[ServeProcess],
) -> None:
    pod, other = pods
    held = other.generate(PROMPT, 8).token_ids
    before, served = pod.until(lambda s: s.ready).weight_version, pod.generate(PROMPT, 24).token_ids
    trainer = subprocess.Popen(
        [sys.executable, str(SCRIPT), f"http://{pod.admin}", str(pod.run_dir), "killed",
         str(checkpoint("dense", 2))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=SCRIPT.parents[2],
        env={"PYTHONPATH": "."},
    )  # fmt: skip
    try:
        assert trainer.stdout.readline() == "middle\n"
        pod.until(lambda s: s.phase == "Updating")
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdin.close()
        trainer.stdout.close()
    state = pod.until(lambda s: s.needs == "killed" and s.phase != "Updating")
    # whether a byte was loaded by then decides; a mix is never served
    assert (state.phase, state.weight_version) in (("Poisoned", None), ("Serving", before))
    if state.phase == "Serving":
        assert pod.generate(PROMPT, 24).token_ids == served
    else:
        assert pod.get("/readyz") == 503
    assert other.generate(PROMPT, 8).token_ids == held
    with SyncServerAdapter([target(pod) for pod in pods], timeout_s=60) as adapter:
        adapter.update_weights(tensors_of(checkpoint("dense", 3)), version="taken-over")
        assert all(says(pod, 3) for pod in pods)


@pytest.mark.parametrize("options", [("--keep-state",), ()])
def test_a_pod_that_restarts_is_sent_its_version_again(
    pods: list[ServeProcess], options: tuple[str, ...]
) -> None:
    pod, other = pods
    with SyncServerAdapter([target(pod) for pod in pods], timeout_s=60) as adapter:
        adapter.update_weights(tensors_of(checkpoint("dense", 2)), version=f"kept-{len(options)}")
        pod.kill()
        pod.start(*options)
        state = pod.serving(f"kept-{len(options)}")
        assert state.committed.source.push is not None
        assert says(pod, 2)
        assert says(other, 2)


def test_a_model_that_fsdp_shards_over_two_processes(
    pods: list[ServeProcess], tmp_path: Path
) -> None:
    """It is trained for a step before each push, by both; the engine says what transformers does then."""
    pod, world, base = pods[0], 2, checkpoint("dense", 0)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(FSDP), str(rank), str(world), str(tmp_path / "store"),
             f"http://{pod.admin}", str(pod.run_dir), str(base), str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=FSDP.parents[2],
            env={"PYTHONPATH": ".", "HF_HUB_OFFLINE": "1"},
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        before = tensors_of(base)
        size = sum(tensor.numel() for tensor in before.values())
        for step in (1, 2):
            first, second = (json.loads(rank.stdout.readline()) for rank in ranks)
            assert (first["versions"], second["versions"]) == ([f"step-{step}"], [])
            assert first["sharded"] == first["gathered"] == second["gathered"] == len(before)
            assert first["held"] + second["held"] == size, "each holds a half"
            # one after another: a model is never whole in a trainer's process
            assert max(first["alive"], second["alive"]) <= 4 < len(before) // 5
            assert first["loss"] != second["loss"]
            pushed = tmp_path / f"step-{step}"
            after = tensors_of(pushed)
            assert not any(torch.equal(after[name], before[name]) for name in before)
            rollout = pod.generate(PROMPT, 24)
            assert pod.is_greedy(pushed, PROMPT, rollout)
            assert {(s.version, s.step) for s in rollout.weight_versions} == {
                (f"step-{step}", step)
            }
            before = after
            for rank in ranks:
                rank.stdin.write("\n")
                rank.stdin.flush()
        assert [rank.wait(30) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()


def test_memory_is_flat_over_many_updates(pods: list[ServeProcess]) -> None:
    versions = [tensors_of(checkpoint("dense", seed)) for seed in (1, 2)]
    size = sum(t.numel() * t.element_size() for t in versions[0].values())
    pod = pods[1]
    worker = max(
        psutil.Process(pod.process.pid).children(recursive=True),
        key=lambda p: p.memory_info().rss,
    )

    def used() -> list[int]:
        gc.collect()
        return [p.memory_info().rss for p in (psutil.Process(), worker)]

    with SyncServerAdapter(target(pod), timeout_s=60) as adapter:
        before = [0, 0]
        for step in range(60):
            adapter.update_weights(versions[step % 2], global_steps=100 + step)
            if step == 20:
                before = used()
        after = used()
        assert says(pod, 2)
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert max(grown) < max(8 << 20, 5 * size), f"{grown}; a leak of each update is {40 * size}"

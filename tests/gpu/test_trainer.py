"""The trainer's adapter and a whole pod on one GPU: tensors are read where they lie, or in buckets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.tiny_models import make
from rollout_client.trainer import PodTarget, SyncServerAdapter
from tests.support.engine_kit import tensors_of
from tests.support.process import ServeProcess, serve_process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

ENGINE_ARGS = (
    "--dtype=bfloat16",
    "--max-model-len=2048",
    "--enforce-eager",
    "--gpu-memory-utilization=0.3",
)
PROMPT = list(range(10, 40))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert torch.cuda.is_available(), "this tier needs a GPU"
    folder = tmp_path_factory.mktemp("dense")
    for seed, version in enumerate(("base", "step-1")):
        make(folder / version, seed=seed, hidden=512, dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def pod(versions: Path) -> Iterator[ServeProcess]:
    with serve_process(versions / "base", "--keep-state", engine_args=ENGINE_ARGS) as pod:
        pod.start()
        pod.serving("base")
        yield pod


def on_gpu(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cuda:0") for name, tensor in tensors_of(path).items()}


def test_from_a_state_dict_on_the_gpu_and_from_pairs(pod: ServeProcess, versions: Path) -> None:
    base = pod.generate(PROMPT, 64).token_ids
    weights, other = on_gpu(versions / "step-1"), on_gpu(versions / "base")
    target = PodTarget.of_run_dir(pod.run_dir, f"http://{pod.admin}")
    with SyncServerAdapter(target, timeout_s=60) as adapter:
        (first,) = adapter.update_weights(weights, global_steps=1).values()
        assert (first.sent.transport, first.sent.mode) == ("cuda_ipc", "direct"), first.sent.reason
        stepped = pod.generate(PROMPT, 64).token_ids
        assert stepped != base
        # the first pairs wait in host memory until their names are known; later ones do not
        (second,) = adapter.update_weights(iter(other.items()), global_steps=2).values()
        assert (second.sent.transport, second.sent.mode) == ("shared_memory", "bucketed")
        assert pod.generate(PROMPT, 64).token_ids == base
        (third,) = adapter.update_weights(iter(weights.items()), global_steps=3).values()
        assert (third.sent.transport, third.sent.mode) == ("cuda_ipc", "bucketed"), third.sent
        assert pod.generate(PROMPT, 64).token_ids == stepped
        for name, tensor in weights.items():
            tensor.copy_(other[name])  # in place, as an optimizer does
        adapter.release(2)
        adapter.resume(("weights",))
        adapter.update_weights(weights, global_steps=4)
        adapter.resume()
        assert pod.generate(PROMPT, 64).token_ids == base
        # what was pushed is lost with the process, and sent again
        pod.kill()
        pod.start()
        pod.serving("step-4")
        assert pod.generate(PROMPT, 64).token_ids == base

"""Sleep and wake on a GPU: what the driver calls free shows whether memory was released.

Nothing else may run on the GPU meanwhile. This process' own context is made before it measures.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.gpu_kit import ENGINE_ARGS, PROMPT, fresh_tokens_of, make_versions
from tests.support.process import ServeProcess, serve_process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

GIB = 1 << 30
KV_AT_LEAST = 8 * GIB
"""Of the 0.3 of a GPU of 80 GB or more, what is left beside the small model."""


def free() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of some 400 MB, so that released weights show."""
    folder = tmp_path_factory.mktemp("versions")
    make_versions(folder, "dense", hidden=1024, layers=8, vocab=65536)
    torch.zeros(1, device="cuda")
    return folder


@pytest.fixture(scope="module")
def weight_bytes(versions: Path) -> int:
    size = sum(file.stat().st_size for file in (versions / "base").glob("*.safetensors"))
    assert size > 300 << 20
    return size


@pytest.fixture(scope="module")
def fresh_tokens(versions: Path) -> list[int]:
    return fresh_tokens_of(versions / "step-1")


@pytest.fixture(scope="module")
def pod(versions: Path, fresh_tokens: list[int]) -> Iterator[ServeProcess]:
    with serve_process(versions / "base", engine_args=ENGINE_ARGS) as pod:
        pod.start()
        pod.serving("base")
        pod.generate(PROMPT, 64)  # the first request allocates
        yield pod


def ctl(pod: ServeProcess, *args: str) -> dict:
    done = pod.cli(*args)
    assert done.returncode == 0, f"{done.stderr}\n{pod.tail()}"
    return json.loads(done.stdout)


def test_level_1_releases_and_the_same_version_goes_on(
    pod: ServeProcess, weight_bytes: int
) -> None:
    before = pod.generate(PROMPT, 64).token_ids
    awake = free()
    state = ctl(pod, "sleep")
    asleep = free()
    slept = state["sleep"]
    assert (state["phase"], state["resident"]) == ("Sleeping", [])
    assert slept["released"] and slept["message"] == ""
    assert asleep - awake >= KV_AT_LEAST + 0.9 * weight_bytes
    assert abs(slept["bytes"] - (asleep - awake)) < 0.5 * GIB
    assert (pod.get("/readyz"), pod.get("/healthz")) == (503, 200)

    state = ctl(pod, "wake", "--tag=weights")
    weights_back = free()
    assert asleep - weights_back >= 0.9 * weight_bytes
    assert weights_back - awake >= KV_AT_LEAST, "the cache was taken back, too"
    assert (state["resident"], state["gate"]) == (["weights"], "closed")
    assert pod.get("/readyz") == 200

    ctl(pod, "wake")
    pod.serving("base")
    assert abs(free() - awake) < GIB
    assert pod.generate(PROMPT, 64).token_ids == before


def test_level_2_and_an_update_before_the_cache_wakes(
    pod: ServeProcess, versions: Path, weight_bytes: int, fresh_tokens: list[int]
) -> None:
    before = pod.generate(PROMPT, 64).token_ids
    assert before != fresh_tokens
    awake = free()
    state = ctl(pod, "sleep", "--level=2")
    assert free() - awake >= KV_AT_LEAST + 0.9 * weight_bytes
    assert state["weight_version"] is None and not state["ready"]
    ctl(pod, "wake", "--tag=weights")
    updated = ctl(pod, "update", "step-1", f"--path={versions / 'step-1'}")
    assert (updated["phase"], updated["weight_version"]) == ("Sleeping", "step-1")
    assert free() - awake >= KV_AT_LEAST
    ctl(pod, "wake")
    pod.serving("step-1")
    assert pod.generate(PROMPT, 64).token_ids == fresh_tokens

    ctl(pod, "update", "base")
    ctl(pod, "sleep", "--level=2")
    ctl(pod, "wake")
    pod.serving("base")  # loaded again, from the model's own folder
    assert pod.generate(PROMPT, 64).token_ids == before


def test_only_the_cache_sleeps(pod: ServeProcess, weight_bytes: int) -> None:
    before = pod.generate(PROMPT, 64).token_ids
    awake = free()
    state = ctl(pod, "sleep", "--level=2", "--tag=kv_cache")
    assert free() - awake >= KV_AT_LEAST
    assert (state["resident"], state["weight_version"]) == (["weights"], "base")
    ctl(pod, "sleep", "--level=2")  # more than sleeps
    assert free() - awake >= KV_AT_LEAST + 0.9 * weight_bytes
    ctl(pod, "wake")
    pod.serving("base")
    assert pod.generate(PROMPT, 64).token_ids == before


def test_an_engine_without_sleep_mode_says_so_and_serves_on(versions: Path) -> None:
    args = (*ENGINE_ARGS, "--no-enable-sleep-mode")
    with serve_process(versions / "base", engine_args=args) as pod:
        pod.start()
        pod.serving("base")
        refused = pod.cli("sleep")
        assert refused.returncode == 1
        assert "--no-enable-sleep-mode" in refused.stderr
        assert (pod.get("/readyz"), pod.generate(PROMPT, 8).is_cancel) == (200, False)

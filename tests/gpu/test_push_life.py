"""A trainer's life and death on a GPU: many updates, kill -9, memory that no handle carries."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.rank import Rank, rank
from benchmarks.synthetic import SHAPES, make_tensors
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.session_errors import SessionError
from rollout_pod.weights.trainer import WeightSender

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

WHERE, SHAPE, MB = "cuda:0", "tiny", 1 << 20


@pytest.fixture(scope="module")
def gpu() -> Cuda:
    assert torch.cuda.is_available(), "this tier needs a GPU"
    return Cuda(0)


@pytest.fixture
def there() -> Iterator[Rank]:
    with rank(SHAPE, WHERE) as made:
        yield made


def send(sender: WeightSender, there: Rank, version: str, tensors) -> dict[str, Any]:
    there.expect(version)
    sender.send(version, tensors, on_accepted=there.load, timeout_s=30)
    return there.report()


class Trainer:
    """``tests.support.gpu_sender``."""

    def __init__(self, there: Rank, mode: str, how: str, **environment: str) -> None:
        self._there = there
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.gpu_sender", str(there.socket), SHAPE, "7", mode,
             how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment,
        )  # fmt: skip

    def hear(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, "the trainer has ended"
        return json.loads(line)

    def begin(self, version: str) -> None:
        """Let the rank load what the trainer brings next."""
        session = self.hear()["accepted"]
        self._there.expect(version)
        self._there.load(session)

    def update(self, version: str) -> dict[str, Any]:
        self.begin(version)
        assert self._there.report()["ok"]
        return self.hear()


@contextmanager
def trainer(there: Rank, mode: str, how: str, **environment: str) -> Iterator[Trainer]:
    made = Trainer(there, mode, how, **environment)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made.process.stdin.close()
        made.process.stdout.close()


@pytest.mark.parametrize("how", ["direct", "bucketed", "shared_memory"])
def test_two_hundred_updates_leave_nothing_behind(gpu: Cuda, there: Rank, how: str) -> None:
    settings = {"mode": how} if how != "shared_memory" else {"transport": how}
    sender = WeightSender([there.socket], device=gpu, bucket_bytes=1 << 16, **settings)
    tensors = make_tensors(SHAPES[SHAPE], WHERE, 0)
    for number in range(5):
        send(sender, there, f"warm-{number}", tensors)
    assert there.holds(tensors)  # what that takes is kept by torch
    before = held(there)
    for number in range(200):
        if number % 10 == 9:
            tensors = make_tensors(SHAPES[SHAPE], WHERE, number)  # a model built anew
            torch.cuda.empty_cache()
        else:
            next(iter(tensors.values())).view(torch.int16).add_(1)
        send(sender, there, f"v{number}", tensors)
    assert there.holds(tensors)
    after = held(there)
    sender.close()
    assert after["files"] <= before["files"]
    assert after["shm"] <= before["shm"]
    # tables of addresses are kept, a few kilobytes for each set; the driver gives whole blocks
    assert before["free"] - after["free"] <= 32 * MB
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("rollout-push-")]


def held(there: Rank) -> dict[str, int]:
    """Descriptors of both processes, segments, and the device's free memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    processes = (psutil.Process(), psutil.Process(there.pid))
    return {
        "files": sum(process.num_fds() for process in processes),
        "shm": len(list(Path("/dev/shm").iterdir())),
        "free": torch.cuda.mem_get_info(0)[0],
    }


def test_a_trainer_killed_while_its_gpu_fills_a_bucket(gpu: Cuda, there: Rank) -> None:
    """The rank's own GPU work never waits for another process', which would be for ever."""
    with trainer(there, "bucketed", "hangs") as made:
        assert made.update("v0")["mode"] == "bucketed"
        assert made.update("v1")["reason"] == ""
        made.begin("v2")
        time.sleep(1.0)  # half of the tensors are there, the others behind what does not end
        started = time.monotonic()
        made.process.kill()
        with pytest.raises(RuntimeError, match="sender is gone"):
            there.report()
        assert time.monotonic() - started < 10
    sender = WeightSender([there.socket], device=gpu)
    tensors = make_tensors(SHAPES[SHAPE], WHERE, 3)
    started = time.monotonic()
    for version in ("after-1", "after-2"):
        assert send(sender, there, version, tensors)["ok"]
        assert there.holds(tensors)
    assert time.monotonic() - started < 10
    sender.close()


def test_a_rank_killed_while_it_loads(gpu: Cuda) -> None:
    sender_of = make_tensors(SHAPES[SHAPE], WHERE, 3)
    with rank(SHAPE, WHERE) as first:
        sender = WeightSender([first.socket], device=gpu, mode="bucketed", bucket_bytes=1 << 16)
        for version in ("v0", "v1"):
            send(sender, first, version, sender_of)

        def killed() -> Iterator[tuple[str, torch.Tensor]]:
            for number, pair in enumerate(sender_of.items()):
                if number == len(sender_of) // 2:
                    psutil.Process(first.pid).kill()
                yield pair

        first.expect("v2")
        started = time.monotonic()
        with pytest.raises(SessionError, match="rank 0"):
            sender.send("v2", killed(), on_accepted=first.load, timeout_s=60)
        assert time.monotonic() - started < 10
        sender.close()
    with rank(SHAPE, WHERE) as second:
        again = WeightSender([second.socket], device=gpu, mode="bucketed", bucket_bytes=1 << 16)
        for version in ("v3", "v4"):
            assert send(again, second, version, sender_of)["ok"]
        assert second.holds(sender_of)
        again.close()


@pytest.mark.parametrize(
    ("how", "environment"),
    [
        ("plain", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("cumem", {}),
    ],
)
def test_memory_that_no_handle_carries_goes_bucketed(there: Rank, how: str, environment) -> None:
    with trainer(there, "auto", how, **environment) as made:
        for number in range(3):
            sent = made.update(f"v{number}")
            assert (sent["transport"], sent["mode"]) == ("cuda_ipc", "bucketed")
            assert "pool or from expandable segments" in sent["reason"]
        assert there.holds(make_tensors(SHAPES[SHAPE], WHERE, 7))
        made.process.stdin.write("\n")
        made.process.stdin.flush()
        assert made.process.wait(30) == 0

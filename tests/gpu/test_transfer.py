"""CUDA IPC between two processes: raw handles, the copy kernel, and what cannot be exported."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks.rank import Rank, rank
from benchmarks.synthetic import SHAPES, make_tensors
from rollout_pod.weights.copies import Copy
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.device import DeviceError
from rollout_pod.weights.recording import checksum
from rollout_pod.weights.replay import KernelReplayer, UploadReplayer
from rollout_pod.weights.trainer import WeightSender

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

WHERE = "cuda:0"


@pytest.fixture(scope="module")
def gpu() -> Cuda:
    assert torch.cuda.is_available(), "this tier needs a GPU"
    return Cuda(0)


@pytest.fixture(scope="module", params=["tiny", "tiny-moe"])
def there(request: pytest.FixtureRequest) -> Iterator[tuple[str, Rank]]:
    with rank(request.param, WHERE) as made:
        yield request.param, made


def send(sender: WeightSender, there: Rank, version: str, tensors) -> tuple:
    there.expect(version)
    sent = sender.send(version, tensors, on_accepted=there.load, timeout_s=30)
    return sent, there.report()


@pytest.mark.parametrize("how", ["direct", "bucketed", "shared_memory"])
@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_every_byte_arrives(gpu: Cuda, there, how: str, bucket_bytes: int) -> None:
    shape, rank = there
    settings = {"mode": how} if how != "shared_memory" else {"transport": how}
    sender = WeightSender([rank.socket], device=gpu, bucket_bytes=bucket_bytes, **settings)
    tensors = make_tensors(SHAPES[shape], WHERE, 1)
    for number in range(3):
        for tensor in tensors.values():
            tensor.view(torch.int16).add_(number + 1)
        sent, report = send(sender, rank, f"v{number}", tensors)
        assert sent.transport == ("cuda_ipc" if how != "shared_memory" else how)
        assert sent.mode == ("direct" if how == "direct" else "bucketed")
        if how != "shared_memory":
            assert sent.reason == ""
        assert sent.bytes == report["bytes"]
        assert rank.holds(tensors)
    assert report["path"] == "replayed"
    rank.ask("replay 0")
    sent, report = send(sender, rank, "by-the-loaders", tensors)
    assert report["path"] == "reference"
    assert rank.holds(tensors)
    rank.ask("replay 1")
    sender.close()


def test_moved_tensors_are_found_and_freed_ones_never_read(gpu: Cuda, there) -> None:
    shape, rank = there
    sender = WeightSender([rank.socket], device=gpu, mode="direct")
    tensors = make_tensors(SHAPES[shape], WHERE, 1)
    send(sender, rank, "v0", tensors)
    first = next(iter(tensors))
    tensors[first].data = torch.full_like(tensors[first], 7.0)  # the same object, elsewhere
    torch.cuda.empty_cache()
    send(sender, rank, "v1", tensors)
    assert rank.holds(tensors)
    tensors = make_tensors(SHAPES[shape], WHERE, 2)  # a model built anew
    torch.cuda.empty_cache()
    send(sender, rank, "v2", tensors)
    assert rank.holds(tensors)
    sender.close()


def test_a_rank_waits_for_a_gpu_that_is_slow_to_fill(gpu: Cuda, there) -> None:
    """Messages run ahead of the copies; the copies do not run ahead of each other."""
    shape, rank = there
    sender = WeightSender([rank.socket], device=gpu, mode="bucketed", bucket_bytes=1 << 16)
    tensors = make_tensors(SHAPES[shape], WHERE, 1)
    send(sender, rank, "v0", tensors)

    def late() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            torch.cuda._sleep(2_000_000)  # a millisecond, in which the bucket holds the last one
            yield name, tensor + 1

    for number in range(5):
        sent, report = send(sender, rank, f"v{number + 1}", late())
        assert (sent.mode, report["path"]) == ("bucketed", "replayed")
        assert dict(report["steps"])["filled"] > 0
        assert rank.holds({name: tensor + 1 for name, tensor in tensors.items()})
        for tensor in tensors.values():
            tensor.add_(3)
    sender.close()


def test_an_allocation_has_one_identity(gpu: Cuda) -> None:
    one = gpu.allocate(1 << 20)
    first = gpu.export(one)
    assert first.address == one
    assert gpu.export(one + 4096) == first
    gpu.free(one)
    other = gpu.allocate(1 << 20)
    assert gpu.identities([other]) != [first.identity]
    gpu.free(other)


EXPANDABLE = """
import sys, torch
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.device import NotExportableError
tensor = torch.ones(1 << 20, device="cuda:0")
try:
    Cuda(0).export(tensor.data_ptr())
except NotExportableError as error:
    sys.exit(0 if "expandable" in str(error) else 2)
sys.exit(1)
"""


def test_expandable_segments_are_told_apart(gpu: Cuda) -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE], env=os.environ | setting, timeout=100, check=False
    )
    assert done.returncode == 0


def test_host_memory_is_not_exported(gpu: Cuda) -> None:
    with pytest.raises(DeviceError):
        gpu.export(torch.zeros(4).data_ptr())


@pytest.mark.parametrize("source", ["device", "host"])
def test_copies_of_all_kinds(gpu: Cuda, source: str) -> None:
    dice = random.Random(3)
    size = 1 << 22
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    near = data.to(WHERE) if source == "device" else data
    out = torch.zeros(size, dtype=torch.uint8, device=WHERE)
    want = torch.zeros(size, dtype=torch.uint8)
    copies, at = [], 0
    while at < size - 300_000:
        unit = dice.choice([1, 2, 4, 8, 16])
        width = unit * dice.randrange(1, 500)
        rows = dice.choice([1, 1, 7, 40])
        # a part of a wider tensor, or the whole of it: either side may have a gap, or none
        source_pitch, pitch = (width + unit * dice.randrange(4) for _ in range(2))
        at = -(-at // unit) * unit
        begin = unit * dice.randrange((size - 400_000) // unit)
        if at + rows * pitch > size:
            break
        copies.append(Copy(begin, at, width, rows, source_pitch, pitch))
        for row in range(rows):
            t, s = at + row * pitch, begin + row * source_pitch
            want[t : t + width] = data[s : s + width]
        at += rows * pitch
    assert len(copies) > 20
    replayer = KernelReplayer(WHERE) if source == "device" else UploadReplayer(gpu)
    moved = [
        c._replace(source=c.source + near.data_ptr(), target=c.target + out.data_ptr())
        for c in copies
    ]
    replayer.run(replayer.prepare(moved))
    replayer.wait()
    assert torch.equal(out.cpu(), want)


def test_the_checksum_of_the_gpu_sees_every_bit(gpu: Cuda) -> None:
    tensor = torch.randn(5_000_001, device=WHERE).to(torch.bfloat16)
    want = int(checksum(tensor))
    assert int(checksum(tensor.clone())) == want
    for at in (0, 2_500_000, 5_000_000):
        other = tensor.clone()
        other.view(torch.int16)[at] ^= 1
        assert int(checksum(other)) != want

"""verl's transfer beside ours: the same tensors, the same GPU, the same run.

Takes verl's published package from the folder that ``VERL_PATH`` names. It lies aside, without what
it depends on: only the module that moves weights is imported, since the rest needs Ray and more::

    pip install --no-deps --target /tmp/verl verl==0.9.1
    VERL_PATH=/tmp/verl python -m benchmarks update-verl

Either receiver copies each tensor into parameters that are fused as an engine fuses them; verl's by
``copy_`` into views that were made before. A time is from the sender's call to its end, of the
third and later updates.
"""

import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.rank import Rank, rank
from benchmarks.report import Result, tell
from benchmarks.synthetic import SHAPES, SyntheticLoader, make_tensors, specs
from benchmarks.update import MAIN_MB, MB, WHERE, need_gpu, updates
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.trainer import WeightSender

SHAPE = "qwen3-8b"
DEFAULT_MB = 2048
"""verl's own."""
MODULE = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
INSTALL = """Install verl aside, without its dependencies, and name the folder:
    pip install --no-deps --target /tmp/verl verl==0.9.1
    VERL_PATH=/tmp/verl python -m benchmarks update-verl"""


def run(quick: bool) -> Result:
    """Measure."""
    need_gpu()
    transfer()  # says what is missing before anything is made
    sizes = (MAIN_MB, DEFAULT_MB) if quick else (256, 512, MAIN_MB, DEFAULT_MB)
    count = 5 if quick else 10
    tensors = make_tensors(SHAPES[SHAPE], WHERE, 1)
    rows: list[dict[str, object]] = []
    with rank(SHAPE, WHERE) as there:
        direct = WeightSender([there.socket], device=Cuda(0), mode="direct")
        ours = _ms(direct, there, tensors, count)
        direct.close()
        for size in sizes:
            sender = WeightSender(
                [there.socket], device=Cuda(0), mode="bucketed", bucket_bytes=size * MB
            )
            bucketed = _ms(sender, there, tensors, count)
            sender.close()
            theirs, best = _verl_ms(tensors, size, count, shm=False)
            rows.append(
                {
                    "bucket MB": size, "verl ms": theirs, "its best": best,
                    "ours, bucketed": bucketed, "x": theirs / bucketed,
                    "ours, direct": ours, "x, direct": theirs / ours,
                }
            )  # fmt: skip
            tell(rows[-1])
        if not quick:
            tell(_through_shared_memory(tensors, there))
    by_size = {row["bucket MB"]: row for row in rows}
    ratio = float(by_size[DEFAULT_MB]["x, direct"])  # type: ignore[arg-type]  # a cell is any object
    same = min(
        float(row["x"])  # type: ignore[arg-type]  # as above
        for size, row in by_size.items()
        if size != DEFAULT_MB
    )
    return Result(
        name="update-verl", figure=ours, unit="ms, direct",
        reference=float(by_size[DEFAULT_MB]["verl ms"]),  # type: ignore[arg-type]  # as above
        ratio=ratio, goal=">= 4 x at verl's default bucket, bucketed >= 2.4 x at the same size",
        holds=ratio >= 4 and same >= 2.4, rows=rows,
    )  # fmt: skip


def transfer() -> types.ModuleType:
    """verl's module, without the packages around it.

    Exits with code 3 where it is not to be had, as without a GPU.
    """
    folder = os.environ.get("VERL_PATH")
    if not folder:
        print(f"VERL_PATH is not set. {INSTALL}")
        raise SystemExit(3)
    root = Path(folder) / "verl"
    if not (root.parent / (MODULE.replace(".", "/") + ".py")).is_file():
        print(f"verl 0.9.1 is not in {folder} (VERL_PATH). {INSTALL}")
        raise SystemExit(3)
    parts = MODULE.split(".")[:-1]
    for depth in range(1, len(parts) + 1):
        _hollow(".".join(parts[:depth]), root.parent.joinpath(*parts[:depth]))
    _hollow("verl.utils", root / "utils")
    # the only thing that is called of a module that needs Ray
    utils = types.ModuleType("verl.workers.rollout.utils")
    utils.ensure_async_iterator = _iterate  # type: ignore[attr-defined]  # a module made here
    sys.modules[utils.__name__] = utils
    return importlib.import_module(MODULE)


def _hollow(name: str, folder: Path) -> None:
    """A package whose own code does not run."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


async def _iterate(pairs: Iterable[Any]) -> AsyncIterator[Any]:
    for pair in pairs:
        yield pair


def _through_shared_memory(tensors: dict[str, torch.Tensor], there: Rank) -> dict[str, object]:
    """Out of the trainer's GPU into shared memory and from there into the engine's, by either."""
    sender = WeightSender(
        [there.socket], device=Cuda(0), transport="shared_memory", bucket_bytes=DEFAULT_MB * MB
    )
    ours = _ms(sender, there, tensors, 2) / 1000
    sender.close()
    theirs = _verl_ms(tensors, DEFAULT_MB, 2, shm=True)[0] / 1000
    return {
        "what": f"shared memory, {DEFAULT_MB} MB", "verl s": theirs, "ours s": ours,
        "x": theirs / ours,
    }  # fmt: skip


def _ms(sender: WeightSender, there: Rank, tensors: dict[str, torch.Tensor], count: int) -> float:
    done = updates(sender, there, tensors, count)
    return 1000 * statistics.median(sent.seconds["total"] for sent, _ in done)


def _verl_ms(
    tensors: dict[str, torch.Tensor], size: int, count: int, *, shm: bool
) -> tuple[float, float]:
    """The median and the best."""
    module = transfer()
    with tempfile.TemporaryDirectory(prefix="verl-") as folder, asyncio.Runner() as runner:
        handle = f"ipc://{folder}/sock"
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.update_verl", handle, str(count + 2), str(int(shm))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert json.loads(child.stdout.readline()) == "ready"
            took = []
            for _ in range(count + 2):
                child.stdin.write("\n")
                child.stdin.flush()
                sender = module.BucketedWeightSender(handle, bucket_size_mb=size, use_shm=shm)
                torch.cuda.synchronize()
                started = time.perf_counter()
                runner.run(sender.async_send_weights(iter(tensors.items())))
                took.append(1000 * (time.perf_counter() - started))
                assert json.loads(child.stdout.readline()) == "done"
            child.stdin.close()
            assert child.wait(60) == 0
        finally:
            child.kill()
            child.wait()
    return statistics.median(took[2:]), min(took[2:])


def receive(handle: str, rounds: int, *, shm: bool) -> None:
    """The other process: a line of stdin for each update."""
    module = transfer()
    loader = SyntheticLoader(SHAPES[SHAPE], WHERE, Cuda(0))
    targets = {spec.name: loader.target(spec.name) for spec in specs(SHAPES[SHAPE])}

    def load(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for name, tensor in weights:
            targets[name].copy_(tensor)

    torch.cuda.synchronize()
    print(json.dumps("ready"), flush=True)
    for _ in range(rounds):
        sys.stdin.readline()
        receiver = module.BucketedWeightReceiver(handle, torch.device(WHERE), use_shm=shm)
        receiver.receive_weights(load)
        print(json.dumps("done"), flush=True)


if __name__ == "__main__":
    receive(sys.argv[1], int(sys.argv[2]), shm=sys.argv[3] == "1")

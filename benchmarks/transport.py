"""The shared-memory path on the CPU: fill, ring and checks, beside a plain copy of the bytes."""

import statistics
import time

import torch

from benchmarks.rank import rank
from benchmarks.report import Result
from benchmarks.synthetic import SHAPES, make_tensors
from rollout_pod.weights.trainer import WeightSender

GOAL = 0.5
MB = 1 << 20


def run(quick: bool) -> Result:
    """Measure."""
    rounds = 3 if quick else 10
    rows = []
    with rank("half", "cpu") as there:
        tensors = make_tensors(SHAPES["half"], "cpu", 1)
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        target = [torch.zeros_like(t) for t in tensors.values()]
        for size in (64,) if quick else (48, 64, 256):
            sender = WeightSender([there.socket], bucket_bytes=size * MB)
            plain, alone, loaded = [], [], []
            for number in range(rounds + 2):
                started = time.perf_counter()
                for one, tensor in zip(target, tensors.values(), strict=True):
                    one.copy_(tensor)
                plain.append(time.perf_counter() - started)
                for kind, seconds in (("nothing", alone), ("load", loaded)):
                    version = f"v{number}-{kind}"
                    there.expect(version, kind)
                    sent = sender.send(version, tensors, on_accepted=there.load)
                    there.report()
                    seconds.append(sent.seconds["total"])
            sender.close()
            # the first ones touch pages and record
            memcpy, ring, load = (statistics.median(s[2:]) for s in (plain, alone, loaded))
            rows.append(
                {
                    "bucket MB": size,
                    "memcpy GB/s": nbytes / memcpy / 1e9,
                    "transport GB/s": nbytes / ring / 1e9,
                    "transport / memcpy": memcpy / ring,
                    "with load GB/s": nbytes / load / 1e9,
                }
            )
        assert there.holds(tensors), "the rank holds something else"
    best = max(rows, key=lambda row: row["transport / memcpy"])
    ratio = best["transport / memcpy"]
    return Result(
        name="transport", figure=best["transport GB/s"], unit="GB/s",
        reference=best["memcpy GB/s"], ratio=ratio, goal=f">= {GOAL} of memcpy",
        holds=ratio >= GOAL, rows=rows,
    )  # fmt: skip

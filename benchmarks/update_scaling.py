"""Updates of models from half a gigabyte to sixty, second and later ones of a session, beside one
large copy of the same bytes.
"""

import statistics
from typing import Any

import torch

from benchmarks.rank import rank
from benchmarks.report import Result
from benchmarks.synthetic import SHAPES, make_tensors
from benchmarks.update import MAIN_MB, MB, WHERE, copy_floor_ms, need_gpu, updates
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.trainer import Mode, WeightSender

FROM_TO = ("qwen3-0.25b", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-30b-a3b")
MODES: tuple[Mode, ...] = ("direct", "bucketed")
SHARE, FIXED_MS = 1.1, 2.0
"""Of the direct updates' goal: beside the copy, and for messages, whatever the size."""


def run(quick: bool) -> Result:
    """Measure."""
    need_gpu()
    rows = []
    for shape in FROM_TO:
        rows.append(_row(shape, 5 if quick else 20))
        torch.cuda.empty_cache()  # the next rank is another process
    over = max(row["direct ms"] - SHARE * row["copy ms"] for row in rows)
    last = rows[-1]
    return Result(
        name="update-scaling", figure=last["direct ms"], unit=f"ms, direct, {last['GB']:.1f} GB",
        reference=last["copy ms"], ratio=last["direct ms"] / last["copy ms"],
        goal=f"direct <= {SHARE:g} x one copy + {FIXED_MS:g} ms at every size",
        holds=over <= FIXED_MS, rows=rows,
    )  # fmt: skip


def _row(shape: str, count: int) -> dict[str, Any]:
    tensors = make_tensors(SHAPES[shape], WHERE, 1)
    row: dict[str, Any] = {
        "shape": shape,
        "GB": sum(t.numel() * t.element_size() for t in tensors.values()) / 1e9,
        "tensors": len(tensors),
    }
    with rank(shape, WHERE) as there:
        for mode in MODES:
            sender = WeightSender(
                [there.socket], device=Cuda(0), mode=mode, bucket_bytes=MAIN_MB * MB
            )
            done = updates(sender, there, tensors, count)
            row[f"{mode} ms"] = 1000 * statistics.median(s.seconds["total"] for s, _ in done)
            sender.close()
        assert there.holds(tensors), "the rank holds something else"
    row["copy ms"] = copy_floor_ms(tensors)
    return row

"""Updates of a whole pod that serves 64 requests: what the pod's own state says of each step.

A trainer in this process pushes through the client library into ``rollout-pod serve``, a process of
its own with a real engine: of Qwen3-8B's shape on a GPU, by CUDA IPC; a tiny model on a CPU,
through shared memory. The steps within ``transfer`` are the slowest rank's. The reference is one
large copy of the same bytes; the figure is ``paused``, from gate closed to gate open again, of
which the cancel of the requests in flight is a part.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.pod import measured_model, run_load
from benchmarks.report import Result, tell
from benchmarks.synthetic import SHAPES, make_tensors
from benchmarks.update import WHERE, copy_floor_ms
from rollout_client.trainer import PodTarget, ServerAdapter
from tests.support.engine_kit import tensors_of
from tests.support.process import ServeProcess, serve_process

IN_FLIGHT = 64
MAX_TOKENS = 1900
"""Nobody comes that far."""

RUN_S = 0.3
CALLERS = 8
"""Processes that share the callers."""

Tensors = Mapping[str, torch.Tensor]


def run(quick: bool) -> Result:
    """Measure."""
    count = 3 if quick else 10
    with measured_model() as model:
        path = Path(model.path)
        tensors = _tensors(path)
        floor = copy_floor_ms(tensors) if torch.cuda.is_available() else _memcpy_ms(tensors)
        # an engine takes no updates of weights that it has not read from a checkpoint
        args = tuple(arg for arg in model.args if arg != "--load-format=dummy")
        with serve_process(path, engine_args=args) as pod:
            pod.start()
            pod.until(lambda state: state.phase == "Serving", timeout_s=240)
            rows = asyncio.run(_updates(pod, tensors, count))
    for row in rows:
        tell(row)
    paused = rows[0]["paused ms"]
    return Result(
        name="update-pod", figure=paused, unit=f"ms paused, {IN_FLIGHT} in flight",
        reference=floor, ratio=paused / floor, goal="every update commits",
        holds=True,  # one that does not has raised
    )  # fmt: skip


def _tensors(path: Path) -> Tensors:
    """Those of the checkpoint, which on a GPU are made here: its config is of a larger model."""
    if not torch.cuda.is_available():
        return tensors_of(path)
    tensors = make_tensors(SHAPES["qwen3-8b"], WHERE, 1)
    for tensor in tensors.values():
        tensor.normal_(std=0.02)
    save_file(tensors, path / "model.safetensors")
    return tensors


def _memcpy_ms(tensors: Tensors) -> float:
    one = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
    two = one.clone()
    started = time.perf_counter()
    two.copy_(one)
    return 1000 * (time.perf_counter() - started)


async def _updates(pod: ServeProcess, tensors: Tensors, count: int) -> list[dict[str, Any]]:
    """One row for the tensors where they lie, and one for pairs that come one after another."""
    target = PodTarget.of_run_dir(pod.run_dir, f"http://{pod.admin}")
    rows = []
    async with ServerAdapter(target, keep="nothing", timeout_s=120) as adapter:
        number = 0
        for how in ("state dict", "pairs"):
            taken = []
            for turn in range(count + 2):  # the first records, the second makes the tables
                number += 1
                weights = tensors if how == "state dict" else _pairs(tensors)
                update = await _update(pod, adapter, weights, number)
                if turn >= 2:
                    taken.append(update)
            rows.append({"what": how} | _row(taken))
    return rows


def _pairs(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


async def _update(
    pod: ServeProcess, adapter: ServerAdapter, weights: Any, number: int
) -> dict[str, Any]:
    load = asyncio.create_task(
        run_load(f"http://{pod.data}", IN_FLIGHT, MAX_TOKENS, "cut", processes=CALLERS)
    )
    with pod.ctl() as ctl:
        while ctl.state().unfinished < IN_FLIGHT:
            await asyncio.sleep(0.01)
        await asyncio.sleep(RUN_S)
        started = time.perf_counter()
        (result,) = (await adapter.update_weights(weights, global_steps=number)).values()
        seconds = time.perf_counter() - started
        await load
        state = pod.until(lambda s: s.update is not None and s.update.seconds.paused is not None)
    update = state.update
    assert update is not None
    assert (update.target, update.phase) == (f"step-{number}", "Committed"), update
    return {
        "mode": f"{update.transport}, {update.mode}", "path": state.ranks[0].path,
        "GB": update.bytes / 1e9,
        "call": seconds,
        "sent": result.sent.seconds if result.sent else {},
        "seconds": update.seconds.model_dump(), "steps": dict(update.steps),
    }  # fmt: skip


def _row(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians."""

    def of(part: str) -> dict[str, float]:
        names = [name for name, value in taken[-1][part].items() if value is not None]
        return {n: 1000 * statistics.median(t[part].get(n) or 0.0 for t in taken) for n in names}

    last = taken[-1]
    return (
        {"mode": last["mode"], "path": last["path"], "GB": last["GB"], "updates": len(taken)}
        | {"trainer's call ms": 1000 * statistics.median(t["call"] for t in taken)}
        | {f"{name} ms": ms for name, ms in of("seconds").items()}
        | {f"rank {name} ms": ms for name, ms in of("steps").items()}
        | {f"sender {name} ms": ms for name, ms in of("sent").items()}
    )

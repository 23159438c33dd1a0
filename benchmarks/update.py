"""Updates between two processes on one GPU: a trainer with tensors, a rank with parameters.

The rank is a bare process with the parameters of a real model, fused as an engine fuses them; an
engine adds the call of its workers, which is reported by its own state. Times run from the
sender's call to the report of the rank, on the second and later updates of a session.
"""

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from benchmarks.memory import Memory
from benchmarks.rank import SHM, Rank, rank
from benchmarks.report import Result, tell
from benchmarks.synthetic import SHAPES, copy_ms, make_tensors, specs
from rollout_pod.weights.buckets import make_plan
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.pinned import pin, runs, unpin
from rollout_pod.weights.segment import Segment, address_of
from rollout_pod.weights.sender import Session
from rollout_pod.weights.trainer import SentWeights, WeightSender

WHERE = "cuda:0"
MB = 1 << 20
MAIN_MB = 1024
"""The bucket of the figure that has a goal."""
VERL_MS = {256: 102.0, 512: 58.0, 1024: 47.0, 2048: 40.0}
"""verl 0.9.1's transfer of the Qwen3-8B shape on an H200, by bucket size in MB."""


def need_gpu() -> None:
    """Exit with code 3 where there is none."""
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU, and there is none here")
        raise SystemExit(3)


def updates(
    sender: WeightSender, there: Rank, tensors: Mapping[str, torch.Tensor], count: int
) -> list[tuple[SentWeights, dict[str, Any]]]:
    """The first records, the second makes the tables; the rest is measured."""
    done = []
    for number in range(count + 2):
        version = f"v{number}"
        there.expect(version)
        sent = sender.send(version, tensors, on_accepted=there.load, timeout_s=120)
        done.append((sent, there.report()))
    return done[2:]


def first_update(
    there: Rank,
    tensors: Mapping[str, torch.Tensor],
    mode: Literal["direct", "bucketed"],
) -> tuple[dict[str, float], Memory]:
    """One in a session of its own, which shows the rank where each byte belongs: what it has left
    behind, and what is in use then.
    """
    start = Memory.of([there.pid])
    sender = WeightSender([there.socket], device=Cuda(0), mode=mode, bucket_bytes=MAIN_MB * MB)
    updates(sender, there, tensors, -1)
    sender.close()
    now = Memory.of([there.pid])
    return now.since(start, "left by the first"), now


def _row(name: str, done: list[tuple[SentWeights, dict[str, Any]]]) -> dict[str, object]:
    def middle(of: Callable[[tuple[SentWeights, dict[str, Any]]], float]) -> float:
        return 1000 * statistics.median(map(of, done))

    sent, report = done[-1]
    row: dict[str, object] = {
        "what": name,
        "mode": sent.mode,
        "path": report["path"],
        "GB": sent.bytes / 1e9,
        "ms": middle(lambda each: each[0].seconds["total"]),
    }
    for step in sent.seconds:
        row[step] = middle(lambda each, step=step: each[0].seconds[step])
    for step in dict(report["steps"]):
        row[f"rank {step}"] = middle(lambda each, step=step: dict(each[1]["steps"]).get(step, 0.0))
    row["rank in all"] = middle(lambda each: each[1]["seconds"])
    return row


def direct(quick: bool, shape: str = "qwen3-8b", name: str = "update-direct") -> Result:
    """One copy, out of the trainer's own tensors."""
    need_gpu()
    goal = 32.0 if shape == "qwen3-30b-a3b" else 10.0
    with rank(shape, WHERE) as there:
        tensors = make_tensors(SHAPES[shape], WHERE, 1)
        left, before = first_update(there, tensors, "direct")
        sender = WeightSender([there.socket], device=Cuda(0), mode="direct")
        row = _row(shape, updates(sender, there, tensors, 5 if quick else 20))
        row |= left | Memory.of([there.pid]).since(before, "extra")
        for tensor in tensors.values():
            tensor.view(torch.int16).add_(1)
        updates(sender, there, tensors, -1)
        assert there.holds(tensors), "the rank holds something else"
        sender.close()
        floor = copy_floor_ms(tensors)
    row["floor"] = floor
    tell(row)
    figure = float(row["ms"])  # type: ignore[arg-type]  # a cell of a table is any object
    return Result(
        name=name, figure=figure, unit="ms", reference=floor, ratio=figure / floor,
        goal=f"<= {goal:g} ms", holds=figure <= goal,
    )  # fmt: skip


def moe(quick: bool) -> Result:
    """18,432 small tensors."""
    return direct(quick, "qwen3-30b-a3b", "update-moe")


def bucketed(quick: bool, shape: str = "qwen3-8b") -> Result:
    """Two copies: temporary tensors, passed through two buckets."""
    need_gpu()
    rows = []
    sizes = (MAIN_MB,) if quick else (256, 512, MAIN_MB, 2048)
    with rank(shape, WHERE) as there:
        tensors = make_tensors(SHAPES[shape], WHERE, 1)
        left, before = first_update(there, tensors, "bucketed")
        tell({"what": "the first update"} | left)
        for size in sizes:
            sender = WeightSender(
                [there.socket], device=Cuda(0), mode="bucketed", bucket_bytes=size * MB
            )
            row = _row(f"{size} MB", updates(sender, there, tensors, 5 if quick else 20))
            row |= Memory.of([there.pid]).since(before, "extra")
            row["verl ms"] = VERL_MS[size]
            row["verl / ours"] = VERL_MS[size] / float(row["ms"])  # type: ignore[arg-type]  # as above
            tell(row)
            if size == MAIN_MB:
                tell(_row(f"{size} MB, in turns", _in_turns(sender, there, tensors, quick)))
            sender.close()
            rows.append(row)
        assert there.holds(tensors), "the rank holds something else"
        floor = 2 * copy_floor_ms(tensors)
        alone = copy_ms(WHERE, 200)
        both = there.beside("copy 200", lambda: copy_ms(WHERE, 200))
        gib = sum(t.numel() * t.element_size() for t in tensors.values()) / (1 << 30)
        tell({"what": "two processes copy at once", "alone, GiB": alone, "here": both[1],
               "there": both[0], "both, a model": max(both) * gib})  # fmt: skip
    (main,) = [row for row in rows if row["what"] == f"{MAIN_MB} MB"]
    figure = float(main["ms"])  # type: ignore[arg-type]  # as above
    return Result(
        name="update-bucketed", figure=figure, unit=f"ms, {MAIN_MB} MB", reference=floor,
        ratio=figure / floor, goal="<= 19 ms", holds=figure <= 19.0,
    )  # fmt: skip


def _in_turns(
    sender: WeightSender, there: Rank, tensors: Mapping[str, torch.Tensor], quick: bool
) -> list[tuple[SentWeights, dict[str, Any]]]:
    """As where no GPU can write into shared memory: filling and loading do not overlap."""
    sender._memory._drop_counters()
    sender._memory._uncountable = "for comparison"
    return updates(sender, there, tensors, 5 if quick else 20)


def shm(quick: bool, shape: str = "qwen3-8b") -> Result:
    """Out of a slot of host memory, filled beforehand, as the weights agent holds a version."""
    need_gpu()
    manifest = Manifest("v0", specs(SHAPES[shape]))
    plan = make_plan(manifest.tensors, 256 * MB)
    rows = []
    with rank(shape, WHERE) as there:
        tensors = make_tensors(SHAPES[shape], WHERE, 1)
        before = Memory.of([there.pid])
        slot = Segment.create(SHM, f"bench-{uuid.uuid4().hex}", plan.nbytes)
        link = Session("first", [there.socket], SHM, threading.Event())
        try:
            pins: list[int] = []
            device = Cuda(0)
            pin(device, address_of(slot.map), slot.size, pins)
            for offset, tensor in zip(plan.offsets, tensors.values(), strict=True):
                data = tensor.reshape(-1).view(torch.uint8)
                view = torch.frombuffer(slot.map, dtype=torch.uint8, count=len(data), offset=offset)
                at = 0
                for _, size in runs(view.data_ptr(), len(data)):
                    view[at : at + size].copy_(data[at : at + size])
                    at += size
            unpin(device, pins)
            for number in range(4 if quick else 8):
                version = f"v{number}"
                there.expect(version)
                started = time.perf_counter()
                session = uuid.uuid4().hex
                link.renew(session)
                link.greet(30, slot)
                link.offer(manifest.renamed(version), 30)
                mapping = time.perf_counter()
                link.map(120, segments=[slot.name])
                mapped = time.perf_counter() - mapping
                there.load(session)
                deadline = time.monotonic() + 120
                for bucket in plan.buckets:
                    link.reserve(deadline)
                    link.push(bucket, segment=slot.name, base=bucket.start)
                link.finish(deadline)
                took = time.perf_counter() - started
                report = there.report()
                rows.append(
                    {"update": version, "path": report["path"], "s": took, "map s": mapped,
                     "GB/s": manifest.nbytes / took / 1e9,
                     **{f"rank {step} s": seconds for step, seconds in report["steps"]}}
                )  # fmt: skip
                tell(rows[-1])
            assert there.holds(tensors), "the rank holds something else"
            used = Memory.of([there.pid]).since(before, "extra")
            tell({"what": "one slot", "model MB": manifest.nbytes / MB} | used)
        finally:
            link.close()
            slot.close()
    figure = statistics.median(row["s"] for row in rows[2:])
    return Result(
        # no figure of verl's as a reference: its time includes filling the shared memory
        name="update-shm", figure=figure, unit="s", reference=None, ratio=None,
        goal="<= 0.35 s", holds=figure <= 0.35,
    )  # fmt: skip


def copy_floor_ms(tensors: Mapping[str, torch.Tensor]) -> float:
    """One large copy of as many bytes, or of a part where there is no room, scaled."""
    nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
    part = min(nbytes, int(torch.cuda.mem_get_info(0)[0] * 0.4))
    one = torch.empty(part, dtype=torch.uint8, device=WHERE)
    two = torch.empty_like(one)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        two.copy_(one)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 1000 * best * nbytes / part

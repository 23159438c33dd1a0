"""Mixed load, pauses and updates against a served pod: nothing lost, nothing mixed, nothing grows.

The pod is ``rollout-pod serve`` with the real engine and agent, in processes of its own. Callers
come by all routes, leave in the middle and are deleted, while cycle after cycle pauses, resumes or
updates; every token is compared with the greedy one of transformers under the version of its span.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil

from benchmarks.report import Result
from benchmarks.soak_load import Load
from benchmarks.soak_pod import SoakedPod
from examples.tiny_models import make
from tests.support.process import ServeProcess, serve_process

CYCLES: Final = 1000
CALLERS: Final = 12
GROWTH: Final = 0.05
"""Resident memory, last quarter to first quarter of the time after the warm-up."""
WARM_UP: Final = 0.2
"""Share of the cycles that is not looked at: caches and pools fill."""
ENGINE_ARGS: Final = (
    "--dtype=float32", "--max-model-len=2048", "--max-num-seqs=64",
    # the memory of a KV block is there once it was used: few of them are soon all there
    "--num-gpu-blocks-override=64",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """What the pod held at one moment."""

    cycle: int
    fds: float
    tasks: float
    pod_bytes: float
    engine_bytes: float


@dataclass
class Soaked:
    """What one run saw."""

    seconds: float
    pauses: int
    updates: int
    load: Load
    before: Sample
    after: Sample
    registry: float
    """Requests that the pod still knows of after the load."""
    rested_with: int
    """Requests that were in the engine when the pod said Paused; 0 is right."""
    samples: list[Sample] = field(default_factory=list)

    def growth(self, of: str) -> tuple[float, float]:
        """Medians of the first and of the last quarter after the warm-up."""
        warm = [s for s in self.samples if s.cycle >= WARM_UP * (self.pauses + self.updates)]
        values = [getattr(s, of) for s in warm]
        quarter = max(1, len(values) // 4)
        return statistics.median(values[:quarter]), statistics.median(values[-quarter:])

    @property
    def problems(self) -> list[str]:
        """What must not be; empty where all held."""
        load = self.load
        found = [
            f"{count} {what}"
            for what, count in (
                ("tokens lost", load.lost), ("tokens of another version", load.mixed),
                ("wrong answers", len(load.wrong)), ("requests left", self.registry),
                ("requests at rest", self.rested_with),
                ("file descriptors more", max(0.0, self.after.fds - self.before.fds)),
                ("tasks more", max(0.0, self.after.tasks - self.before.tasks)),
            )
            if count
        ]  # fmt: skip
        for of in ("pod_bytes", "engine_bytes"):
            first, last = self.growth(of)
            if last > first * (1 + GROWTH):
                found.append(f"{of} grew from {first / 2**20:.0f} to {last / 2**20:.0f} MiB")
        return found

    def rows(self) -> list[dict[str, object]]:
        """The table."""
        load, before, after = self.load, self.before, self.after
        pod, engine = self.growth("pod_bytes"), self.growth("engine_bytes")
        figures: dict[str, object] = {
            "minutes": self.seconds / 60, "pauses": self.pauses, "updates": self.updates,
            "requests": load.requests, "of them cut and continued": load.continued,
            "left or deleted": load.left, "tokens": load.tokens, "tokens checked": load.checked,
            "tokens lost": load.lost, "tokens of another version": load.mixed,
            "wrong answers": len(load.wrong), "requests left in the registry": self.registry,
            "file descriptors before / after": f"{before.fds:.0f} / {after.fds:.0f}",
            "asyncio tasks before / after": f"{before.tasks:.0f} / {after.tasks:.0f}",
            "pod MiB, first / last quarter": f"{pod[0] / 2**20:.1f} / {pod[1] / 2**20:.1f}",
            "engine MiB, both": f"{engine[0] / 2**20:.1f} / {engine[1] / 2**20:.1f}",
        }  # fmt: skip
        return [{"what": what, "figure": figure} for what, figure in figures.items()]


def run(quick: bool, *, minutes: float | None = None) -> Result:
    """Soak for ``minutes``, else for a thousand cycles (``quick``: half a minute)."""
    with TemporaryDirectory(prefix="soak-") as name:
        versions = Path(name)
        for seed, version in enumerate(("base", "step-1")):
            make(versions / version, seed=seed)
        source = f"--source={versions}/{{version}}"
        with serve_process(versions / "base", source, engine_args=ENGINE_ARGS) as process:
            process.start()
            process.serving("base")
            seconds = 30.0 if quick and minutes is None else (minutes or 60.0) * 60
            cycles = CYCLES if minutes is None else None
            soaked = asyncio.run(soak(process, versions, seconds=seconds, cycles=cycles))
    problems = soaked.problems
    for problem in (*problems, *soaked.load.wrong[:5]):
        print(f"soak: {problem}")
    return Result(
        name="soak", figure=soaked.pauses + soaked.updates, unit="pauses and updates under load",
        reference=None, ratio=None,
        goal=f"nothing lost, mixed or left; memory grows <= {GROWTH:.0%}",
        holds=not problems, rows=soaked.rows(),
    )  # fmt: skip


async def soak(
    process: ServeProcess, versions: Path, *, seconds: float, cycles: int | None = None
) -> Soaked:
    """Soak a pod that serves ``base`` until ``seconds`` or ``cycles`` are over.

    ``versions`` holds the checkpoints ``base`` and ``step-1``.
    """
    assert process.process
    main = psutil.Process(process.process.pid)
    load = Load(f"http://{process.data}", versions)
    samples: list[Sample] = []
    pauses = updates = rested_with = 0
    started = time.monotonic()
    async with SoakedPod(process) as pod:

        async def sample() -> Sample:
            seen = await pod.metrics()
            return Sample(
                pauses + updates, seen["process_open_fds"], seen["rollout_asyncio_tasks"],
                seen["process_resident_memory_bytes"], await asyncio.to_thread(_children, main),
            )  # fmt: skip

        await load.run(CALLERS, seconds=3.0)  # pools, caches and threads are made
        await pod.update("step-1")
        await pod.update("base")
        before = await _settled(sample)
        ending = started + seconds
        running = asyncio.create_task(load.run(CALLERS, seconds=None))
        while time.monotonic() < ending and (cycles is None or pauses + updates < cycles):
            if running.done():
                break
            number = pauses + updates
            if number % 7 == 0:
                await pod.interrupt(("abort", "keep", "drain")[number // 7 % 3])
            if number % 5 == 4:
                await pod.update("base" if updates % 2 else "step-1")
                updates += 1
            else:
                rested_with += await pod.pause()
                await pod.resume()
                pauses += 1
            if number % 10 == 0:
                samples.append(await sample())
        load.stop()
        await running
        after = await _settled(sample)
        seen = await pod.metrics()
    registry = seen["rollout_unfinished"] + seen["rollout_parked"]
    seconds = time.monotonic() - started
    await asyncio.to_thread(load.check)
    return Soaked(seconds, pauses, updates, load, before, after, registry, rested_with, samples)


async def _settled(sample: Callable[[], Awaitable[Sample]]) -> Sample:
    """What it holds when nobody asks anything: closed connections take a moment to be noticed."""
    best = await sample()
    for _ in range(20):
        await asyncio.sleep(0.1)
        seen = await sample()
        if seen.fds >= best.fds and seen.tasks >= best.tasks:
            return best
        best = seen
    return best


def _children(main: psutil.Process) -> float:
    """Resident bytes of the pod's processes but its own: the engine and the agent."""
    return float(sum(each.memory_info().rss for each in main.children(recursive=True)))

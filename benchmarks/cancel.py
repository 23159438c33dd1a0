"""Cancel with many requests in flight: until the last partial reached its HTTP caller.

The reference, in the same run and on the same engine: the moment at which the last bare
``generate()`` of vLLM ends after ``pause_generation(mode="abort")``. Medians of as many rounds as
fit into two minutes.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.pod import SAMPLING, MeasuredPod, measured_model, measured_pod, run_load
from benchmarks.report import Result, percentile
from benchmarks.rounds import TimeBudget
from rollout_pod.engine.base import EngineRequest

MAX_TOKENS = 1900
"""Nobody comes that far: each has some 100 tokens when it is cut."""

RUN_S = 0.15
GOAL = 1.2


@dataclass
class Round:
    """One cancel."""

    seconds: float
    tokens: int
    lost: int
    closed: float = 0.0
    """Seconds until the gate was closed."""
    cancel: float = 0.0
    """Seconds that the pod itself took from then until every caller had been answered."""


CALLERS = 8
"""Processes that share the callers: one alone would take longer to read than the pod to write."""


def run(quick: bool, *, front_ends: int = 1) -> Result:
    """Measure."""
    return uvloop.run(_measure(quick, front_ends))


async def _measure(quick: bool, front_ends: int) -> Result:
    budget = TimeBudget(45.0 if quick else 105.0)
    sizes = ((64, 0.3), (256, 0.5), (1000, 1.0))[: 1 if quick else 3]
    rows = []
    with measured_model() as model:
        async with measured_pod(model, front_ends=front_ends) as pod:
            for size, share in sizes:
                rounds = budget.rounds(3 if quick else 10, share=share)
                bare, ours = [], []
                for _ in rounds:
                    bare.append(await _bare(pod, size))
                    ours.append(await _http(pod, size))
                if rounds.done:
                    rows.append({"front ends": front_ends} | _row(size, bare, ours))
    judged = [row for row in rows if row["in flight"] <= 256]  # 1,000 are reported, not judged
    worst = max(row["ratio"] for row in judged)
    lost = sum(row["lost"] for row in rows)
    last = judged[-1]
    return Result(
        name="cancel", figure=last["ours ms"], unit=f"ms with {last['in flight']} in flight",
        reference=last["bare ms"], ratio=worst, goal=f"<= {GOAL} x bare, 0 tokens lost",
        holds=worst <= GOAL and lost == 0, rows=rows,
    )  # fmt: skip


def _row(size: int, bare: Sequence[Round], ours: Sequence[Round]) -> dict[str, Any]:
    """Medians, and of how many rounds."""
    mine = percentile([r.seconds for r in ours], 0.5)
    base = percentile([r.seconds for r in bare], 0.5)
    return {
        "in flight": size, "rounds": len(ours), "ours ms": mine * 1e3, "bare ms": base * 1e3,
        "closed ms": percentile([r.closed for r in ours], 0.5) * 1e3,
        "cancel ms": percentile([r.cancel for r in ours], 0.5) * 1e3,
        "ratio": mine / base, "tokens": sum(r.tokens for r in ours),
        "lost": sum(r.lost for r in ours),
    }  # fmt: skip


async def _bare(pod: MeasuredPod, size: int) -> Round:
    """vLLM alone, in the same process."""
    engine = pod.engine
    params = engine.sampling_params(SAMPLING, max_tokens=MAX_TOKENS)
    runs = [
        asyncio.create_task(
            engine.generate(
                EngineRequest(f"bare{i}-{time.monotonic_ns()}", [3 + i % 900, 5, 7], params)
            )
        )
        for i in range(size)
    ]
    await asyncio.sleep(RUN_S)
    started = time.perf_counter()
    pause = asyncio.create_task(engine.pause())
    outputs = await asyncio.gather(*runs)
    seconds = time.perf_counter() - started
    await pause
    await engine.resume()
    return Round(seconds, sum(len(o.token_ids) for o in outputs), 0)


async def _http(pod: MeasuredPod, size: int) -> Round:
    """Through the data port, to callers in another process: each has its partial."""
    supervisor = pod.supervisor
    document = supervisor.board.desired
    assert document
    before = await _returned_by_cuts(pod)
    load = asyncio.create_task(run_load(pod.url, size, MAX_TOKENS, "cut", processes=CALLERS))
    while supervisor.gate.unfinished < size:
        await asyncio.sleep(0.001)
    await asyncio.sleep(RUN_S)
    cancels = _cancel_seconds(pod)
    started, started_at = time.monotonic(), time.time()
    supervisor.put_desired(
        document.model_copy(update={"paused": True, "generation": document.generation + 1})
    )
    answers = await load
    counted = await _returned_by_cuts(pod) - before
    while not supervisor.board.state.idle:
        await asyncio.sleep(0.005)
    closed_at = supervisor.gate.changed_at
    supervisor.put_desired(
        document.model_copy(update={"paused": False, "generation": document.generation + 2})
    )
    while not supervisor.gate.is_open:
        await asyncio.sleep(0.005)
    last = max(answer["last"] for answer in answers)
    tokens = sum(answer["tokens"] for answer in answers)
    return Round(
        last - started, tokens, int(counted) - tokens, closed=closed_at - started_at,
        cancel=_cancel_seconds(pod) - cancels,
    )  # fmt: skip


def _cancel_seconds(pod: MeasuredPod) -> float:
    registry = pod.supervisor.metrics.registry
    return registry.get_sample_value("rollout_cancel_seconds_sum") or 0.0


async def _returned_by_cuts(pod: MeasuredPod) -> float:
    """Tokens that the pod says it returned to cut callers, by all of its front ends."""
    async with aiohttp.ClientSession() as http, http.get(f"{pod.url}/metrics") as answer:
        text = await answer.text()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "rollout_generated_tokens_total" and sample.labels["cut"] == "true"
    )

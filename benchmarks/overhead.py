"""Tokens a second through the data port, beside bare ``AsyncLLM`` in the same process and run."""

import asyncio
import time
from typing import Any

from benchmarks.pod import SAMPLING, MeasuredPod, measured_pod, run_load
from benchmarks.report import Result, percentile

GOAL = 0.95
AT = 64


def run(quick: bool) -> Result:
    """Measure."""
    return asyncio.run(_measure(quick))


async def _measure(quick: bool) -> Result:
    sizes = (AT,) if quick else (1, AT, 256)
    tokens, rounds = (100, 2) if quick else (200, 3)
    rows = []
    async with measured_pod() as pod:
        await _bare(pod, 8, 8)  # what is made at the first request is made
        for size in sizes:
            # one after the other, so that a machine that slows down slows all of them
            kinds: dict[str, list[float]] = {"bare": [], "http": [], "stream": []}
            for _ in range(rounds):
                kinds["bare"].append(await _bare(pod, size, tokens))
                kinds["http"].append(await _http(pod, size, tokens, "whole"))
                kinds["stream"].append(await _http(pod, size, tokens, "stream"))
            best = {kind: percentile(values, 0.5) for kind, values in kinds.items()}
            rows.append(
                {
                    "concurrent": size,
                    "bare tok/s": best["bare"],
                    "http tok/s": best["http"],
                    "http / bare": best["http"] / best["bare"],
                    "stream tok/s": best["stream"],
                    "stream / bare": best["stream"] / best["bare"],
                }
            )
    (main,) = [row for row in rows if row["concurrent"] == AT]
    ratio = main["http / bare"]
    return Result(
        name="overhead", figure=main["http tok/s"], unit=f"tokens/s, {AT} concurrent",
        reference=main["bare tok/s"], ratio=ratio, goal=f">= {GOAL} of bare AsyncLLM",
        holds=ratio >= GOAL, rows=rows,
    )  # fmt: skip


async def _bare(pod: MeasuredPod, size: int, tokens: int) -> float:
    llm = pod.engine._llm
    params = pod.engine.sampling_params(SAMPLING, max_tokens=tokens)
    turn = asyncio.Semaphore(size)

    async def one(i: int) -> int:
        prompt: dict[str, Any] = {"prompt_token_ids": [3 + i % 900, 5, 7, 11]}
        async with turn:
            final = None
            async for output in llm.generate(prompt, params, f"bare-{i}-{time.monotonic_ns()}"):
                final = output
            assert final is not None
            return len(final.outputs[0].token_ids)

    started = time.perf_counter()
    counts = await asyncio.gather(*(one(i) for i in range(2 * size)))
    return sum(counts) / (time.perf_counter() - started)


async def _http(pod: MeasuredPod, size: int, tokens: int, kind: str) -> float:
    document = await run_load(pod, size, tokens, kind)
    assert document["tokens"] == 2 * size * tokens
    return float(document["tokens"] / document["seconds"])

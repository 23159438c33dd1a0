"""Tokens a second through the data port, beside bare ``AsyncLLM`` in the same process and run, and
beside vLLM's own server with its token route.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import uvloop

from benchmarks.load import budgets, prompt
from benchmarks.pod import SAMPLING, MeasuredPod, measured_pod, run_load
from benchmarks.report import Result, percentile
from benchmarks.vllm_server import vllm_server

GOAL = 0.95
AT = 64


def run(quick: bool, *, front_ends: int = 1) -> Result:
    """Measure."""
    return uvloop.run(_measure(quick, front_ends))


async def _measure(quick: bool, front_ends: int) -> Result:
    sizes = (AT,) if quick else (1, AT, 256)
    tokens, rounds = (100, 2) if quick else (200, 3)
    rows = []
    async with AsyncExitStack() as stack:
        pod = await stack.enter_async_context(measured_pod(front_ends=front_ends))
        urls = {"http": pod.url, "stream": pod.url}
        if not quick:
            urls["vllm serve"] = await stack.enter_async_context(vllm_server(pod))
        await _bare(pod, 8, 8)  # what is made at the first request is made
        for size in sizes:
            # one after the other, so that a machine that slows down slows all of them
            kinds: dict[str, list[float]] = {"bare": []} | {kind: [] for kind in urls}
            for _ in range(rounds if size > 1 else 1):
                kinds["bare"].append(await _bare(pod, size, tokens))
                for kind, url in urls.items():
                    kinds[kind].append(await _http(url, size, tokens, kind))
            rate = {kind: percentile(values, 0.5) for kind, values in kinds.items()}
            row: dict[str, Any] = {
                "front ends": front_ends, "concurrent": size, "bare tok/s": rate["bare"],
            }  # fmt: skip
            for kind in urls:
                row |= {f"{kind} tok/s": rate[kind], f"{kind} / bare": rate[kind] / rate["bare"]}
            rows.append(row)
    (main,) = [row for row in rows if row["concurrent"] == AT]
    ratio = main["http / bare"]
    holds = ratio >= GOAL and main["http tok/s"] >= main.get("vllm serve tok/s", 0.0)
    return Result(
        name="overhead", figure=main["http tok/s"], unit=f"tokens/s, {AT} concurrent",
        reference=main["bare tok/s"], ratio=ratio,
        goal=f">= {GOAL} of bare AsyncLLM, and no less than vllm serve", holds=holds, rows=rows,
    )  # fmt: skip


async def _bare(pod: MeasuredPod, size: int, tokens: int) -> float:
    llm = pod.engine._llm
    turn = asyncio.Semaphore(size)

    async def one(i: int, tokens: int) -> int:
        params = pod.engine.sampling_params(SAMPLING, max_tokens=tokens)
        async with turn:
            final = None
            name = f"bare-{i}-{time.monotonic_ns()}"
            async for output in llm.generate({"prompt_token_ids": prompt(i)}, params, name):
                final = output
            assert final is not None
            return len(final.outputs[0].token_ids)

    started = time.perf_counter()
    counts = await asyncio.gather(*(one(i, n) for i, n in enumerate(budgets(size, tokens))))
    return sum(counts) / (time.perf_counter() - started)


async def _http(url: str, size: int, tokens: int, kind: str) -> float:
    names = {"http": "whole", "stream": "stream", "vllm serve": "vllm"}
    (document,) = await run_load(url, size, tokens, names[kind])
    return float(document["tokens"] / document["seconds"])

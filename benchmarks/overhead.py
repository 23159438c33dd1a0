"""Tokens a second through the data port, beside bare ``AsyncLLM`` in the same process and run, and
beside vLLM's own server with its token route. Medians of as many rounds as fit into four minutes.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import uvloop

from benchmarks.load import budgets, prompt
from benchmarks.pod import SAMPLING, MeasuredPod, measured_model, measured_pod, run_load
from benchmarks.report import Result, percentile
from benchmarks.rounds import TimeBudget
from benchmarks.vllm_server import vllm_server

GOAL = 0.95
AT = 64
TOKENS = 100
"""Of a rollout, on average."""


def run(quick: bool, *, front_ends: int = 1) -> Result:
    """Measure."""
    return uvloop.run(_measure(quick, front_ends))


async def _measure(quick: bool, front_ends: int) -> Result:
    budget = TimeBudget(50.0 if quick else 215.0)
    rows = []
    async with AsyncExitStack() as stack:
        model = stack.enter_context(measured_model())
        theirs = None if quick else await stack.enter_async_context(vllm_server(model))
        pod = await stack.enter_async_context(measured_pod(model, front_ends=front_ends))
        urls = {"http": pod.url, "stream": pod.url}
        if theirs is not None:
            urls["vllm serve"] = await theirs.ready()
        await _bare(pod, 8, 8)  # what is made at the first request is made
        for size, most, share in ((AT, 5, 0.5), (1, 3, 0.35), (256, 3, 1.0))[: 1 if quick else 3]:
            rounds = budget.rounds(most, share=share)
            # one after the other, so that a machine that slows down slows all of them
            kinds: dict[str, list[float]] = {"bare": []} | {kind: [] for kind in urls}
            for _ in rounds:
                kinds["bare"].append(await _bare(pod, size, TOKENS))
                for kind, url in urls.items():
                    kinds[kind].append(await _http(url, size, TOKENS, kind))
            if rounds.done:
                rows.append({"front ends": front_ends} | _row(size, kinds))
    main = rows[0]
    ratio = main["http / bare"]
    holds = ratio >= GOAL and main["http tok/s"] >= main.get("vllm serve tok/s", 0.0)
    return Result(
        name="overhead", figure=main["http tok/s"], unit=f"tokens/s, {AT} concurrent",
        reference=main["bare tok/s"], ratio=ratio,
        goal=f">= {GOAL} of bare AsyncLLM, and no less than vllm serve", holds=holds, rows=rows,
    )  # fmt: skip


def _row(size: int, kinds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, and of how many rounds."""
    rate = {kind: percentile(values, 0.5) for kind, values in kinds.items()}
    row: dict[str, Any] = {
        "concurrent": size, "rounds": len(kinds["bare"]), "bare tok/s": rate.pop("bare"),
    }  # fmt: skip
    for kind, value in rate.items():
        row |= {f"{kind} tok/s": value, f"{kind} / bare": value / row["bare tok/s"]}
    return row


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

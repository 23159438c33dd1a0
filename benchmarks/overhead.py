"""Tokens a second through the data port, beside bare ``AsyncLLM`` in the same process and run, and
beside vLLM's own server with its token route: as a process with an engine of its own, and over the
pod's engine, where only the server differs. As many rounds as fit into the time; in a round each is
measured once, and the ratios are those of one round, so that what slows the machine for a while
slows all sides. One measurement differs from the next by a tenth, and one engine from its twin by
as much. So most of the time goes to ``AT`` callers, where the goals are, and there to ours beside
vLLM's server: the rest is measured in one round of ``WHOLE_EVERY`` only.

Each step is a CUDA graph on a GPU, as where the model is compiled. Where only those are that hold
no prompt, a step with one costs a multiple, and it is the server that answers sooner which looks
the slower one: its callers come back one by one, so that more of the steps hold a prompt.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import psutil
import torch
import uvloop

from benchmarks.load import budgets, prompt
from benchmarks.pod import SAMPLING, MeasuredPod, Shape, measured_model, measured_pod, run_load
from benchmarks.report import Result, median_within
from benchmarks.rounds import Rounds, TimeBudget, rotated
from benchmarks.vllm_app import vllm_app
from benchmarks.vllm_server import vllm_server

GOAL = 0.95
AT = 64
SIZES = ((AT, 200, 0.85), (1, 5, 0.4), (256, 5, 0.9))
"""Callers, how many rounds at most, and the share of the time that is left."""
TOKENS = 200
"""Of a rollout, on average."""
SHORT = 100
"""On a CPU, which would be through with two rounds; and to be quick."""
WHOLE, STREAM, BARE = "http", "stream", "bare"
THEIRS = "vllm serve"
SAME = "vllm's app"
"""Over the pod's engine, in the pod's process."""
SERVERS = (SAME, THEIRS)
WHOLE_EVERY = 2

Kinds = Mapping[str, Callable[[int, int], Awaitable[float]]]
"""What is measured, by name: takes the callers and the mean tokens, gives tokens a second."""


def run(quick: bool, *, front_ends: int = 1, shape: Shape = "8b") -> Result:
    """Measure."""
    return uvloop.run(_measure(quick, front_ends, shape))


async def _measure(quick: bool, front_ends: int, shape: Shape) -> Result:
    budget = TimeBudget(50.0 if quick else 330.0)
    rows = []
    is_short = quick or not torch.cuda.is_available()
    async with AsyncExitStack() as stack:
        model = stack.enter_context(measured_model(shape))
        theirs = None if quick else await stack.enter_async_context(vllm_server(model))
        pod = await stack.enter_async_context(measured_pod(model, front_ends=front_ends))
        urls = {WHOLE: pod.url, STREAM: pod.url}
        if front_ends == 1:
            urls[SAME] = await stack.enter_async_context(vllm_app(pod, model))
        if theirs is not None:
            urls[THEIRS] = await theirs.ready()
        kinds: Kinds = {BARE: lambda size, tokens: _bare(pod, size, tokens)} | {
            kind: lambda size, tokens, kind=kind, url=url: _http(url, size, tokens, kind)
            for kind, url in urls.items()
        }
        process = {THEIRS: psutil.Process(theirs.process.pid)} if theirs is not None else {}
        spent: dict[str, float] = {}
        counted = {
            kind: _counted(measure, process.get(kind, psutil.Process()), spent, kind)
            for kind, measure in kinds.items()
        }
        tokens = SHORT if is_short else TOKENS
        for size, most, share in SIZES[: 1 if quick else None]:
            for measure in kinds.values():  # what is made at the first request is made
                await measure(size, 8)
            spent.clear()
            rounds = budget.rounds(most, share=share)
            if measured := await _rounds(counted, size, tokens, rounds):
                rows.append({"front ends": front_ends, "tokens": tokens} | _row(size, measured))
                if front_ends == 1:
                    count = sum(budgets(size, tokens))
                    rows[-1] |= {
                        f"{kind} CPU us/token": 1e6 * spent[kind] / count / _times(measured, kind)
                        for kind in kinds
                    }
    if not rows:
        raise SystemExit("not one round fitted into the time: the machine has other work")
    main = rows[0]
    ratio = main["http / bare"]
    slower = [kind for kind in SERVERS if main.get(f"at most / {kind}", 1.0) < 1.0]
    holds = ratio >= GOAL and not slower
    return Result(
        name="overhead", figure=main["http tok/s"], unit=f"tokens/s, {AT} concurrent",
        reference=main["bare tok/s"], ratio=ratio,
        goal=f">= {GOAL} of bare AsyncLLM, no less than vLLM's server, as far as rounds tell",
        holds=holds, rows=rows,
    )  # fmt: skip


def _counted(
    measure: Callable[[int, int], Awaitable[float]],
    process: psutil.Process,
    spent: dict[str, float],
    kind: str,
) -> Callable[[int, int], Awaitable[float]]:
    """The same, and what ``process`` needed of the CPU for it, in seconds, added up."""

    async def counted(size: int, tokens: int) -> float:
        before = process.cpu_times()
        rate = await measure(size, tokens)
        after = process.cpu_times()
        spent[kind] = spent.get(kind, 0.0) + after.user + after.system - before.user - before.system
        return rate

    return counted


async def _rounds(kinds: Kinds, size: int, tokens: int, rounds: Rounds) -> list[dict[str, float]]:
    """Tokens a second of each kind, a round an entry. Each round begins with another kind."""
    measured = []
    for number in rounds:
        is_whole = size != AT or number % WHOLE_EVERY == 0
        names = [kind for kind in kinds if is_whole or kind in (WHOLE, *SERVERS)]
        order = rotated(names, number)
        measured.append({kind: await kinds[kind](size, tokens) for kind in order})
    return measured


def _row(size: int, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians of the rates, medians of the rounds' ratios, and of how many rounds."""
    row: dict[str, Any] = {"concurrent": size, "rounds": len(rounds)}
    row |= {
        f"{kind} tok/s": statistics.median(rates[kind] for rates in rounds if kind in rates)
        for kind in rounds[0]
    }
    for kind in (WHOLE, STREAM, *SERVERS):
        if kind in rounds[0]:
            row[f"{kind} / {BARE}"] = statistics.median(_ratios(rounds, kind, BARE))
    row[f"rounds / {BARE}"] = _times(rounds, BARE)
    return row | _beside(rounds)


def _beside(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Ours beside vLLM's server."""
    row: dict[str, Any] = {}
    for kind in SERVERS:
        if rounds and kind in rounds[0]:
            ratios = _ratios(rounds, WHOLE, kind)
            least, most = median_within(ratios)
            row |= {
                f"{WHOLE} / {kind}": statistics.median(ratios),
                f"at least / {kind}": least,
                f"at most / {kind}": most,
                f"rounds / {kind}": len(ratios),
            }
    return row


def _ratios(rounds: Sequence[Mapping[str, float]], kind: str, other: str) -> list[float]:
    return [rates[kind] / rates[other] for rates in rounds if kind in rates and other in rates]


def _times(rounds: Sequence[Mapping[str, float]], kind: str) -> int:
    return sum(kind in rates for rates in rounds)


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
    names = {WHOLE: "whole", STREAM: "stream", THEIRS: "vllm", SAME: "vllm"}
    (document,) = await run_load(url, size, tokens, names[kind])
    return float(document["tokens"] / document["seconds"])

"""What every kind of model has to show of partial rollouts, on an engine that serves ``path``."""

import asyncio
import time
from pathlib import Path

import pytest
import torch

from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.protocol import SleepTag
from tests.support.engine_kit import prompts, reference, run, serves


async def cut_three_times_equals_uncut(engine: VllmEngine) -> None:
    """Greedy tokens and their log-probs, over three pauses."""
    budget = 400
    asked = prompts(8, seed=3)
    uncut = await asyncio.gather(*(run(engine, p, budget) for p in asked))
    tokens = [()] * 8
    log_probs = [()] * 8
    cuts = 0
    for attempt in range(4):
        left = [i for i in range(8) if len(tokens[i]) < budget]
        tasks = [
            asyncio.ensure_future(run(engine, [*asked[i], *tokens[i]], budget - len(tokens[i])))
            for i in left
        ]
        if attempt < 3:
            await asyncio.sleep(0.15)
            await engine.pause()
        parts = await asyncio.gather(*tasks)
        cuts += sum(part.finish_reason == "abort" for part in parts)
        for i, part in zip(left, parts, strict=True):
            assert len(part.token_ids) == len(part.log_probs)
            tokens[i] += part.token_ids
            log_probs[i] += part.log_probs
        await engine.resume()
    assert cuts >= 8, "nothing was cut: the test shows nothing"
    assert tokens == [whole.token_ids for whole in uncut]
    for mine, whole in zip(log_probs, uncut, strict=True):
        assert mine == pytest.approx(whole.log_probs, abs=1e-4)


async def log_probs_are_of_what_was_sampled(engine: VllmEngine, path: Path) -> None:
    """At a temperature and with top-p, against transformers."""
    temperature, top_p = 0.7, 0.8
    model = reference(path)
    for i, prompt in enumerate(prompts(4, seed=9)):
        output = await run(engine, prompt, 40, temperature=temperature, top_p=top_p, seed=i)
        logits = model.logits(prompt, output.token_ids)
        picked = torch.tensor(output.token_ids)[:, None]
        said = torch.tensor(output.log_probs)
        sampled = _nucleus(logits / temperature, top_p).gather(1, picked)[:, 0]
        raw = logits.log_softmax(-1).gather(1, picked)[:, 0]
        assert (said - sampled).abs().max() < 5e-3
        assert (said - raw).abs().max() > 0.1, "raw and sampled cannot be told apart here"


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Log-probs after top-p: the smallest set of the likeliest tokens that weighs top_p."""
    probs, order = logits.softmax(-1).sort(descending=True)
    outside = probs.cumsum(-1) - probs >= top_p
    kept = torch.full_like(logits, float("-inf"))
    kept.scatter_(1, order, logits.gather(1, order).masked_fill(outside, float("-inf")))
    return kept.log_softmax(-1)


async def caches_are_cleared_when_nothing_runs(engine: VllmEngine) -> None:
    """Of every engine: one request on one of them is enough to say that they were not."""
    (prompt,) = prompts(1, length=64, seed=5)
    await run(engine, prompt, 4)
    running = asyncio.ensure_future(run(engine, prompt, 1500))
    deadline = time.monotonic() + 20
    while (await engine.clear_caches()).is_complete:  # it is on its way
        assert not running.done() and time.monotonic() < deadline
        await asyncio.sleep(0.01)
    report = await engine.clear_caches()
    assert (report.prefix, report.multimodal, report.encoder) == (False, False, False)
    await engine.pause()
    assert (await running).finish_reason == "abort"
    report = await engine.clear_caches()
    assert (report.prefix, report.multimodal, report.encoder) == (True, True, True)
    await engine.resume()
    for _ in range(engine._world):  # whichever takes it
        assert (await run(engine, prompt, 4)).num_cached_tokens == 0
        assert (await engine.clear_caches()).is_complete


async def sleeps_and_wakes(engine: VllmEngine, path: Path) -> None:
    """As far as a CPU goes: it releases nothing, and says so; the scheduler rests until told."""
    for level in (1, 2):
        await engine.pause()
        report = await engine.sleep(level)
        assert report.bytes == 0
        assert "CPU" in report.message
        for tag in (SleepTag.WEIGHTS, SleepTag.KV_CACHE):
            assert await engine.wake(frozenset({tag})) == 0
        early = asyncio.ensure_future(run(engine, prompts(1)[0], 8))
        await asyncio.wait({early}, timeout=0.5)
        assert not early.done(), "it went on before it was told to"
        await engine.resume()
        assert len((await early).token_ids) == 8
        assert await serves(engine, path)

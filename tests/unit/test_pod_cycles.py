"""A thousand pauses under load: nothing is lost, and nothing grows."""

import asyncio
import os
from pathlib import Path

import psutil

from tests.support.pods import Pod, running_pod

CYCLES = int(os.environ.get("PAUSE_CYCLES", "1000"))
CALLERS = 8
WARM_UP = 200
GROWTH = 4 << 20
"""Bytes."""


async def call(pod: Pod, number: int, ends: asyncio.Event) -> int:
    """Rollout after rollout, each continued from its partials; its tokens are checked by ``ask``."""
    tokens = 0
    while not ends.is_set():
        done: list[int] = []
        while len(done) < 30:
            answer = await pod.ask(
                [number], 30, generated_token_ids=done, on_pause=("wait", "return")[number % 2]
            )
            done += answer.token_ids
            if answer.cancel_reason == "refused":
                await asyncio.sleep(0)
        assert len(done) == 30
        tokens += len(done)
    return tokens


async def test_a_thousand_pauses_under_load_leave_nothing_behind(tmp_path: Path) -> None:
    me = psutil.Process()
    async with running_pod(tmp_path) as pod:
        pod.want()
        await pod.serving("base")
        tasks, fds = len(asyncio.all_tasks()), me.num_fds()
        ends = asyncio.Event()
        callers = [asyncio.create_task(call(pod, n, ends)) for n in range(CALLERS)]
        warm = 0
        for cycle in range(CYCLES):
            pod.want(paused=True)
            await pod.until(lambda s: s.phase == "Paused")
            assert pod.engine.running == pod.supervisor.gate.unfinished == 0
            pod.want()
            await pod.serving("base")
            pod.engine.calls.clear()  # the fake's own diary grows
            for _ in range(5):
                await asyncio.sleep(0)
            if cycle == WARM_UP:
                warm = me.memory_info().rss
        ends.set()
        tokens = await asyncio.gather(*callers)
        grown = me.memory_info().rss - warm
        assert all(tokens)
        assert pod.supervisor.gate.unfinished == pod.supervisor.gate.parked == 0
        assert not pod.generation._requests
        assert (len(asyncio.all_tasks()), me.num_fds()) == (tasks, fds)
        assert grown < GROWTH, f"{grown / 2**20:.1f} MiB more after {CYCLES - WARM_UP} cycles"

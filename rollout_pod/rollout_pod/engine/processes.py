"""Ends the engine's processes, also those that vLLM forgets."""

import asyncio
import contextlib
import multiprocessing
from typing import Any

import psutil

_TERM_S = 2.0
_KILL_S = 3.0
_TASKS_S = 1.0


def engine_children(before: frozenset[int]) -> list[psutil.Process]:
    """What ``multiprocessing`` started in this process since ``before``, and all below it."""
    found: dict[int, psutil.Process] = {}
    for child in multiprocessing.active_children():
        if child.pid is None or child.pid in before:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(child.pid)
            found[process.pid] = process
            for grandchild in process.children(recursive=True):
                found[grandchild.pid] = grandchild
    return list(found.values())


def children_now() -> frozenset[int]:
    """The ids of all processes that ``multiprocessing`` has started and that live."""
    return frozenset(p.pid for p in multiprocessing.active_children() if p.pid is not None)


def end_all(processes: list[psutil.Process]) -> None:
    """Terminate, then kill; blocks at most five seconds. Those gone already are no error."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=_TERM_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_KILL_S)
    # reaps: a zombie would still look like a child
    multiprocessing.active_children()


async def close_front_end(llm: Any, grace_s: float) -> None:
    """End vLLM's front end: its processes, its tasks, and the sockets' context that it forgets."""
    resources = llm.engine_core.resources
    tasks = {llm.output_handler, resources.output_queue_task, resources.stats_update_task}
    await asyncio.to_thread(llm.shutdown, timeout=grace_s)
    running = [task for task in tasks if task is not None]
    if running:
        await asyncio.wait(running, timeout=_TASKS_S)
    resources.ctx.destroy(linger=0)

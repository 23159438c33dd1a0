"""Reads that hang, and the client's deadlines."""

import asyncio
import tempfile
import threading
import time
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from rollout_pod.weights import agent_wire, transport
from rollout_pod.weights.agent import AgentError, run_agent
from rollout_pod.weights.agent_client import AgentClient
from rollout_pod.weights.reading import NOTICE_S, HangError, Readers
from tests.support.weights import until

PATH = Path("/far/away")


async def test_results_and_errors_come_through() -> None:
    readers = Readers()

    def fail() -> None:
        raise KeyError("x")

    assert await readers.run(lambda: 7, path=PATH, cancel=threading.Event()) == 7
    with pytest.raises(KeyError):
        await readers.run(fail, path=PATH, cancel=threading.Event())
    assert readers.hung == 0


async def test_a_call_that_notices_is_waited_for() -> None:
    readers, cancel = Readers(), threading.Event()
    asyncio.get_running_loop().call_later(0.1, cancel.set)

    assert await readers.run(lambda: cancel.wait(30), path=PATH, cancel=cancel)
    assert readers.hung == 0


async def test_a_call_that_hangs_is_left_behind() -> None:
    readers, cancel, free = Readers(), threading.Event(), threading.Event()
    cancel.set()
    started = time.monotonic()
    with pytest.raises(HangError, match="/far/away: reading it hangs; is its file") as caught:
        await readers.run(lambda: free.wait(60), path=PATH, cancel=cancel)
    assert NOTICE_S <= time.monotonic() - started < NOTICE_S + 2
    assert caught.value.retryable
    assert readers.hung == 1
    assert await readers.run(lambda: 7, path=PATH, cancel=threading.Event()) == 7
    free.set()
    until(lambda: readers.hung == 0)


async def test_a_waiter_that_is_cancelled_leaves_its_call_behind() -> None:
    readers, began, free = Readers(), threading.Event(), threading.Event()

    def call() -> None:
        began.set()
        free.wait(60)

    task = asyncio.create_task(readers.run(call, path=PATH, cancel=threading.Event()))
    assert await asyncio.to_thread(began.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert readers.hung == 1
    free.set()
    until(lambda: readers.hung == 0)


async def test_a_cancel_that_comes_with_the_answer_counts() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="rw-") as folder,
        zmq.asyncio.Context() as context,
        context.socket(zmq.ROUTER) as agent,
    ):
        path = Path(folder) / "a"
        transport.bind(agent, path)
        client = AgentClient(path)
        try:
            task = asyncio.create_task(client.status())
            async with asyncio.timeout(10):
                await agent.recv_multipart()
            (pending,) = client._pending.values()
            pending.future.set_result(agent_wire.Done(id=1))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client._pending == {}

            client._connected.clear()
            task = asyncio.create_task(client.status())
            await asyncio.sleep(0)
            client._connected.set()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no shm folder", "--shm-dir .*no such folder; mount"),
        ("run folder is a file", "--run-dir .*must be writable"),
        ("socket is a file", "agent.sock: the agent cannot listen there: .*remove it"),
        ("long path", "the agent cannot listen there: .*use a shorter run directory"),
    ],
)
async def test_an_agent_that_cannot_start_says_why(tmp_path: Path, what: str, words: str) -> None:
    run_dir, shm_dir = tmp_path / "run", tmp_path / "shm"
    if what != "no shm folder":
        shm_dir.mkdir()
    if what == "run folder is a file":
        run_dir.touch()
    if what == "socket is a file":
        (run_dir / "agent.sock").mkdir(parents=True)
    if what == "long path":
        run_dir = tmp_path / ("x" * 100)
    with pytest.raises(AgentError, match=words) as caught:
        await run_agent(run_dir, shm_dir, 1 << 20, asyncio.Event())
    assert "\n" not in str(caught.value)

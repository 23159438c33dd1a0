"""An engine that does not start says why, and leaves nothing behind."""

import asyncio
import gc
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rollout_pod.engine.base import EngineError, EngineStartError, Node
from rollout_pod.engine.processes import engine_children
from tests.support.engine_kit import checkpoint, engine_of, settings
from tests.support.process import free_port

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    # vLLM's half-made client goes without closing its sockets' context
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]


async def refused(model, *args, staging="Host", node: Node | None = None) -> str:
    with settings(model, *args) as given:
        engine = engine_of(replace(given, staging=staging, node=node))
        with pytest.raises(EngineStartError) as caught:
            await engine.start()
        assert engine_children(frozenset()) == []
        with pytest.raises(EngineStartError, match="once"):
            await engine.start()
    message = str(caught.value)
    del caught, engine
    gc.collect()  # what is left of it, while that warning is ignored
    return message


async def test_a_model_that_does_not_exist():
    assert await refused("/no/such/model") == "model: /no/such/model does not exist"


async def test_a_folder_that_is_no_model(tmp_path):
    assert "config.json" in await refused(tmp_path)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-tp=2", "--nnodes=3"], "--nnodes cannot be set; set spec.nodes"),
        (["-tp=2", "--node-rank=1"], "--node-rank cannot be set with nodes above 1"),
        (["-tp=2", "--master-addr=10.0.0.1"], "--master-addr cannot be set"),
        (["-tp=2", "--distributed-executor-backend=uni"], "--distributed-executor-backend cannot"),
        (["-tp=2", "-dp=2"], "--data-parallel-size above 1 works on one node only"),
        (["-tp=3"], "is 3: with 2 nodes it must be a multiple of that"),
    ],
)
async def test_what_the_place_of_a_node_does_not_allow(args, words):
    place = Node(rank=0, count=2, host="127.0.0.1", head="127.0.0.1", port=29500)
    assert words in await refused(checkpoint("dense", 0), *args, node=place)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--no-such-thing=3"], "--no-such-thing=3"),
        (["--tensor-parallel-size=two"], "--tensor-parallel-size"),
        (["--worker-extension-cls=a.B"], "--worker-extension-cls cannot be set"),
        (["--model=other"], "--model cannot be set"),
        (["--stream-interval=2"], "--stream-interval must be 1"),
        (["--max-num-queued-reqs=9"], "--max-num-queued-reqs cannot be set; bound the requests"),
        (["--max-num-queued-tokens=9"], "--max-num-queued-tokens cannot be set"),
        (["--nnodes=2"], "--nnodes cannot be set; set spec.nodes"),
        (["--enable-sleep-mode"], "Sleep mode is not supported"),
        (["--max-model-len=99999"], "max_model_len (99999) is greater"),
        # that the CPU build does not have: experts are told of on a GPU only
        (["--enable-return-routed-experts"], "Model Runner V2"),
    ],
)
async def test_arguments_that_the_engine_does_not_take(args, words):
    assert words in await refused(checkpoint("dense", 0), *args)


async def test_a_slot_on_the_device_needs_one():
    words = "weights.staging Device needs a GPU; use Host"
    assert words in await refused(checkpoint("dense", 0), staging="Device")


async def test_the_words_of_a_child_that_fails(tmp_path):
    torn = tmp_path / "torn"
    shutil.copytree(checkpoint("dense", 0), torn)
    with (torn / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    message = await refused(torn)
    assert "SafetensorError" in message
    assert "incomplete metadata" in message


async def test_a_start_ends_when_another_node_is_lost():
    """vLLM itself waits for its ranks for half an hour."""
    place = Node(rank=0, count=2, host="127.0.0.1", head="127.0.0.1", port=free_port())
    with settings(checkpoint("dense", 0), "--tensor-parallel-size=2") as given:
        engine = engine_of(replace(given, node=place))
        start = asyncio.create_task(engine.start())
        async with asyncio.timeout(90):
            while not engine_children(frozenset()):
                await asyncio.sleep(0.1)
        engine.condemn("node 1 was not heard for 30 s")
        async with asyncio.timeout(60):
            with pytest.raises(EngineStartError, match="node 1 was not heard"):
                await start
    assert engine_children(frozenset()) == []


async def test_a_shutdown_ends_a_start_that_is_still_going_on():
    with settings(checkpoint("dense", 0)) as given:
        engine = engine_of(given)
        starting = asyncio.ensure_future(engine.start())
        while not engine_children(frozenset()):
            assert not starting.done()
            await asyncio.sleep(0.05)
        await asyncio.wait_for(engine.shutdown(), 30)
        with pytest.raises(EngineStartError):
            await asyncio.wait_for(starting, 30)
        assert engine_children(frozenset()) == []
    del starting, engine
    gc.collect()


async def test_nothing_works_before_the_start():
    with settings(checkpoint("dense", 0)) as given:
        engine = engine_of(given)
        assert engine.dead_error() is None
        with pytest.raises(EngineError, match="not started"):
            engine.sampling_params({}, max_tokens=1)
        await engine.shutdown()


SCRIPT = """
import asyncio
from tests.support.engine_kit import checkpoint, engine_of, settings
from tests.support.process import free_port

async def main():
    with settings({model!r}) as given:
        await engine_of(given).start()
        print("the engine is up", flush=True)
        await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


# also while it loads: the child is told of its server before it has a model
@pytest.mark.parametrize("after", [b"Starting to load model", b"the engine is up"])
def test_a_server_that_is_killed_takes_its_engine_along(tmp_path, after):
    script = tmp_path / "server.py"
    script.write_text(SCRIPT.format(model=str(checkpoint("dense", 0))))
    root = Path(__file__).resolve().parents[2]
    log = tmp_path / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=out,
            stderr=out,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root)},
        )
    try:
        deadline = time.monotonic() + 120
        while after not in log.read_bytes():
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        children = psutil.Process(server.pid).children(recursive=True)
        assert children
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait(10)
    _, alive = psutil.wait_procs(children, timeout=10)
    # where nobody reaps orphans, a dead one is still listed
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

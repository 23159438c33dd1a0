"""The engine's process is killed; and an engine that takes no updates says why."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from rollout_pod.engine import leftovers
from rollout_pod.engine.base import EngineDeadError
from rollout_pod.engine.processes import engine_children
from rollout_pod.protocol import SleepTag
from rollout_pod.weights.session_errors import ManifestError
from tests.support.engine_kit import checkpoint, run, tensors_of, update

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

KIND = "dense"
# without a tokenizer, too, and without a checkpoint's weights
ARGS = ("--load-format=dummy", "--skip-tokenizer-init")


@pytest.fixture(scope="module", autouse=True)
def shared_before() -> frozenset[str]:
    return leftovers.names_now()


async def test_random_weights_take_no_update_and_say_why(engine):
    with pytest.raises(ManifestError, match="--load-format dummy takes no weight updates"):
        await update(engine, tensors_of(checkpoint(KIND, 1)))


async def test_its_sockets_lie_in_the_run_folder(engine):
    folder = engine._settings.run_dir / "vllm"
    mine = {Path(name) for name in _sockets() if name.startswith(str(folder))}
    assert mine
    # beside those of the start, which are closed and yet not removed
    assert mine <= {path for path in folder.iterdir() if path.is_socket()}
    assert not [name for name in _sockets() if Path(name).parent == Path(tempfile.gettempdir())]


async def test_it_serves_without_a_tokenizer(engine):
    output = await run(engine, [5, 6, 7], 8)
    assert len(output.token_ids) == 8
    with pytest.raises(ValueError, match="tokenizer"):
        engine.sampling_params({"stop": ["x"]}, max_tokens=4)


async def test_every_call_of_a_killed_engine_ends_and_says_so(engine):
    running = [asyncio.ensure_future(run(engine, [5, 6, 7 + i], 1500)) for i in range(4)]
    await asyncio.sleep(0.5)
    assert engine.dead_error() is None
    # a call that the process takes and never answers
    (core,) = [p for p in engine_children(frozenset()) if _is_core(p)]
    os.kill(core.pid, signal.SIGSTOP)
    pausing = asyncio.ensure_future(engine.pause())
    await asyncio.wait({pausing}, timeout=0.5)
    os.kill(core.pid, signal.SIGKILL)
    ends = await asyncio.wait_for(asyncio.gather(*running, pausing, return_exceptions=True), 10)
    assert {type(end) for end in ends} == {EngineDeadError}
    assert "signal 9" in (engine.dead_error() or "")
    for call in (
        engine.pause(),
        engine.resume(),
        engine.clear_caches(),
        engine.sleep(1),
        engine.wake(frozenset(SleepTag)),
        engine.abort("x"),
        engine.publish_version("v"),
        engine.load_weights("s", version="v", flush=True, timeout_s=5),
        run(engine, [5]),
    ):
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(call, 5)


async def test_a_shutdown_leaves_no_process_and_no_shared_memory(engine, shared_before):
    await engine.shutdown()
    await engine.shutdown()
    assert not (engine._settings.run_dir / "vllm").exists()
    assert engine_children(frozenset()) == []
    mine = psutil.Process().children(recursive=True)
    assert not [p for p in mine if "resource_tracker" not in " ".join(p.cmdline())]
    assert engine.dead_error() is not None
    assert leftovers.unused(leftovers.names_now() - shared_before) == frozenset()


def _sockets() -> set[str]:
    """Paths that this process and the engine's have bound."""
    family = [psutil.Process(), *engine_children(frozenset())]
    return {c.laddr for p in family for c in p.net_connections("unix") if c.laddr.startswith("/")}


def _is_core(process: psutil.Process) -> bool:
    return Path(f"/proc/{process.pid}").exists() and process.ppid() == os.getpid()

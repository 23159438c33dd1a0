"""Sources that hang: the agent goes on without them, or ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout_pod.weights.agent import HUNG_MAX
from rollout_pod.weights.agent_client import AgentClient, StageError
from tests.support.weights import (
    ModelLoader,
    Place,
    expected_of,
    make_place,
    same,
    until,
    write_checkpoint,
)

MIB = 1 << 20
ENDED = r"hangs|is gone"
"""The last answer of an agent that ends may be lost with the connection (ZMQ drops what is not read
yet where ``IMMEDIATE`` is set).
"""

HANGING_AGENT = """
import asyncio, errno, os, sys, time
from pathlib import Path
from tests.support.weights_agent import main

run_dir, shm_dir, memory, call = sys.argv[1:]
root = Path(run_dir).parent
real_open, real_preadv, real_allocate = os.open, os.preadv, os.posix_fallocate

def hang(path):
    if Path(os.fsdecode(path)).parent.name.startswith("bad"):
        (root / "hangs").touch()
        while not (root / "go").exists():
            time.sleep(0.02)

def slow_open(path, *more, **named):
    if str(path).endswith(".safetensors"):
        hang(path)
    return real_open(path, *more, **named)

def slow_preadv(fd, *more):
    hang(os.readlink(f"/proc/self/fd/{fd}"))
    try:
        got = real_preadv(fd, *more)
    except OSError as error:
        (root / "late").write_text(errno.errorcode[error.errno])
        raise
    return got

def allocate(fd, start, size):  # a file system of exactly `memory` bytes
    used = sum(file.stat().st_blocks * 512 for file in Path(shm_dir).iterdir())
    if used + size > int(memory):
        raise OSError(errno.ENOSPC, "full")
    real_allocate(fd, start, size)

if call == "open":
    os.open = slow_open
if call == "read":
    os.preadv = slow_preadv
os.posix_fallocate = allocate
asyncio.run(main(run_dir, shm_dir, memory))
"""


def start_agent(place: Place, call: str, memory: int) -> "subprocess.Popen[bytes]":
    """An agent for which ``call`` hangs in folders ``bad...`` until the file ``go`` is there, and
    for which shared memory is full at ``memory`` bytes.
    """
    arguments = [str(place.run_dir), str(place.shm_dir), str(memory), call]
    agent = subprocess.Popen(
        [sys.executable, "-c", HANGING_AGENT, *arguments], stderr=subprocess.PIPE
    )
    place.agents.append(agent)
    until(place._agent_listens, 60)
    return agent


def last_words(agent: "subprocess.Popen[bytes]") -> str:
    assert agent.stderr is not None
    with agent.stderr as stream:
        return stream.read().decode()


@pytest.fixture
def place() -> Iterator[Place]:
    with make_place() as made:
        yield made
        for agent in made.agents:
            if agent.stderr is not None and not agent.stderr.closed:
                agent.kill()
                agent.wait()
                agent.stderr.close()


def tensors_of(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((MIB,), number, dtype=torch.uint8)}


async def stage(client: AgentClient, place: Place, path: Path, timeout_s: float = 30) -> str:
    session = f"{path.name}-{time.monotonic_ns()}"
    await client.stage(
        session=session, path=path, version=path.name, rank_sockets=place.rank_sockets,
        bucket_bytes=4096 * 16, timeout_s=timeout_s,
    )  # fmt: skip
    return session


async def stage_until_it_hangs(
    client: AgentClient, place: Place, path: Path
) -> "asyncio.Task[str]":
    mark = place.root / "hangs"
    mark.unlink(missing_ok=True)
    task = asyncio.create_task(stage(client, place, path))
    await asyncio.to_thread(until, mark.exists)
    return task


async def update(client: AgentClient, place: Place, number: int) -> None:
    """A whole update to ``good-<number>``."""
    path = write_checkpoint(place.root / f"good-{number}", tensors_of(number))
    await update_to(client, place, path, number)


async def update_to(client: AgentClient, place: Place, path: Path, number: int) -> None:
    session = await stage(client, place, path)
    loader = ModelLoader()
    load = asyncio.ensure_future(
        asyncio.to_thread(
            place.receivers[0].load, session, loader, version=path.name, flush=False, timeout_s=30
        )
    )
    await client.send(session=session, timeout_s=30)
    assert (await load).ok
    await client.committed(session=session)
    assert same(loader.model, tensors_of(number))


async def test_a_pipe_is_refused_at_once_and_forgotten(place: Place, client: AgentClient) -> None:
    place.start_receivers(expected_of(tensors_of(0)))
    agent = place.start_agent()
    for name in ("model.safetensors", "model.safetensors.index.json"):
        folder = place.root / "step-1" / name
        folder.mkdir(parents=True)
        os.mkfifo(folder / name)
        with pytest.raises(StageError, match=f"{name}: .*is no regular file") as caught:
            await stage(client, place, folder)
        assert caught.value.kind == "source"
    await update(client, place, 1)
    agent.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(agent.wait, 10) == 0


@pytest.mark.parametrize("call", ["open", "read"])
async def test_other_versions_go_on_beside_one_that_hangs(
    place: Place, client: AgentClient, call: str
) -> None:
    place.start_receivers(expected_of(tensors_of(0)))
    agent = start_agent(place, call, 2 * MIB)
    bad = write_checkpoint(place.root / "bad-1", tensors_of(9))
    await update(client, place, 1)

    with pytest.raises(StageError, match="bad-1: reading it hangs; is its file sys") as caught:
        await stage(client, place, bad, timeout_s=0.5)
    assert (caught.value.kind, caught.value.retryable) == ("timeout", True)
    assert len(place.segments()) == 1, "its memory is given back though the read goes on"
    await update(client, place, 2)
    await update(client, place, 3)

    hanging = await stage_until_it_hangs(client, place, bad)
    await update(client, place, 4)
    with pytest.raises(StageError, match="bad-1: reading it hangs") as caught:
        await hanging
    assert (caught.value.kind, caught.value.retryable) == ("source", True)

    (place.root / "go").touch()
    if call == "read":
        late = place.root / "late"
        until(lambda: late.exists() and late.read_text() != "")
        assert late.read_text() == "EFAULT"
    await stage(client, place, bad)
    await update(client, place, 5)
    agent.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(agent.wait, 10) == 0
    assert place.segments() == []
    assert "without waiting" not in last_words(agent)


async def test_the_committed_version_needs_no_source_that_hangs(
    place: Place, client: AgentClient
) -> None:
    place.start_receivers(expected_of(tensors_of(0)))
    start_agent(place, "open", 2 * MIB)
    (place.root / "go").touch()
    folder = write_checkpoint(place.root / "bad-1", tensors_of(9))
    await update_to(client, place, folder, 9)
    (place.root / "go").unlink()
    await update_to(client, place, folder, 9)
    await update(client, place, 1)
    (place.root / "go").touch()


@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("when", ["while it is waited for", "after it was left behind"])
async def test_a_stopped_agent_does_not_wait_for_what_hangs(
    place: Place, client: AgentClient, call: str, when: str
) -> None:
    place.start_receivers(expected_of(tensors_of(0)))
    agent = start_agent(place, call, 2 * MIB)
    bad = write_checkpoint(place.root / "bad-1", tensors_of(9))
    if when == "after it was left behind":
        with pytest.raises(StageError, match="hangs"):
            await stage(client, place, bad, timeout_s=0.2)
        assert (place.root / "hangs").exists()
        started = time.monotonic()
        agent.send_signal(signal.SIGTERM)
    else:
        hanging = await stage_until_it_hangs(client, place, bad)
        started = time.monotonic()
        agent.send_signal(signal.SIGTERM)
        with pytest.raises(StageError, match=ENDED):
            await hanging
    assert await asyncio.to_thread(agent.wait, 10) == 0
    assert time.monotonic() - started < 3.0
    assert place.segments() == []
    assert not place.agent_socket.exists()
    assert last_words(agent).endswith("the agent stops without waiting for what hangs\n")


async def test_an_agent_with_too_many_hanging_reads_ends(place: Place, client: AgentClient) -> None:
    place.start_receivers(expected_of(tensors_of(0)))
    agent = start_agent(place, "open", 2 * MIB)
    bad = write_checkpoint(place.root / "bad-1", tensors_of(9))
    for _ in range(HUNG_MAX):
        assert agent.poll() is None
        with pytest.raises(StageError, match=ENDED):
            await stage(client, place, bad, timeout_s=0.05)
    assert await asyncio.to_thread(agent.wait, 10) == 1
    assert last_words(agent).endswith("reads hang; the agent exits to be started afresh\n")

    start_agent(place, "open", 2 * MIB)
    await update(client, place, 1)


async def test_full_memory_does_not_stop_updates(place: Place, client: AgentClient) -> None:
    place.start_receivers(expected_of(tensors_of(0)))
    start_agent(place, "", 2 * MIB)
    for number in (1, 2, 3):
        await update(client, place, number)
    status = await client.status()
    assert status.used == status.host_memory, "two versions leave no byte"
    await stage(client, place, place.root / "good-2")
    await update(client, place, 4)

"""Updates that fail: whoever dies, lies or is late, it is said within seconds and healed by a
complete resend."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rollout_pod.weights.agent import AgentError, run_agent
from rollout_pod.weights.agent_client import AgentClient, StageError, TransferError
from rollout_pod.weights.buckets import WINDOW
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.segment import PUSH_PREFIX, Segment
from rollout_pod.weights.spec import Expected, UpdatesUnsupportedError
from tests.support.weights import (
    Gate,
    ModelLoader,
    Place,
    expected_of,
    mixed_tensors,
    same,
    until,
    write_checkpoint,
)

NOTICED_S = 4.0
"""A dead peer is noticed at once, a frozen one in about 2 s; the rest is for a busy machine."""


async def stage(client: AgentClient, place: Place, session: str, path: Path, **more):
    call = {
        "version": "step-1", "rank_sockets": place.rank_sockets, "bucket_bytes": 4096,
        "timeout_s": 30,
    }  # fmt: skip
    return await client.stage(session=session, path=path, **(call | more))


def load(
    place: Place, rank: int, session: str, loader: ModelLoader, flush: bool = False,
    timeout_s: float = 30,
) -> "asyncio.Future[LoadReport]":  # fmt: skip
    receiver = place.receivers[rank]
    return asyncio.ensure_future(
        asyncio.to_thread(
            receiver.load, session, loader, version="step-1", flush=flush, timeout_s=timeout_s
        )
    )


async def repair(client: AgentClient, place: Place, path: Path, tensors) -> None:
    """What the supervisor does after a failure: all over again, with a flush."""
    await stage(client, place, "repair", path)
    loaders = [ModelLoader() for _ in place.receivers]
    loads = [load(place, rank, "repair", loader, True) for rank, loader in enumerate(loaders)]
    sent = await client.send(session="repair", timeout_s=30)
    assert [report.ok for report in sent.reports] == [True] * len(loaders)
    assert [(await report).ok for report in loads] == [True] * len(loaders)
    assert all(loader.calls == ["flush", "begin", "finish"] for loader in loaders)
    assert all(same(loader.model, tensors) for loader in loaders)


def spoiled(what: str) -> tuple[dict[str, torch.Tensor], str]:
    tensors = mixed_tensors(1)
    if what == "missing":
        del tensors["layers.0.norm"]
        return tensors, "'layers.0.norm': missing"
    if what == "unknown":
        tensors["layers.9.norm"] = torch.zeros(1)
        return tensors, "'layers.9.norm': unknown"
    if what == "shape":
        tensors["layers.0.norm"] = torch.zeros(8)
        return tensors, r"'layers.0.norm': shape \[8\], expected \[7\]"
    tensors["layers.0.norm"] = tensors["layers.0.norm"].to(torch.bfloat16)
    return tensors, "'layers.0.norm': dtype bfloat16, expected float32"


@pytest.mark.parametrize("what", ["missing", "unknown", "shape", "dtype"])
async def test_one_rank_rejects_the_manifest_before_the_first_byte(
    place: Place, client: AgentClient, what: str
) -> None:
    good, (bad, words) = mixed_tensors(1), spoiled(what)
    path = write_checkpoint(place.root / "bad", bad)
    place.start_receivers(expected_of(bad), expected_of(good))
    place.start_agent()
    with pytest.raises(StageError, match=f"^rank 1: tensor {words}") as caught:
        await stage(client, place, "s1", path)
    assert (caught.value.kind, caught.value.retryable) == ("manifest", False)
    assert place.segments() == []
    loader = ModelLoader()
    report = await load(place, 1, "s1", loader)
    assert not report.ok
    assert report.error.startswith("refused: ")
    assert loader.calls == []


async def test_an_engine_that_takes_no_updates_says_so_once(
    place: Place, client: AgentClient, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint(place.root / "v", mixed_tensors(1))
    place.start_receivers(expected_of(mixed_tensors(1)))

    def unsupported() -> Expected:
        raise UpdatesUnsupportedError("it was started with --enable-eplb")

    place.receivers[0]._talker._expected = unsupported
    place.start_agent()
    with pytest.raises(StageError, match=r"^it was started with --enable-eplb$") as caught:
        await stage(client, place, "s1", path)
    assert (caught.value.kind, caught.value.retryable) == ("manifest", False)
    assert place.segments() == []
    assert not caplog.records, "it is no fault"


async def test_a_bad_source_heals(place: Place, client: AgentClient) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors, shards=2)
    place.start_receivers(expected_of(tensors))
    place.start_agent()
    shard = path / "model-00002.safetensors"
    whole = shard.read_bytes()

    shard.unlink()
    with pytest.raises(StageError, match=r"model-00002.safetensors: missing") as caught:
        await stage(client, place, "s1", path)
    assert (caught.value.kind, caught.value.retryable) == ("source", True)
    shard.write_bytes(whole[:-1])
    with pytest.raises(StageError, match=r"model-00002.safetensors: truncated"):
        await stage(client, place, "s1", path)
    with pytest.raises(StageError, match="step-2: does not exist"):
        await stage(client, place, "s2", place.root / "step-2")

    shard.write_bytes(whole)
    await repair(client, place, path, tensors)


async def test_no_room_says_the_arithmetic(place: Place, client: AgentClient) -> None:
    tensors = {"a": torch.zeros(3 << 20, dtype=torch.uint8)}
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors))
    place.start_agent(host_memory=4 << 20)
    await repair(client, place, path, tensors)
    await client.committed(session="repair")
    with pytest.raises(StageError) as caught:
        await stage(client, place, "s2", path, version="step-2")
    assert (caught.value.kind, caught.value.retryable) == ("room", False)
    text = str(caught.value)
    for figure in (3 << 20, 4 << 20, 6 << 20, "'step-1' (committed)", "--host-memory"):
        assert str(figure) in text
    assert len(place.segments()) == 1


@pytest.mark.parametrize("bucket", [0, 1, 9])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_agent_dies_at_a_bucket(
    place: Place, client: AgentClient, bucket: int, how: signal.Signals
) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors), expected_of(tensors))
    agent = place.start_agent()
    await stage(client, place, "s1", path, bucket_bytes=256)
    gate = Gate(bucket)
    loaders = [ModelLoader(gate), ModelLoader()]
    loads = [load(place, rank, "s1", loader) for rank, loader in enumerate(loaders)]
    send = asyncio.ensure_future(client.send(session="s1", timeout_s=30))
    assert await asyncio.to_thread(gate.reached.wait, 30)

    agent.send_signal(how)
    started = time.monotonic()
    with pytest.raises(TransferError, match="gone") as caught:
        await send
    assert caught.value.kind == "agent"
    other = await loads[1]
    gate.open.set()
    held = await loads[0]
    assert time.monotonic() - started < NOTICED_S
    for report in (held, other):
        assert not report.ok
        assert "the sender is gone" in report.error
        assert report.version == "step-1"
    assert all("finish" not in loader.calls for loader in loaders)
    assert loaders[0].loads <= bucket + WINDOW, "what was on its way, and no more"
    agent.kill()
    agent.wait()

    assert len(place.segments()) == 1, "the dead agent left its segment"
    left = place.segments()
    place.start_agent()
    await repair(client, place, path, tensors)
    assert not set(left) & set(place.segments())


async def test_agent_dies_while_it_reads(place: Place, client: AgentClient) -> None:
    tensors = {"a": torch.zeros(8 << 20, dtype=torch.uint8)}
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors))
    agent = place.start_agent()
    await client.status()
    agent.send_signal(signal.SIGSTOP)
    task = asyncio.ensure_future(stage(client, place, "s1", path))
    await asyncio.sleep(0)
    started = time.monotonic()
    agent.kill()
    with pytest.raises(StageError, match="gone") as caught:
        await task
    assert caught.value.retryable
    assert time.monotonic() - started < NOTICED_S
    agent.wait()
    place.start_agent()
    await repair(client, place, path, tensors)


async def test_no_agent_is_said_soon(place: Place, client: AgentClient) -> None:
    started = time.monotonic()
    with pytest.raises(StageError, match="is the weights agent up") as caught:
        await client.stage(
            session="s1", version="v", path="/x", rank_sockets=[Path("/y")], bucket_bytes=4096,
            timeout_s=600,
        )  # fmt: skip
    assert (caught.value.kind, caught.value.retryable) == ("agent", True)
    with pytest.raises(TransferError):
        await client.send(session="s1", timeout_s=600)
    assert time.monotonic() - started < 2 * NOTICED_S


@pytest.mark.parametrize("bucket", [0, 5])
async def test_a_loader_that_raises(place: Place, client: AgentClient, bucket: int) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors), expected_of(tensors))
    place.start_agent()
    await stage(client, place, "s1", path, bucket_bytes=256)

    def fail(number: int) -> None:
        if number == bucket:
            raise RuntimeError("no such parameter")

    loads = [load(place, 0, "s1", ModelLoader()), load(place, 1, "s1", ModelLoader(fail))]
    with pytest.raises(TransferError, match=r"rank 1: .*no such parameter") as caught:
        await client.send(session="s1", timeout_s=30)
    assert caught.value.kind == "transfer"
    said = {report.rank: report for report in caught.value.reports}
    assert said.keys() == {0, 1}
    first, second = [await report for report in loads]
    assert (said[0], said[1]) == (first, second)
    assert "the sender gave up: rank 1" in first.error
    assert "RuntimeError: no such parameter" in second.error
    await repair(client, place, path, tensors)


@pytest.mark.parametrize("call", ["flush", "begin", "finish"])
async def test_a_loader_that_raises_outside_of_buckets(
    place: Place, client: AgentClient, call: str
) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors))
    place.start_agent()
    await stage(client, place, "s1", path)
    loader = ModelLoader()

    def fail() -> None:
        raise ValueError(f"{call} failed")

    setattr(loader, call, fail)
    report = load(place, 0, "s1", loader, flush=True)
    with pytest.raises(TransferError, match=f"{call} failed"):
        await client.send(session="s1", timeout_s=30)
    assert not (await report).ok
    await repair(client, place, path, tensors)


async def test_a_rank_is_killed(place: Place, client: AgentClient) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    rank = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.weights_rank", str(place.run_dir),
        str(place.shm_dir), str(path), "s1", "step-1",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert rank.stdin is not None
    assert rank.stdout is not None
    assert await rank.stdout.readline() == b"ready\n"
    place.start_agent()
    sockets = [place.run_dir / "ranks" / "rank-0.sock"]
    await stage(client, place, "s1", path, rank_sockets=sockets)
    rank.stdin.write(b"\n")
    send = asyncio.ensure_future(client.send(session="s1", timeout_s=30))
    assert await rank.stdout.readline() == b"load 0\n"
    rank.stdin.write(b"\n")
    assert await rank.stdout.readline() == b"load 1\n"
    started = time.monotonic()
    rank.kill()
    with pytest.raises(TransferError, match="rank 0: the connection is lost"):
        await send
    assert time.monotonic() - started < NOTICED_S
    await rank.wait()

    assert sockets[0].exists(), "a killed process leaves its socket"
    place.start_receivers(expected_of(tensors))
    await repair(client, place, path, tensors)


async def test_nobody_loads(place: Place, client: AgentClient) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors))
    place.start_agent()
    await stage(client, place, "s1", path)
    with pytest.raises(TransferError, match="timed out; 0 of 2 buckets"):
        await client.send(session="s1", timeout_s=0.5)
    report = await load(place, 0, "s1", ModelLoader())
    assert report.error.startswith("refused: the sender gave up")
    await repair(client, place, path, tensors)


async def test_nobody_sends(place: Place, client: AgentClient) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors), expected_of(tensors))
    place.start_agent()
    await stage(client, place, "s1", path)
    report = await load(place, 0, "s1", ModelLoader(), timeout_s=0.5)
    assert "timed out after 0 buckets" in report.error
    waiting = load(place, 1, "s1", ModelLoader(), timeout_s=60)
    await client.discard(session="s1")
    assert "the sender gave up" in (await waiting).error
    await repair(client, place, path, tensors)


async def test_discard_in_the_middle_ends_both_sides(place: Place, client: AgentClient) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors))
    place.start_agent()
    await stage(client, place, "s1", path, bucket_bytes=256)
    gate = Gate(3)
    waiting = load(place, 0, "s1", ModelLoader(gate))
    send = asyncio.ensure_future(client.send(session="s1", timeout_s=30))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    await client.discard(session="s1")
    with pytest.raises(TransferError, match="cancelled"):
        await send
    gate.open.set()
    assert "the sender gave up: cancelled" in (await waiting).error
    assert place.segments() == []
    with pytest.raises(StageError, match="not sent here"):
        await client.committed(session="s1")
    await repair(client, place, path, tensors)


async def test_a_newer_session_replaces_one_that_is_not_loading(
    place: Place, client: AgentClient
) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors))
    place.start_agent()
    await stage(client, place, "s1", path)
    await stage(client, place, "s2", path)
    report = await load(place, 0, "s1", ModelLoader())
    assert "session 's1' is not known here; 's2' is" in report.error
    with pytest.raises(TransferError, match="not staged here"):
        await client.send(session="s1", timeout_s=5)
    with pytest.raises(StageError, match="other contents"):
        await stage(client, place, "s2", path, version="step-9")
    await repair(client, place, path, tensors)


async def test_the_sender_must_address_all_ranks_over_shared_memory(
    place: Place, client: AgentClient
) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    receivers = place.start_receivers(expected_of(tensors), None)
    place.start_agent()

    async def refused(words: str, retryable: bool, sockets: list[Path]) -> None:
        with pytest.raises(StageError, match=words) as caught:
            await stage(client, place, "s1", path, rank_sockets=sockets)
        assert (caught.value.kind, caught.value.retryable) == ("ranks", retryable)

    one, two = place.rank_sockets
    await refused("must address all ranks", False, [one])
    await refused("must address all ranks", False, [two, one])
    await refused("nobody listens on .*rank-7.sock", True, [one, two.with_name("rank-7.sock")])
    await refused("rank 1: the engine has not recorded its boot load", True, [one, two])
    receivers[1]._memories.shm_dir = place.root
    await refused("transport shared_memory does not.*mount the same", False, [one, two])
    assert place.segments() == []


async def test_stale_files_and_a_second_agent(place: Place, client: AgentClient) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    (place.run_dir / "ranks").mkdir(parents=True)
    for stale in (place.run_dir / "ranks" / "rank-0.sock", place.agent_socket):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(stale))
    foreign = place.shm_dir / "rollout-ffffffffffff-1"
    foreign.write_bytes(b"of another pod that shares the memory")
    orphan = place.shm_dir / f"{PUSH_PREFIX}1"
    orphan.write_bytes(b"of a trainer that was killed")
    alive = Segment.create(place.shm_dir, f"{PUSH_PREFIX}2", 1)
    place.start_receivers(expected_of(tensors))
    place.start_agent()
    await repair(client, place, path, tensors)
    with pytest.raises(AgentError, match="another agent"):
        await run_agent(place.run_dir, place.shm_dir, 1 << 20, asyncio.Event())
    assert foreign.exists()
    assert not orphan.exists()
    assert alive.path.exists()
    alive.close()


async def test_agent_stops_on_request(place: Place, client: AgentClient) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors))
    agent = place.start_agent()
    await stage(client, place, "s1", path)
    waiting = load(place, 0, "s1", ModelLoader())
    agent.send_signal(signal.SIGTERM)
    assert not (await waiting).ok
    assert await asyncio.to_thread(agent.wait, 10) == 0
    assert place.segments() == []
    assert not place.agent_socket.exists()


async def test_receiver_is_closed_while_it_loads(place: Place, client: AgentClient) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors)
    (receiver,) = place.start_receivers(expected_of(tensors))
    place.start_agent()
    await stage(client, place, "s1", path)
    waiting = load(place, 0, "s1", ModelLoader())
    await asyncio.to_thread(until, lambda: receiver._talker.loading() is not None)
    receiver.close()
    assert "receiver was closed" in (await waiting).error

"""Updates that succeed: a real agent process, real receivers, real shared memory."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest
import torch

from rollout_pod.weights.agent_client import AgentClient
from rollout_pod.weights.receiver import Receiver
from tests.support.fake_device import FakeDevice
from tests.support.weights import (
    ModelLoader,
    Place,
    RudeLoader,
    expected_of,
    mixed_tensors,
    same,
    write_checkpoint,
)


async def update(
    client: AgentClient,
    place: Place,
    loaders: list[ModelLoader],
    session: str,
    version: str,
    path: Path,
    bucket_bytes: int = 4096,
    flush: bool = False,
) -> None:
    staged = await client.stage(
        session=session, version=version, path=path, rank_sockets=place.rank_sockets,
        bucket_bytes=bucket_bytes, timeout_s=30,
    )  # fmt: skip
    assert (staged.session, staged.version, staged.transport) == (session, version, "shared_memory")

    def load(receiver: Receiver, loader: ModelLoader):
        return receiver.load(session, loader, version=version, flush=flush, timeout_s=30)

    *reports, sent = await asyncio.gather(
        *(
            asyncio.to_thread(load, receiver, loader)
            for receiver, loader in zip(place.receivers, loaders, strict=True)
        ),
        client.send(session=session, timeout_s=30),
    )
    assert all(report.ok for report in reports), reports
    assert sent.reports == tuple(reports)
    assert sent.bytes == staged.bytes == reports[0].bytes
    assert reports[0].tensors == staged.tensors
    await client.committed(session=session)


async def test_what_is_staged_is_pinned_before_the_gate_closes(
    place: Place, client: AgentClient, tmp_path: Path
) -> None:
    """Both versions that the agent holds stay pinned, each once; on a rank with a GPU."""
    gpu = FakeDevice(place.root / "gpu")
    place.start_receivers(expected_of(mixed_tensors(0)), device=gpu)
    place.start_agent()
    for number in range(4):
        tensors = mixed_tensors(number)
        path = write_checkpoint(tmp_path / f"step-{number}", tensors)
        stage = {
            "session": f"s{number}", "version": f"step-{number}", "path": path,
            "rank_sockets": place.rank_sockets, "bucket_bytes": 4096, "timeout_s": 30,
        }  # fmt: skip
        await client.stage(**stage)
        pinned = sorted(gpu.pinned.values())
        assert len(pinned) == min(2, number + 1), "the committed one and the next"
        calls = gpu.calls["register"]
        loader = ModelLoader()
        load = asyncio.to_thread(
            place.receivers[0].load, f"s{number}", loader, version=f"step-{number}", flush=False,
            timeout_s=30,
        )  # fmt: skip
        report, _ = await asyncio.gather(load, client.send(session=f"s{number}", timeout_s=30))
        assert report.ok and same(loader.model, tensors)
        assert (report.transport, report.mode) == ("shared_memory", "bucketed")
        assert gpu.calls["register"] == calls, "nothing is pinned during an update"
        await client.committed(session=f"s{number}")
    assert gpu.calls["register"] == 2, "memory that is used again is pinned already"


@pytest.mark.parametrize("bucket_bytes", [256, 1000, 4096, 1 << 20])
@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (2, 3)])
async def test_round_trip(
    place: Place, client: AgentClient, bucket_bytes: int, ranks: int, shards: int
) -> None:
    tensors = mixed_tensors(1)
    path = write_checkpoint(place.root / "step-1", tensors, shards)
    place.start_receivers(*[expected_of(mixed_tensors(0))] * ranks)
    place.start_agent()
    loaders = [ModelLoader() for _ in range(ranks)]
    await update(client, place, loaders, "s1", "step-1", path, bucket_bytes)
    for loader in loaders:
        assert same(loader.model, tensors)
        assert loader.calls == ["begin", "finish"]


async def test_a_loader_that_changes_views_in_place_harms_nobody(
    place: Place, client: AgentClient
) -> None:
    """The same segment serves both ranks and the next update."""
    tensors = {"a": torch.arange(5000.0), "b": torch.arange(3)}
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors), expected_of(tensors))
    place.start_agent()

    for number in range(2):
        loaders = [RudeLoader(), ModelLoader()]
        await update(client, place, loaders, f"s{number}", "step-1", path)
        assert all(same(loader.model, tensors) for loader in loaders)


async def test_the_same_version_is_read_once_and_two_are_kept(
    place: Place, client: AgentClient
) -> None:
    first, second, third = (mixed_tensors(seed) for seed in (1, 2, 3))
    paths = [
        write_checkpoint(place.root / f"step-{i}", t) for i, t in enumerate((first, second, third))
    ]
    place.start_receivers(expected_of(first))
    place.start_agent()
    loader = ModelLoader()

    await update(client, place, [loader], "s0", "step-0", paths[0])
    kept = place.segments()
    await update(client, place, [loader], "s1", "step-0", paths[0])
    assert place.segments() == kept

    await update(client, place, [loader], "s2", "step-1", paths[1])
    held = {slot.version: slot.committed for slot in (await client.status()).slots}
    assert held == {"step-0": False, "step-1": True}
    both = place.segments()
    await update(client, place, [loader], "s3", "step-2", paths[2])
    held = {slot.version: slot.committed for slot in (await client.status()).slots}
    assert held == {"step-1": False, "step-2": True}
    assert place.segments() == both, "memory of the version that was given up is used again"
    assert same(loader.model, third)

    # other bytes under the same name and path are another version
    again = mixed_tensors(4)
    write_checkpoint(paths[2], again)
    await update(client, place, [loader], "s4", "step-2", paths[2])
    assert same(loader.model, again)


async def test_progress_and_idempotent_stage(place: Place, client: AgentClient) -> None:
    tensors = {"a": torch.zeros(24 << 20, dtype=torch.uint8)}
    path = write_checkpoint(place.root / "step-1", tensors)
    place.start_receivers(expected_of(tensors))
    place.start_agent()
    call = {
        "session": "s1", "version": "step-1", "path": path, "bucket_bytes": 1 << 20,
        "rank_sockets": place.rank_sockets, "timeout_s": 30,
    }  # fmt: skip
    one, two = await asyncio.gather(client.stage(**call), client.stage(**call))
    assert one == two == await client.stage(**call)
    assert len(place.segments()) == 1
    await client.discard(session="s1")
    assert place.segments() == []


async def test_two_hundred_updates_leave_nothing_behind(place: Place, client: AgentClient) -> None:
    versions = [mixed_tensors(seed) for seed in range(2)]
    paths = [write_checkpoint(place.root / f"v{i}", t) for i, t in enumerate(versions)]
    place.start_receivers(expected_of(versions[0]), expected_of(versions[0]))
    agent = psutil.Process(place.start_agent().pid)
    here = psutil.Process(os.getpid())
    loaders = [ModelLoader(), ModelLoader()]

    def usage() -> list[int]:
        return [n for p in (here, agent) for n in (p.num_fds(), p.num_threads())]

    baseline: list[int] = []
    memory: list[int] = []
    for number in range(200):
        if number == 40:
            baseline = usage()
            memory = [process.memory_info().rss for process in (here, agent)]
        await update(
            client, place, loaders, f"s{number}", f"v{number % 2}", paths[number % 2], 8192
        )
    assert same(loaders[1].model, versions[1])
    more = [now - before for now, before in zip(usage(), baseline, strict=True)]
    assert max(more) <= 5, f"fds and threads here, there: {more}; a pool may still have grown"
    grown = [p.memory_info().rss - before for p, before in zip((here, agent), memory, strict=True)]
    assert max(grown) < 8 << 20, grown
    assert len(place.segments()) == 2
    place.close()
    assert place.segments() == []
    assert not any(receiver.socket_path.exists() for receiver in place.receivers)

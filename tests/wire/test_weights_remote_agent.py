"""The real agent with sources behind URLs: what it fetches, keeps, sends again and says."""

import asyncio
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rollout_pod.weights.agent_client import AgentClient, Sent, StageError
from rollout_pod.weights.report import LoadReport
from tests.support.file_server import (
    FileServer,
    Handler,
    file_server,
    sha256,
    stall_after,
    status,
    wrong_bytes,
)
from tests.support.weights import (
    ModelLoader,
    Place,
    expected_of,
    mixed_tensors,
    same,
    until,
    write_checkpoint,
)

MIB = 1 << 20
SHARD = "model.safetensors"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as made:
        yield made


class Pod:
    """One rank, updated as the supervisor does it."""

    def __init__(self, client: AgentClient, place: Place) -> None:
        self.client, self.place = client, place
        self.loader = ModelLoader()
        self.progress: list[tuple[int, int]] = []
        self.bucket_bytes = 4096
        self._sessions = 0

    async def stage(self, version: str, path: str | Path, timeout_s: float = 30) -> str:
        self._sessions += 1
        session = f"s{self._sessions}"
        await self.client.stage(
            session=session, version=version, path=path, rank_sockets=self.place.rank_sockets,
            bucket_bytes=self.bucket_bytes, timeout_s=timeout_s,
            on_progress=lambda *news: self.progress.append(news),
        )  # fmt: skip
        return session

    async def load(self, session: str, version: str, *, flush: bool = False) -> bool:
        receiver = self.place.receivers[0]
        report, sent = await asyncio.gather(
            asyncio.to_thread(
                receiver.load, session, self.loader, version=version, flush=flush, timeout_s=30
            ),
            self.client.send(session=session, timeout_s=30),
            return_exceptions=True,
        )
        assert isinstance(report, LoadReport)
        assert report.ok == isinstance(sent, Sent)
        return report.ok

    async def update(self, version: str, path: str | Path) -> None:
        session = await self.stage(version, path)
        assert await self.load(session, version)
        await self.client.committed(session=session)


def filled(number: int, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), number, dtype=torch.uint8), "b": torch.arange(5.0) + number}


async def test_updates_from_a_server(place: Place, client: AgentClient, server: FileServer) -> None:
    versions = [mixed_tensors(seed) for seed in (1, 2)]
    urls = [
        server.publish(f"step-{i}", write_checkpoint(place.root / f"step-{i}", t, 3))
        for i, t in enumerate(versions)
    ]
    place.start_receivers(expected_of(versions[0]))
    place.start_agent()
    pod = Pod(client, place)
    for version in (0, 1, 0):
        await pod.update(f"step-{version}", urls[version])
        assert same(pod.loader.model, versions[version])
    held = {slot.version: (slot.path, slot.committed) for slot in (await client.status()).slots}
    assert held == {"step-0": (urls[0], True), "step-1": (urls[1], False)}


@pytest.mark.parametrize(
    ("kind", "gone"),
    [
        ("url", "missing"), ("url", "broken"), ("url", "hangs"),
        ("folder", "missing"), ("folder", "broken"),
    ],
)  # fmt: skip
async def test_the_committed_version_is_sent_again_without_its_source(
    place: Place, client: AgentClient, server: FileServer, kind: str, gone: str
) -> None:
    """After a failed update in place, and for an engine that started anew."""
    one = write_checkpoint(place.root / "step-1", filled(1))
    two = write_checkpoint(place.root / "step-2", filled(2))
    sources: list[str | Path] = [one, two]
    if kind == "url":
        sources = [server.publish("step-1", one), server.publish("step-2", two)]
    place.start_receivers(expected_of(filled(0)))
    place.start_agent()
    pod = Pod(client, place)
    await pod.update("step-1", sources[0])

    if kind == "url":
        fault = {"missing": status(404), "broken": status(403), "hangs": stall_after(0)}[gone]
        server.always[f"/step-1/{SHARD}"] = fault
    elif gone == "missing":
        shutil.rmtree(one)
    else:
        (one / SHARD).write_bytes(b"x")

    def refuse(number: int) -> None:
        raise RuntimeError("no")

    pod.loader.on_load = refuse
    session = await pod.stage("step-2", sources[1])
    assert not await pod.load(session, "step-2")
    pod.loader.on_load = None
    pod.loader.model.clear()
    session = await pod.stage("step-1", sources[0])
    assert await pod.load(session, "step-1", flush=True)
    assert same(pod.loader.model, filled(1))
    await client.committed(session=session)

    place.receivers.pop().close()  # the engine's process starts anew
    place.start_receivers(expected_of(filled(0)))
    pod.loader = ModelLoader()
    session = await pod.stage("step-1", sources[0])
    assert await pod.load(session, "step-1")
    assert same(pod.loader.model, filled(1))

    # nothing but the committed version: what lies elsewhere, or is called otherwise, is another
    with pytest.raises(StageError) as caught:
        await pod.stage("step-3", sources[0], timeout_s=2)
    assert caught.value.kind in ("source", "timeout")


class HalfThere:
    """Of a file in four pieces two arrive; the server forbids the rest when it is told to."""

    def __init__(self, server: FileServer, place: Place) -> None:
        self.tensors = {"a": torch.arange(16 * MIB, dtype=torch.int32)}
        self.url = server.publish("v", write_checkpoint(place.root / "v", self.tensors))
        self.forbid = threading.Event()
        self._server = server
        self._pieces = itertools.count(1)
        server.always[f"/v/{SHARD}"] = self._answer

    def _answer(self, handler: Handler, content: bytes) -> bool:
        if handler.asked(content)[0] < MIB and handler.asked(content)[1] < MIB:
            return False  # the header
        if next(self._pieces) <= 2:
            return False
        assert self.forbid.wait(60)
        return status(403)(handler, content)

    async def fetch(self, pod: Pod) -> None:
        pod.bucket_bytes = MIB
        staging = asyncio.create_task(pod.stage("v", self.url))
        await asyncio.to_thread(until, lambda: (32 * MIB, 64 * MIB) in pod.progress, 30)
        self.forbid.set()
        with pytest.raises(StageError, match="HTTP 403, not allowed"):
            await staging
        (slot,) = (await pod.client.status()).slots
        assert (slot.version, slot.ready) == ("v", False)
        del self._server.always[f"/v/{SHARD}"]


async def test_a_fetch_that_was_cut_off_goes_on_with_the_next_attempt(
    place: Place, client: AgentClient, server: FileServer
) -> None:
    half = HalfThere(server, place)
    place.start_receivers(expected_of(half.tensors))
    place.start_agent(host_memory=80 * MIB)
    pod = Pod(client, place)
    await half.fetch(pod)
    before = server.sent
    await pod.update("v", half.url)
    assert server.sent - before < 33 * MIB
    assert torch.equal(pod.loader.model["a"], half.tensors["a"])


async def test_a_part_of_other_bytes_is_not_gone_on_with(
    place: Place, client: AgentClient, server: FileServer
) -> None:
    half = HalfThere(server, place)
    place.start_receivers(expected_of(half.tensors))
    place.start_agent(host_memory=80 * MIB)
    pod = Pod(client, place)
    await half.fetch(pod)
    other = {"a": half.tensors["a"] + 1}
    server.publish("v", write_checkpoint(place.root / "v", other))
    await pod.update("v", half.url)
    assert torch.equal(pod.loader.model["a"], other["a"])


async def test_the_part_of_a_version_that_nobody_wants_any_more_makes_way(
    place: Place, client: AgentClient, server: FileServer
) -> None:
    half = HalfThere(server, place)
    place.start_receivers(expected_of(half.tensors))
    place.start_agent(host_memory=80 * MIB)
    pod = Pod(client, place)
    await half.fetch(pod)
    await pod.update("w", write_checkpoint(place.root / "w", half.tensors))
    assert [slot.version for slot in (await client.status()).slots] == ["w"]
    assert len(place.segments()) == 1


async def test_wrong_bytes_reach_no_engine_and_are_read_again(
    place: Place, client: AgentClient, server: FileServer
) -> None:
    folder = write_checkpoint(place.root / "v", filled(1))
    (folder / "SHA256SUMS").write_text(f"{sha256((folder / SHARD).read_bytes())}  {SHARD}\n")
    url = server.publish("v", folder)
    server.faults[f"/v/{SHARD}"] = [lambda *_: False, wrong_bytes]
    place.start_receivers(expected_of(filled(0)))
    place.start_agent()
    pod = Pod(client, place)
    with pytest.raises(StageError, match=f"{url}/{SHARD}: wrong bytes") as caught:
        await pod.stage("v", url)
    assert caught.value.kind == "source"
    assert pod.loader.calls == []
    assert place.segments() == []
    await pod.update("v", url)
    assert same(pod.loader.model, filled(1))


async def test_two_versions_that_do_not_fit_are_refused_with_the_sums(
    place: Place, client: AgentClient, server: FileServer
) -> None:
    tensors = [{"a": torch.full((MIB,), n, dtype=torch.uint8)} for n in (1, 2)]
    urls = [
        server.publish(f"v{n}", write_checkpoint(place.root / f"v{n}", t))
        for n, t in enumerate(tensors)
    ]
    place.start_receivers(expected_of(tensors[0]))
    place.start_agent(host_memory=2 * MIB - 1)
    pod = Pod(client, place)
    await pod.update("v0", urls[0])
    with pytest.raises(StageError) as caught:
        await pod.stage("v1", urls[1])
    assert (caught.value.kind, caught.value.retryable) == ("room", False)
    assert (
        f"needs {MIB} bytes of shared memory: the limit is {2 * MIB - 1}, {MIB} hold 'v0'"
        in str(caught.value)
    )
    assert f"at least {2 * MIB} (spec.weights.hostMemory" in str(caught.value)
    session = await pod.stage("v0", urls[0])
    assert await pod.load(session, "v0"), "the committed one stays"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
async def test_shared_memory_that_is_too_small(
    place: Place, client: AgentClient, server: FileServer, small_memory: Callable[[str], None]
) -> None:
    tensors = {"a": torch.zeros(MIB, dtype=torch.uint8)}
    url = server.publish("v", write_checkpoint(place.root / "v", tensors))
    place.start_receivers(expected_of(tensors))
    place.start_agent()
    pod = Pod(client, place)
    with pytest.raises(StageError) as caught:
        await pod.stage("v", url)
    assert (caught.value.kind, caught.value.retryable) == ("room", True)
    assert f"{MIB} bytes are needed, {512 << 10} of {512 << 10} are free" in str(caught.value)
    assert "give the memory volume a larger sizeLimit" in str(caught.value)
    small_memory("4m")
    await pod.update("v", url)

"""A receiver whose loader replays: every transport, and what a failure says of the model."""

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.synthetic import SHAPES, SyntheticLoader, make_tensors
from rollout_pod.weights import pinned
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.loader import Expected
from rollout_pod.weights.replay import UploadReplayer
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import TransferFailed
from rollout_pod.weights.trainer import WeightSender
from tests.support.fake_device import FakeDevice
from tests.support.weights import Place, make_place, same


@pytest.fixture(params=["tiny", "tiny-moe"])
def shape(request: pytest.FixtureRequest):
    return SHAPES[request.param]


@pytest.fixture
def place(shape) -> Iterator[Place]:
    specs = {n: spec_of(n, t) for n, t in make_tensors(shape, "cpu", 0).items()}
    with make_place() as made:
        made.start_receivers(Expected(specs), device=FakeDevice(made.root / "gpu"))
        yield made


async def send(place: Place, sender: WeightSender, loader, version: str, tensors) -> LoadReport:
    loop = asyncio.get_running_loop()
    loads: list[asyncio.Future[LoadReport]] = []

    def accepted(session: str) -> None:
        call = loop.run_in_executor(
            None,
            lambda: place.receivers[0].load(
                session, loader, version=version, flush=False, timeout_s=20
            ),
        )
        loads.append(call)

    try:
        await sender.send_async(version, tensors, timeout_s=20, on_accepted=accepted)
    except TransferFailed:
        assert not (await loads[0]).ok
    return await loads[0]


def held(loader: SyntheticLoader, tensors) -> bool:
    return same({name: loader.target(name) for name in tensors}, tensors)


def tables_of(sender: WeightSender) -> dict:
    ring = sender._memory.ring
    return dict(ring.tables._ready) if ring is not None and ring.tables is not None else {}


@pytest.mark.parametrize("how", ["direct", "bucketed", "shared_memory"])
@pytest.mark.parametrize("bucket_bytes", [1000, 1 << 20])
async def test_replayed_is_recorded(place, shape, how: str, bucket_bytes: int) -> None:
    gpu = FakeDevice(place.root / "gpu")
    settings = {"mode": how} if how != "shared_memory" else {"transport": how}
    sender = WeightSender(
        place.rank_sockets, shm_dir=place.shm_dir, device=gpu, bucket_bytes=bucket_bytes,
        **settings,
    )  # fmt: skip
    loader = SyntheticLoader(shape, "cpu", None)
    tensors = gpu.give(make_tensors(shape, "cpu", 0))
    for number, path in enumerate(("recorded", "replayed", "replayed")):
        for name, tensor in make_tensors(shape, "cpu", number).items():
            tensors[name].copy_(tensor)
        report = await send(place, sender, loader, f"v{number}", tensors)
        assert (report.error, report.path, report.touched) == ("", path, True)
        assert held(loader, tensors)
    kept = len(loader._prepared)
    filled = tables_of(sender)
    await send(place, sender, loader, "once-more", tensors)
    assert len(loader._prepared) == kept > 0, "tables are made once"
    again = tables_of(sender)
    assert all(again[seq] is filled[seq] for seq in filled), "and so are the sender's"
    assert bool(filled) == (how == "bucketed")

    # elsewhere, and so by other tables
    moved = gpu.give(make_tensors(shape, "cpu", 5))
    assert (await send(place, sender, loader, "moved", moved)).ok
    assert held(loader, moved)
    assert not any(tables_of(sender)[seq] is filled[seq] for seq in filled)
    sender.close()


async def test_no_copy_touches_two_pinned_pieces(place, shape, monkeypatch) -> None:
    """The driver refuses such a copy, and so does the fake."""
    monkeypatch.setattr(pinned, "PIN_BYTES", 4096)
    gpu = FakeDevice(place.root / "gpu")
    sender = WeightSender(
        place.rank_sockets, shm_dir=place.shm_dir, device=gpu, transport="shared_memory",
        bucket_bytes=10_000,
    )  # fmt: skip
    loader = SyntheticLoader(shape, "cpu", None)
    loader._far = UploadReplayer(place.receivers[0]._memories.device)
    for number, path in enumerate(("recorded", "replayed", "replayed")):
        tensors = make_tensors(shape, "cpu", number)
        report = await send(place, sender, loader, f"v{number}", tensors)
        assert (report.error, report.path) == ("", path)
        assert held(loader, tensors)
    memories = place.receivers[0]._memories
    (mapping,) = [memories.get(name) for name in memories.kept]
    edge = -mapping.address % 4096 or 4096
    assert mapping.view(edge - 8, 8).data_ptr() == mapping.address + edge - 8
    assert mapping.view(edge - 8, 16).data_ptr() != mapping.address + edge - 8
    assert bytes(mapping.view(edge - 8, 16)) == mapping.map[edge - 8 : edge + 8]
    sender.close()


async def test_a_failure_says_whether_the_model_was_touched(place, shape) -> None:
    sender = WeightSender(place.rank_sockets, shm_dir=place.shm_dir, bucket_bytes=1000)
    loader = SyntheticLoader(shape, "cpu", None)
    first = make_tensors(shape, "cpu", 1)
    assert (await send(place, sender, loader, "v1", first)).ok
    manifest = sender._looker.manifest
    sender.close()

    silent = Session("silent", place.rank_sockets, place.shm_dir)
    silent.greet(5)
    silent.offer(manifest.renamed("v2"), 5)
    load = asyncio.ensure_future(
        asyncio.to_thread(
            place.receivers[0].load, "silent", loader, version="v2", flush=False, timeout_s=20
        )
    )
    silent.abort("nothing to send")
    report = await load
    silent.close()
    assert (report.ok, report.touched) == (False, False)
    assert held(loader, first)


async def test_a_sender_that_stops_half_way_leaves_a_model_that_counts_as_touched(
    place, shape
) -> None:
    sender = WeightSender(place.rank_sockets, shm_dir=place.shm_dir, bucket_bytes=1000)
    loader = SyntheticLoader(shape, "cpu", None)
    first, second = (make_tensors(shape, "cpu", seed) for seed in (1, 2))
    assert (await send(place, sender, loader, "v1", first)).ok
    report = await send(place, sender, loader, "v2", iter(list(second.items())[:-1]))
    assert (report.ok, report.touched, report.path) == (False, True, "replayed")
    assert not held(loader, first)
    assert not held(loader, second)
    report = await send(place, sender, loader, "v2", second)
    assert report.ok
    assert held(loader, second)
    sender.close()

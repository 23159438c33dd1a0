"""A version that waits beside the model: taken while the engine serves, given to it by one copy."""

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.synthetic import SHAPES, SyntheticLoader, make_tensors
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.loader import Expected
from rollout_pod.weights.replay import HostReplayer
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.session_errors import ManifestError, TransferFailed
from rollout_pod.weights.shadow import Shadow, ShadowError
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


class Rank:
    """A model, what waits beside it, and its trainer."""

    def __init__(self, place: Place, shape, **settings) -> None:
        self.place, self.shape = place, shape
        self.gpu = FakeDevice(place.root / "gpu")
        self.loader = SyntheticLoader(shape, "cpu", None)
        self.aside = self.loader.staging(None)
        self.sender = WeightSender(
            place.rank_sockets, shm_dir=place.shm_dir, device=self.gpu, bucket_bytes=4096,
            **settings,
        )  # fmt: skip

    def tensors(self, seed: int):
        return self.gpu.give(make_tensors(self.shape, "cpu", seed))

    async def send(self, version: str, tensors, *, aside: bool) -> LoadReport:
        loop = asyncio.get_running_loop()
        loads: list[asyncio.Future[LoadReport]] = []

        def accepted(session: str) -> None:
            call = loop.run_in_executor(
                None,
                lambda: self.place.receivers[0].load(
                    session, self.aside if aside else self.loader, version=version, flush=False,
                    timeout_s=20, aside=aside,
                ),
            )  # fmt: skip
            loads.append(call)

        try:
            await self.sender.send_async(version, tensors, timeout_s=20, on_accepted=accepted)
        except TransferFailed:
            assert not (await loads[0]).ok
        return await loads[0]

    def holds(self, seed: int) -> bool:
        tensors = make_tensors(self.shape, "cpu", seed)
        return same({name: self.loader.target(name) for name in tensors}, tensors)


@pytest.mark.parametrize("how", ["direct", "bucketed", "shared_memory"])
async def test_it_waits_and_is_switched_to(place, shape, how: str) -> None:
    settings = {"mode": how} if how != "shared_memory" else {"transport": how}
    rank = Rank(place, shape, **settings)
    assert (await rank.send("v1", rank.tensors(1), aside=False)).path == "recorded"
    for seed in (2, 3, 4):
        report = await rank.send(f"v{seed}", rank.tensors(seed), aside=True)
        assert (report.ok, report.path, report.touched) == (True, "staged", False)
        assert rank.holds(seed - 1), "the model serves on as it was"
        manifest = rank.loader.switch(f"v{seed}")
        assert (manifest.version, manifest.nbytes) == (f"v{seed}", report.bytes)
        assert rank.holds(seed)
    # an ordinary update in between, and back to what waits
    assert (await rank.send("v5", rank.tensors(5), aside=False)).path == "replayed"
    assert rank.holds(5)
    rank.loader.switch("v4")
    assert rank.holds(4)
    rank.sender.close()


async def test_nothing_can_wait_before_the_first_update(place, shape) -> None:
    rank = Rank(place, shape)
    report = await rank.send("v1", rank.tensors(1), aside=True)
    assert (report.ok, report.touched) == (False, False)
    assert "nothing was recorded yet" in report.error
    await rank.send("v1", rank.tensors(1), aside=False)
    with pytest.raises(ShadowError, match="nothing waits on the device"):
        rank.loader.switch("v1")
    assert rank.holds(1)
    rank.sender.close()


async def test_what_did_not_come_whole_does_not_wait(place, shape) -> None:
    rank = Rank(place, shape, mode="bucketed")
    await rank.send("v1", rank.tensors(1), aside=False)
    await rank.send("v2", rank.tensors(2), aside=True)
    report = await rank.send("v3", iter(list(rank.tensors(3).items())[:-1]), aside=True)
    assert (report.ok, report.touched) == (False, False), "the model is as it was"
    assert rank.holds(1)
    for version in ("v2", "v3"):
        with pytest.raises(ShadowError, match="nothing waits"):
            rank.loader.switch(version)
    assert rank.holds(1)
    await rank.send("v4", rank.tensors(4), aside=True)
    with pytest.raises(ShadowError, match="version 'v4' waits on the device, not version 'v3'"):
        rank.loader.switch("v3")
    rank.loader.switch("v4")
    assert rank.holds(4)
    rank.sender.close()


async def test_a_model_that_is_loaded_in_another_way_since(place, shape) -> None:
    rank = Rank(place, shape)
    await rank.send("v1", rank.tensors(1), aside=False)
    await rank.send("v2", rank.tensors(2), aside=True)
    rank.loader._plan = None  # a parameter moved: the next load records anew
    await rank.send("v3", rank.tensors(3), aside=False)
    with pytest.raises(ShadowError, match="stage it again"):
        rank.loader.switch("v2")
    assert rank.holds(3)
    await rank.send("v4", rank.tensors(4), aside=True)
    rank.loader.switch("v4")
    assert rank.holds(4)
    rank.sender.close()


async def test_a_slot_that_is_too_small(place, shape) -> None:
    rank = Rank(place, shape)
    await rank.send("v1", rank.tensors(1), aside=False)
    rank.aside._shadow = Shadow(rank.loader.shadow.address, 1000)
    report = await rank.send("v2", rank.tensors(2), aside=True)
    assert not report.ok
    assert "1000 were reserved for it" in report.error
    with pytest.raises(ShadowError):
        rank.aside._shadow.switch("v2", rank.loader._plan, HostReplayer())
    assert rank.holds(1)
    rank.sender.close()


@pytest.mark.parametrize("shape", ["tiny"], indirect=True)
@pytest.mark.parametrize("how", ["direct", "bucketed"])
async def test_two_hundred_that_wait_leave_nothing_behind(place, shape, how: str) -> None:
    """Every third one fails: the manifest of it, or, in buckets, the end of it."""
    rank, process = Rank(place, shape, mode=how), psutil.Process()
    ranks_view = place.receivers[0]._memories.device
    held = rank.tensors(0)

    def usage() -> tuple[int, ...]:
        of_gpus = rank.gpu.in_use, ranks_view.in_use
        return *of_gpus, process.num_fds(), process.num_threads(), len(place.segments())

    assert (await rank.send("v0", held, aside=False)).ok
    waits, before = "", ()
    for number in range(200):
        if number == 20:
            before = usage()
        seed, version = number % 4, f"v{number}"
        for name, tensor in make_tensors(shape, "cpu", seed).items():
            held[name].copy_(tensor)
        if number % 3 == 2:
            short = list(held.items())[:-1]
            if how == "bucketed":
                assert not (await rank.send(version, iter(short), aside=True)).ok
                waits = ""
            else:
                with pytest.raises(ManifestError, match="missing"):
                    await rank.sender.send_async(version, dict(short), timeout_s=20)
        else:
            assert (await rank.send(version, held, aside=True)).path == "staged"
            waits, kept = version, seed
        if number % 2 and waits:
            rank.loader.switch(waits)
            assert rank.holds(kept)
    after = usage()
    assert all(now <= then + 2 for now, then in zip(after, before, strict=True)), (before, after)
    rank.sender.close()
    assert (rank.gpu.in_use, place.segments()) == (1, []), "the tensors' own"

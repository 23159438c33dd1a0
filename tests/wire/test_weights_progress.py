"""Buckets whose messages run ahead of the GPUs' copies, and what stops when a GPU does."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from benchmarks.synthetic import SHAPES, SyntheticLoader, make_tensors
from rollout_pod.weights import talking, wire
from rollout_pod.weights.device import DeviceError
from rollout_pod.weights.fill import Filler, spec_of
from rollout_pod.weights.loader import Expected
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import ManifestError, TransferFailed
from rollout_pod.weights.trainer import SentWeights, WeightSender
from tests.support.fake_device import FakeDevice
from tests.support.weights import Place, make_place, same, until

SHAPE = SHAPES["tiny"]
BUCKET = 16 << 10


@pytest.fixture
def place() -> Iterator[Place]:
    specs = {n: spec_of(n, t) for n, t in make_tensors(SHAPE, "cpu", 0).items()}
    with make_place() as made:
        made.start_receivers(Expected(specs), device=FakeDevice(made.root / "gpu"))
        yield made


class Pair:
    """A trainer and a rank that replays, after two updates."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ours = FakeDevice(place.root / "gpu")
        self.theirs = place.receivers[0]._memories.device
        self.loader = SyntheticLoader(SHAPE, "cpu", None)
        self.sender = WeightSender(
            place.rank_sockets, shm_dir=place.shm_dir, device=self.ours, mode="bucketed",
            bucket_bytes=BUCKET,
        )  # fmt: skip
        self.loads: list[asyncio.Future] = []

    async def send(self, seed: int) -> SentWeights:
        loop = asyncio.get_running_loop()
        version = f"v{seed}"

        def accepted(session: str) -> None:
            self.loads.append(
                loop.run_in_executor(
                    None,
                    lambda: self.place.receivers[0].load(
                        session, self.loader, version=version, flush=False, timeout_s=20
                    ),
                )
            )

        tensors = make_tensors(SHAPE, "cpu", seed)
        # on the device, so that one kernel fills a bucket
        return await self.sender.send_async(
            version, self.ours.give(tensors), timeout_s=20, on_accepted=accepted
        )

    def holds(self, seed: int) -> bool:
        tensors = make_tensors(SHAPE, "cpu", seed)
        return same({name: self.loader.target(name) for name in tensors}, tensors)


@pytest.fixture
async def pair(place: Place, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(talking, "IDLE_S", 0.1)
    made = Pair(place)
    for seed in (1, 2):
        sent = await made.send(seed)
        assert (sent.mode, sent.reason) == ("bucketed", "")
        assert made.holds(seed)
    assert (await made.loads[-1]).path == "replayed"
    assert place.segments() == [], "the page has no name any more"
    yield made
    made.ours.catch_up()
    made.theirs.catch_up()
    await asyncio.to_thread(made.sender.close)
    assert not made.ours.pinned
    # of a sender that failed the rank lets go when it finds it gone
    await asyncio.to_thread(until, lambda: not made.theirs.pinned)


async def held_back(device: FakeDevice, count: int) -> None:
    """So many signals are queued, and no more come."""
    await asyncio.to_thread(until, lambda: device.held is not None and len(device.held) >= count)
    await asyncio.sleep(0.1)
    assert len(device.held) == count


async def test_no_bucket_is_read_before_it_is_filled(pair: Pair) -> None:
    pair.ours.hold()
    sending = asyncio.ensure_future(pair.send(3))
    await held_back(pair.ours, 1 + 1)  # two buckets are announced, and none is acknowledged
    assert pair.holds(2), "the rank waits for the GPU, not for the message"
    pair.ours.catch_up()
    assert (await sending).seconds["fill"] >= 0
    assert pair.holds(3)


async def test_no_bucket_is_filled_again_before_it_is_copied(pair: Pair) -> None:
    pair.theirs.hold()
    before = pair.ours.calls["signal"]
    sending = asyncio.ensure_future(pair.send(3))
    await held_back(pair.theirs, 2)  # both are acknowledged, and copied nobody knows when
    assert pair.ours.calls["signal"] - before == 2
    buckets = len(pair.sender._looker.manifest.plan(BUCKET).buckets)
    assert buckets > 4
    pair.theirs.catch_up()
    await sending
    assert pair.ours.calls["signal"] - before == buckets
    assert pair.holds(3)


async def test_the_first_bucket_is_filled_while_the_ranks_are_greeted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    fill, wait = Filler._fill, Session._wait_ranks

    def fills(self, bucket, base) -> int:
        happened.append(f"fill {bucket.seq}")
        return fill(self, bucket, base)

    def waits(self, done, timeout_s: float, what: str) -> None:
        happened.append(what)
        wait(self, done, timeout_s, what)

    monkeypatch.setattr(Filler, "_fill", fills)
    monkeypatch.setattr(Session, "_wait_ranks", waits)
    await pair.send(3)
    assert happened[:4] == ["fill 0", "hello", "manifest", "fill 1"]
    assert pair.holds(3)

    # for nothing, where the ranks do not take it
    tensors = pair.ours.give(make_tensors(SHAPE, "cpu", 4))
    tensors.pop("model.norm.weight")
    happened.clear()
    with pytest.raises(ManifestError, match=r"model\.norm\.weight"):
        await pair.sender.send_async("v4", tensors, timeout_s=20)
    assert happened[:1] == ["fill 0"]
    assert pair.holds(3)
    happened.clear()
    await pair.send(5)
    assert happened[:2] == ["hello", "manifest"], "another connection: nobody knows who reads"
    assert pair.holds(5)


async def test_what_was_filled_for_other_counters_is_filled_again(pair: Pair) -> None:
    pair.place.receivers[0]._talker._greeter.forget()  # it has nothing mapped any more
    first = pair.sender._memory._counters
    await pair.send(3)
    assert pair.sender._memory._counters is not first
    assert pair.holds(3)


@pytest.mark.parametrize("how", ["gives up", "is lost"])
async def test_a_sender_that_ends_while_its_gpu_fills(pair: Pair, how: str) -> None:
    pair.ours.hold()
    sending = asyncio.ensure_future(pair.send(3))
    await held_back(pair.ours, 2)
    pair.ours.synchronize = lambda: None  # as if killed: nobody waits for the GPU
    if how == "is lost":
        pair.sender._session.abort = lambda reason: None  # the last word of a killed one
    started = time.monotonic()
    pair.sender.cancel.set()
    with pytest.raises(TransferFailed, match="cancelled"):
        await sending
    report = await pair.loads[-1]
    assert time.monotonic() - started < 8
    assert not report.ok
    assert ("gave up" if how == "gives up" else "the sender is gone") in report.error
    assert pair.holds(2), "nothing was read"

    pair.ours.catch_up()
    pair.sender.cancel.clear()
    await pair.send(4)
    assert pair.holds(4)


async def test_a_rank_that_ends_while_its_gpu_copies(pair: Pair) -> None:
    pair.theirs.hold()
    sending = asyncio.ensure_future(pair.send(3))
    await held_back(pair.theirs, 2)
    started = time.monotonic()
    await asyncio.to_thread(pair.place.receivers[0].close)
    with pytest.raises(TransferFailed, match="rank 0"):
        await sending
    assert time.monotonic() - started < 8
    assert "the rank's receiver was closed" in (await pair.loads[-1]).error


async def test_a_gpu_that_never_comes_to_it_is_a_deadline(pair: Pair) -> None:
    pair.ours.hold()
    loop = asyncio.get_running_loop()
    loads = []

    def accepted(session: str) -> None:
        loads.append(
            loop.run_in_executor(
                None,
                lambda: pair.place.receivers[0].load(
                    session, pair.loader, version="v3", flush=False, timeout_s=0.5
                ),
            )
        )

    tensors = pair.ours.give(make_tensors(SHAPE, "cpu", 3))
    with pytest.raises(TransferFailed, match="bucket 0 was announced and is not filled"):
        await pair.sender.send_async("v3", tensors, timeout_s=20, on_accepted=accepted)
    assert "timed out" in (await loads[0]).error


@pytest.mark.parametrize("side", ["sender", "rank", "silent"])
async def test_who_cannot_count_waits_and_says_so(place: Place, side: str) -> None:
    pair = Pair(place)

    def fails(address: int, nbytes: int) -> int:
        raise DeviceError("operation not supported")

    if side == "silent":  # the driver takes it, and nothing comes
        pair.theirs.signal = lambda address, value: None
    else:
        (pair.ours if side == "sender" else pair.theirs).publish = fails
    for seed in range(3):
        sent = await pair.send(seed)
        assert "each side waits for its own copies" in sent.reason
        assert ("does not write" if side == "silent" else "not supported") in sent.reason
        assert pair.holds(seed)
    assert pair.loads and (await pair.loads[-1]).path == "replayed"
    await asyncio.to_thread(pair.sender.close)
    assert (place.segments(), pair.ours.pinned, pair.theirs.pinned) == ([], {}, {})


async def test_counts_that_nobody_mapped_are_refused(pair: Pair) -> None:
    pair.place.receivers[0]._memories.count(None, 0)
    with pytest.raises(TransferFailed, match="no counters are mapped"):
        await pair.send(3)
    report = await pair.loads[-1]
    assert not report.ok
    assert pair.holds(2)
    await pair.send(4)
    assert pair.holds(4)


async def test_a_rank_that_forgot_gets_new_counters(pair: Pair) -> None:
    """Another sender was there in between."""
    first = pair.sender._memory._counters
    other = Pair(pair.place)
    other.loader = pair.loader
    await other.send(5)
    await asyncio.to_thread(other.sender.close)
    sent = await pair.send(6)
    assert (sent.reason, pair.holds(6)) == ("", True)
    assert pair.sender._memory._counters is not first
    assert pair.place.segments() == []


def test_the_messages_carry_counts() -> None:
    ack = wire.Ack(session="s", seq=0, ok=True, copied=7)
    assert wire.decode_to_sender(wire.encode(ack)) == ack

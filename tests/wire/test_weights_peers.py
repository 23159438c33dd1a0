"""Peers that do not keep to the protocol, written by hand: the other side must not be harmed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import torch
import zmq
import zmq.asyncio

from rollout_pod.weights import agent_wire, wire
from rollout_pod.weights.agent_client import AgentClient, StageError
from rollout_pod.weights.buckets import make_plan
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.push import send_weights
from rollout_pod.weights.receiver import Receiver
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.segment import Segment
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import TransferFailed
from rollout_pod.weights.wire import PROTOCOL
from tests.support.weights import (
    Gate,
    ModelLoader,
    Place,
    RudeLoader,
    expected_of,
    make_place,
    mixed_tensors,
    same,
    until,
)

TENSORS = {f"t{i}": torch.arange(64, dtype=torch.float32) + i for i in range(6)}
MANIFEST = Manifest("v1", tuple(expected_of(TENSORS).tensors.values()))
PLAN = make_plan(MANIFEST.tensors, 256)  # one tensor, one bucket


class RawSender:
    """Says whatever a test wants, over one connection."""

    def __init__(self, place: Place, session: str) -> None:
        self.session = session
        self.place = place
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.connect(f"ipc://{place.rank_sockets[0]}")
        self.memory = Segment.create(place.shm_dir, f"raw-{session}", PLAN.nbytes)
        for offset, tensor in zip(PLAN.offsets, TENSORS.values(), strict=True):
            self.memory.map[offset : offset + 256] = tensor.numpy().tobytes()

    def say(self, message: wire.Message) -> None:
        self.socket.send(wire.encode(message))

    def hear(self) -> Any:
        while True:
            message = wire.decode_to_sender(self.socket.recv())
            if not isinstance(message, wire.Ping):
                return message

    def hello(self) -> Any:
        token = bytes(self.memory.map[:16])
        self.say(
            wire.Hello(
                session=self.session, rank=0, world=1, transport="shared_memory",
                token=token, probe=self.memory.name,
            )
        )  # fmt: skip
        return self.hear()

    def open(self) -> None:
        assert isinstance(self.hello(), wire.Welcome)
        self.say(wire.Offer.of(self.session, MANIFEST))
        assert isinstance(self.hear(), wire.Accepted)

    def bucket(self, seq: int, **changes: Any) -> None:
        plan = PLAN.buckets[seq]
        message = wire.BucketReady.of(self.session, plan, self.memory.name, plan.start)
        self.say(message.model_copy(update=changes))

    def finish(self, **changes: int) -> None:
        message = wire.Finish(
            session=self.session, buckets=6, tensors=6, bytes=MANIFEST.nbytes
        )  # fmt: skip
        self.say(message.model_copy(update=changes))

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.memory.close()


@pytest.fixture
def place() -> Iterator[Place]:
    with make_place() as made:
        made.start_receivers(expected_of(TENSORS))
        yield made


@pytest.fixture
def raw(place: Place) -> Iterator[RawSender]:
    made = RawSender(place, "s1")
    yield made
    made.close()


def start(receiver: Receiver, loader: ModelLoader, session: str = "s1", version: str = "v1"):
    return asyncio.ensure_future(
        asyncio.to_thread(
            receiver.load, session, loader, version=version, flush=False, timeout_s=20
        )
    )


async def complete(place: Place) -> None:
    """A sound session after whatever happened."""
    sender = RawSender(place, "after")
    sender.open()
    loader = ModelLoader()
    report = start(place.receivers[0], loader, "after")
    await asyncio.to_thread(stream, sender)
    assert (await report).ok
    assert same(loader.model, TENSORS)
    sender.close()


def stream(sender: RawSender) -> None:
    for seq in range(6):
        sender.bucket(seq)
        assert sender.hear() == wire.Ack(session=sender.session, seq=seq, ok=True)
    sender.finish()
    assert sender.hear().ok


def doubled(raw: RawSender) -> None:
    raw.bucket(0)
    raw.bucket(0)


def dropped(raw: RawSender) -> None:
    raw.bucket(0)
    raw.bucket(2)


def reordered(raw: RawSender) -> None:
    raw.bucket(1)


def flooded(raw: RawSender) -> None:
    for seq in range(6):
        raw.bucket(seq)


def same_tensor_twice(raw: RawSender) -> None:
    raw.bucket(0)
    raw.bucket(1, entries=((0, 0, 0, 256),))


def beyond_the_tensor(raw: RawSender) -> None:
    raw.bucket(0, entries=((0, 0, 0, 257),), length=257)


def beyond_the_segment(raw: RawSender) -> None:
    raw.bucket(0, base=1 << 20)


def unaligned(raw: RawSender) -> None:
    raw.bucket(0, base=8)


def no_such_segment(raw: RawSender) -> None:
    raw.bucket(0, segment="nothing")


def early_end(raw: RawSender) -> None:
    raw.bucket(0)
    raw.finish()


def other_sums(raw: RawSender) -> None:
    for seq in range(6):
        raw.bucket(seq)
        assert raw.hear().ok
    raw.finish(bytes=1)


def gives_up(raw: RawSender) -> None:
    raw.bucket(0)
    raw.say(wire.Abort(session="s1", reason="I feel unwell"))


MISBEHAVIOURS = [
    (doubled, "bucket 0 came before"),
    (dropped, "bucket 2 came instead of bucket 1"),
    (reordered, "bucket 1 came instead of bucket 0"),
    (flooded, "2 are unacknowledged already"),
    (same_tensor_twice, "tensor 't0': was complete before"),
    (beyond_the_tensor, "ends beyond its 256 bytes"),
    (beyond_the_segment, "ends at 1048832, its segment"),
    (unaligned, "base 8 is not 256-aligned"),
    (no_such_segment, "nothing: No such file"),
    (early_end, "5 of 6 tensors are not complete, the first is 't1'"),
    (other_sums, "are (6, 6, 1536) here and (6, 6, 1) at the sender"),
    (gives_up, "the sender gave up: I feel unwell"),
]


@pytest.mark.parametrize(("misbehave", "words"), MISBEHAVIOURS)
async def test_misbehaviour_ends_the_load(place: Place, raw: RawSender, misbehave, words) -> None:
    loader = ModelLoader()
    raw.open()
    if misbehave is flooded:
        flooded(raw)  # before anybody takes a bucket
        assert raw.hear().code == "order"
        report = await start(place.receivers[0], loader)
        assert loader.calls == []
    else:
        receiver = place.receivers[0]
        load = start(receiver, loader)
        await asyncio.to_thread(until, lambda: receiver._talker.loading() is not None)
        await asyncio.to_thread(misbehave, raw)
        report = await load
        assert loader.calls in ([], ["begin"])  # it begins with its first bucket, and never ends
    assert not report.ok
    assert words in report.error
    await complete(place)


async def test_two_hundred_of_them_leave_nothing_behind(place: Place) -> None:
    here, receiver = psutil.Process(), place.receivers[0]
    usage: list[tuple[int, int, list[str]]] = []
    while len(usage) < 18:
        for misbehave, _ in MISBEHAVIOURS:
            raw = RawSender(place, "s1")
            raw.open()
            load = start(receiver, ModelLoader())
            if misbehave is not flooded:  # its own buckets come too early
                await asyncio.to_thread(until, lambda: receiver._talker.loading() is not None)
            await asyncio.to_thread(misbehave, raw)
            raw.say(wire.Abort(session="s1", reason="the end"))
            assert not (await load).ok
            raw.close()
        await complete(place)
        usage.append((here.num_fds(), here.num_threads(), place.segments()))
    first, last = usage[1], usage[-1]
    assert last[0] - first[0] <= 3, f"descriptors: {[fds for fds, _, _ in usage]}"
    assert last[1] - first[1] <= 3, f"threads: {[threads for _, threads, _ in usage]}"
    assert last[2] == first[2] == []


async def test_a_late_bucket_of_an_older_session_disturbs_nobody(
    place: Place, raw: RawSender
) -> None:
    raw.open()
    newer = RawSender(place, "s2")
    newer.open()
    gate = Gate(2)
    loader = ModelLoader(gate)
    load = start(place.receivers[0], loader, "s2")
    streaming = asyncio.ensure_future(asyncio.to_thread(stream, newer))
    assert await asyncio.to_thread(gate.reached.wait, 10)

    told = raw.hear()  # unasked, as its manifest had been accepted
    assert (told.kind, told.session, told.code) == ("refused", "s1", "stale")
    assert told.message == "session 's1' was replaced by 's2'"
    raw.bucket(0)
    late = raw.hear()
    assert (late.kind, late.session, late.code) == ("refused", "s1", "stale")
    raw.finish()
    assert raw.hear().code == "stale"
    assert raw.hello().code == "busy"
    # nor may another connection speak for the session
    raw.session = "s2"
    raw.bucket(3)
    assert raw.hear().code == "stale"
    raw.say(wire.Abort(session="s2", reason="out of spite"))
    assert raw.hear().code == "stale"

    gate.open.set()
    await streaming
    assert (await load).ok
    assert same(loader.model, TENSORS)
    newer.close()


async def test_order_before_a_load(place: Place, raw: RawSender) -> None:
    receiver = place.receivers[0]
    raw.bucket(0)
    assert raw.hear().code == "stale"
    assert isinstance(raw.hello(), wire.Welcome)
    report = await start(receiver, ModelLoader())
    assert "is greeted, not accepted" in report.error
    raw.say(wire.Offer.of("s1", MANIFEST))
    assert isinstance(raw.hear(), wire.Accepted)
    raw.say(wire.Offer.of("s1", MANIFEST))
    assert raw.hear().code == "order"
    report = await start(receiver, ModelLoader(), version="v2")
    assert "brings version 'v1', not 'v2'" in report.error
    loader = ModelLoader()
    load = start(receiver, loader)
    await asyncio.to_thread(stream, raw)
    assert (await load).ok
    report = await start(receiver, ModelLoader())
    assert report.error == "refused: it is complete"
    raw.bucket(0)
    assert raw.hear().code == "order"
    await complete(place)


async def test_no_acknowledgement_before_the_load(place: Place, raw: RawSender) -> None:
    raw.open()
    gate = Gate(0)
    load = start(place.receivers[0], ModelLoader(gate))
    raw.bucket(0)
    assert await asyncio.to_thread(gate.reached.wait, 10)
    heard = []
    while not any(isinstance(message, wire.Ping) for message in heard):
        heard.append(wire.decode_to_sender(await asyncio.to_thread(raw.socket.recv)))
    assert [message.kind for message in heard] == ["ping"]
    gate.open.set()
    assert raw.hear() == wire.Ack(session="s1", seq=0, ok=True)
    raw.say(wire.Abort(session="s1", reason="enough"))
    assert not (await load).ok


async def test_garbage(place: Place, raw: RawSender) -> None:
    other = msgpack.packb({"v": PROTOCOL + 1, "kind": "hello", "session": "s1"})
    unknown = msgpack.packb({"v": PROTOCOL, "kind": "please"})
    extra = msgpack.packb({"v": PROTOCOL, "kind": "abort", "session": "s", "reason": "", "more": 1})
    loose = msgpack.packb({"v": PROTOCOL, "kind": "abort", "session": 5, "reason": ""})
    for junk, words in (
        (b"", "no msgpack"),
        (b"\xc1", "no msgpack"),
        (b"\x93\x01\x02\x03", "no msgpack map"),
        (b"\x80\x04\x95", "no msgpack"),  # how a pickle begins
        (other, f"the peer speaks protocol {PROTOCOL + 1}, this side {PROTOCOL}"),
        (unknown, "kind"),
        (extra, "more"),
        (loose, "session"),
    ):
        raw.socket.send(junk)
        answer = raw.hear()
        assert (answer.kind, answer.code) == ("refused", "protocol")
        assert words in answer.message
    raw.socket.send_multipart([b"a", b"b"])
    assert raw.hear().code == "protocol"
    await complete(place)


def open_session(place: Place, tensors) -> tuple[Session, Manifest]:
    manifest = Manifest("v1", tuple(expected_of(tensors).tensors.values()))
    session = Session("s1", place.rank_sockets, place.shm_dir)
    session.greet(5)
    session.offer(manifest, 5)
    return session, manifest


@pytest.fixture
def two_ranks() -> Iterator[Place]:
    with make_place() as made:
        made.start_receivers(*[expected_of(mixed_tensors(0), ["tied"])] * 2)
        yield made


def push(session: Session, tensors, manifest: Manifest) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(
        asyncio.to_thread(
            send_weights, session, tensors, manifest=manifest, bucket_bytes=1024, timeout_s=20
        )
    )


async def test_push_of_tensors(two_ranks: Place) -> None:
    tensors = mixed_tensors(3)
    session, manifest = open_session(two_ranks, tensors)
    loaders = [RudeLoader(), ModelLoader()]
    loads = [
        start(receiver, loader)
        for receiver, loader in zip(two_ranks.receivers, loaders, strict=True)
    ]
    # tensors that are no longer there when the next is made, and one that is not contiguous
    source = ((name, t.t().contiguous().t() if t.dim() == 2 else t) for name, t in tensors.items())
    reports = await push(session, source, manifest)
    assert list(reports) == [await load for load in loads]
    assert all(report.ok for report in reports)
    assert all(same(loader.model, tensors) for loader in loaders)
    assert two_ranks.segments() == []


@pytest.mark.parametrize("what", ["raises", "short", "long", "order"])
async def test_push_of_something_else(two_ranks: Place, what: str) -> None:
    tensors = mixed_tensors(3)
    items = list(tensors.items())

    def source():
        if what == "order":
            items.reverse()
        yield from items[: 5 if what == "raises" else -1 if what == "short" else None]
        if what == "raises":
            raise RuntimeError("out of memory")
        if what == "long":
            yield "more", torch.zeros(1)

    session, manifest = open_session(two_ranks, tensors)
    loads = [start(receiver, ModelLoader()) for receiver in two_ranks.receivers]
    with pytest.raises(RuntimeError if what == "raises" else TransferFailed):
        await push(session, source(), manifest)
    for load in loads:
        report: LoadReport = await load
        assert not report.ok
        assert "the sender gave up" in report.error
    assert two_ranks.segments() == []


class FakeRank:
    """A rank that takes whatever it is sent, and reports what a test wants."""

    def __init__(self, place: Place, **changes: Any) -> None:
        self.path = place.run_dir / "ranks" / "fake.sock"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.changes = changes
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{self.path}")

    async def serve(self) -> None:
        """Until the report."""
        told = None
        while not isinstance(told, wire.Report):
            peer, raw = await self.socket.recv_multipart()
            told = self.answer(wire.decode_to_rank(raw))
            await self.socket.send_multipart([peer, wire.encode(told)])

    def answer(self, asked: wire.ToRank) -> wire.Message:
        if isinstance(asked, wire.Hello):
            return wire.Welcome(
                session=asked.session, rank=0, world=1, host="pod-0", transport=asked.transport
            )
        if isinstance(asked, wire.Offer):
            return wire.Accepted(session=asked.session)
        if isinstance(asked, wire.BucketReady):
            return wire.Ack(session=asked.session, seq=asked.seq, ok=True)
        assert isinstance(asked, wire.Finish)
        sound = LoadReport(0, "pod-0", True, "v1", tensors=asked.tensors, bytes=asked.bytes)
        return wire.Report.of(asked.session, replace(sound, **self.changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"tensors": 5}, {"bytes": MANIFEST.nbytes - 1}, {"version": "v0"}],
    ids=lambda changes: next(iter(changes), "sound"),
)
async def test_a_rank_that_says_it_loaded_something_else_is_not_believed(
    changes: dict[str, Any],
) -> None:
    with make_place() as place:
        rank = FakeRank(place, **changes)
        serving = asyncio.ensure_future(rank.serve())
        session = Session("s1", [rank.path], place.shm_dir)
        try:
            await asyncio.to_thread(session.greet, 5)
            await asyncio.to_thread(session.offer, MANIFEST, 5)
            sending = push(session, TENSORS.items(), MANIFEST)
            if changes:
                words = "rank 0 loaded something else: LoadReport"
                with pytest.raises(TransferFailed, match=words) as caught:
                    await sending
                (told,) = caught.value.reports
            else:
                (told,) = await sending
            await serving
            assert told.ok and vars(told).items() >= changes.items()
        finally:
            rank.context.destroy(linger=0)


class FakeAgent:
    """An agent of a few words."""

    def __init__(self, path: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.socket.bind(f"ipc://{path}")

    async def hear(self) -> tuple[bytes, Any]:
        peer, raw = await self.socket.recv_multipart()
        return peer, agent_wire.decode_to_agent(raw)

    async def say(self, peer: bytes, message: wire.Message) -> None:
        await self.socket.send_multipart([peer, wire.encode(message)])


@pytest.fixture
async def fake(place: Place) -> AsyncIterator[FakeAgent]:
    made = FakeAgent(place.agent_socket)
    yield made
    made.context.destroy(linger=0)


async def test_late_answers_are_not_taken_for_others(place: Place, fake: FakeAgent) -> None:
    client = AgentClient(place.agent_socket)

    def stage(session: str, timeout_s: float):
        return client.stage(
            session=session, version="v", path="/x", rank_sockets=[Path("/y")],
            bucket_bytes=4096, timeout_s=timeout_s,
        )  # fmt: skip

    first = asyncio.ensure_future(stage("s1", 0.1))
    peer, asked = await fake.hear()
    with pytest.raises(StageError, match="did not answer") as caught:
        await first
    assert caught.value.kind == "agent"
    second = asyncio.ensure_future(stage("s2", 5))
    peer, again = await fake.hear()
    late = agent_wire.StagedReply(
        id=asked.id, bytes=1, tensors=1, seconds=0.0, transport="shared_memory"
    )
    await fake.say(peer, late)
    await fake.say(peer, agent_wire.Progress(id=asked.id, bytes=1, total=2))
    await fake.say(peer, late.model_copy(update={"id": again.id, "bytes": 2}))
    assert (await second).bytes == 2

    third = asyncio.ensure_future(client.committed(session="s2"))
    peer, asked = await fake.hear()
    await fake.say(peer, late.model_copy(update={"id": asked.id}))
    await third  # whatever is no refusal will do
    fourth = asyncio.ensure_future(client.status())
    peer, asked = await fake.hear()
    await fake.socket.send_multipart([peer, b"\x80\x04"])
    with pytest.raises(StageError, match="no message"):
        await fourth
    await client.close()


async def test_bad_arguments_are_stage_errors(place: Place, fake: FakeAgent) -> None:
    client = AgentClient(place.agent_socket)
    with pytest.raises(StageError, match="bucket_bytes") as caught:
        await client.stage(
            session="s", version="v", path="/x", rank_sockets=[Path("/y")], bucket_bytes=1,
            timeout_s=1,
        )  # fmt: skip
    assert not caught.value.retryable
    await client.close()

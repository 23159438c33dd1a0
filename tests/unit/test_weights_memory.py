"""Segments and the agent's slots."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgpack
import pytest
import torch
import zmq

from rollout_pod.weights import agent_wire, transport, wire
from rollout_pod.weights.buckets import make_plan
from rollout_pod.weights.fill import Filler, SegmentRing, spec_of
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.segment import (
    PUSH_PREFIX,
    AttachError,
    RoomError,
    Segment,
    attach,
    remove_orphans,
)
from rollout_pod.weights.slots import SlotKey, Slots
from rollout_pod.weights.wire import PROTOCOL


def test_attached_memory_is_the_owners_and_writes_stay_private(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path, "s", 10_000)
    segment.map[:5] = b"hello"
    seen = attach(tmp_path, "s")
    assert (seen.size, seen.map[:5]) == (10_000, b"hello")
    seen.map[:5] = b"WRONG"
    assert segment.map[:5] == b"hello"
    segment.map[:5] = b"again"
    seen.refresh(0, 5)
    assert seen.map[:5] == b"again"
    segment.close()
    assert list(tmp_path.iterdir()) == []
    assert seen.map[:5] == b"again", "whoever has it mapped keeps it"
    seen.close()
    segment.close()


def test_a_withdrawn_segment_gives_its_pages_back_under_a_read(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        segment = Segment.create(Path(memory), "s", 1 << 20)
        source = tmp_path / "source"
        source.write_bytes(b"x" * 4096)
        witness = os.open(segment.path, os.O_RDONLY)
        fd = os.open(source, os.O_RDONLY)
        with memoryview(segment.map) as view:
            segment.withdraw()
            assert os.listdir(memory) == []
            assert os.fstat(witness).st_blocks == 0
            with pytest.raises(OSError, match="Bad address"):
                os.preadv(fd, [view[:4096]], 0)
            assert os.fstat(witness).st_blocks == 0
        os.close(fd)
        os.close(witness)
        segment.withdraw()


MAKES_A_RING = """
import sys
from pathlib import Path
from rollout_pod.weights.fill import SegmentRing
from rollout_pod.weights.segment import PUSH_PREFIX
ring = SegmentRing(Path(sys.argv[1]), PUSH_PREFIX, 10_000)
print(ring.name, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_sender_leaves_is_removed_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    senders = [
        subprocess.Popen(
            [sys.executable, "-c", MAKES_A_RING, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        names = [sender.stdout.readline().strip() for sender in senders]
        mine = SegmentRing(tmp_path, PUSH_PREFIX, 10_000)
        others = [tmp_path / "rollout-ffffffffffff-1", tmp_path / f"{PUSH_PREFIX}being-made"]
        others[0].write_bytes(b"of an agent")
        others[1].touch()
        alive = {*names, mine.name, *(path.name for path in others)}
        assert remove_orphans(tmp_path, PUSH_PREFIX) == ()
        mapped = attach(tmp_path, names[0])
        senders[0].kill()
        senders[0].wait(10)
        assert {path.name for path in tmp_path.iterdir()} == alive

        second = SegmentRing(tmp_path, PUSH_PREFIX, 10_000)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == alive - {names[0]} | {second.name}
        assert mapped.map[:1] == b"\0", "whoever has it mapped keeps it"
        mapped.close()
        for ring in (mine, second):
            ring.close()
    finally:
        for sender in senders:
            sender.kill()
            sender.communicate(timeout=10)
    assert remove_orphans(tmp_path, PUSH_PREFIX) == (names[1],)


def test_a_segment_has_no_size_before_it_is_locked(tmp_path: Path, monkeypatch) -> None:
    """Or a sender that looks in between would remove it."""
    found: list[tuple[str, ...]] = []

    def look_before(module: ModuleType, name: str) -> None:
        original = getattr(module, name)

        def call(*args: int) -> None:
            monkeypatch.setattr(module, name, original)
            found.append(remove_orphans(tmp_path, "s"))
            original(*args)

        monkeypatch.setattr(module, name, call)

    look_before(fcntl, "flock")
    look_before(os, "posix_fallocate")
    segment = Segment.create(tmp_path, "s", 10_000)
    assert found == [(), ()]
    assert segment.path.exists()
    segment.close()


@pytest.mark.parametrize("name", ["../s", "a/b", ".s", "", "..", "s2", "empty", "link", "dir"])
def test_attach_refuses(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "dir").mkdir()
    with pytest.raises(AttachError):
        attach(tmp_path, name)


def test_names_are_taken_once(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path, "s", 1)
    with pytest.raises(FileExistsError):
        Segment.create(tmp_path, "s", 1)
    segment.close()


def test_room_is_checked_before_and_taken_at_once(tmp_path: Path, monkeypatch) -> None:
    little = SimpleNamespace(f_bavail=10, f_frsize=4096, f_blocks=20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: little)
        with pytest.raises(RoomError, match="50000 bytes are needed, 40960 of 81920 are free"):
            Segment.create(tmp_path, "s", 50_000)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RoomError, match="50000 bytes are needed") as caught:
            Segment.create(tmp_path, "s", 50_000)
    assert caught.value.retryable
    assert list(tmp_path.iterdir()) == []
    segment = Segment.create(tmp_path, "s", 50_000)
    assert segment.path.stat().st_blocks * 512 >= 50_000
    segment.close()


def key(version: str) -> SlotKey:
    return SlotKey(version, f"/{version}", ())


def test_slots_keep_two_versions(tmp_path: Path) -> None:
    (tmp_path / "p-old").touch()
    (tmp_path / "other").touch()
    slots = Slots(tmp_path, "p-", 100_000)
    assert slots.stale == ("p-old",)

    one = slots.obtain(key("one"), 40_000)
    assert slots.obtain(key("one"), 40_000) is not one, "what is not ready is read again"
    (one,) = slots.all
    one.ready = True
    assert slots.obtain(key("one"), 40_000) is one
    slots.commit(one)
    slots.drop(one)
    assert slots.all == (one,), "the committed one is not dropped"

    two = slots.obtain(key("two"), 30_000)
    two.ready = True
    three = slots.obtain(key("three"), 20_000)
    assert slots.all == (one, three)
    assert three.segment is two.segment, "memory is used again"
    four = slots.obtain(key("four"), 60_000)
    assert (slots.all, slots.used) == ((one, four), 100_000)
    with pytest.raises(RoomError, match=r"needs 60001 bytes.* 40000 hold 'one'.*at least 100001"):
        slots.obtain(key("five"), 60_001)
    assert slots.all == (one,), "the next one has made way"
    assert slots.probe is one.segment
    five = slots.obtain(key("five"), 60_000)
    slots.withdraw(one)
    slots.withdraw(five)
    assert (slots.all, slots.used) == ((one,), 40_000), "only what was never ready"
    slots.commit(four)
    assert slots.committed is one, "what is gone cannot be committed"
    slots.close()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_socket_paths(tmp_path: Path) -> None:
    assert transport.ipc_address(Path("/" + "x" * 106)) == "ipc:///" + "x" * 106
    with pytest.raises(ValueError, match="108 bytes, at most 107"):
        transport.ipc_address(Path("/" + "x" * 107))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FileExistsError):
        transport.remove_socket(file)
    assert file.exists()


def test_a_late_farewell_spares_the_successors_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as one,
        context.socket(zmq.ROUTER) as two,
    ):
        old = transport.bind(one, path)
        new = transport.bind(two, path)
        transport.remove_socket(path, old)
        assert path.exists()
        transport.remove_socket(path, new)
        assert not path.exists()


REPORT = LoadReport(1, "pod-0", False, "v", 2, 3, 0.5, "boom")


def test_reports_survive_their_forms() -> None:
    assert LoadReport.from_dict(REPORT.as_dict() | {"later": 1}) == REPORT
    message = wire.Report.of("s", REPORT)
    assert wire.decode_to_sender(wire.encode(message)).report() == REPORT
    with pytest.raises(ValueError, match="not a load report"):
        LoadReport.from_dict({"rank": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2}, {"v": "3"}, {"kind": "sent"}, {"seq": -1}, {"seq": True}, {"seq": 1.0},
        {"seq": None}, {"session": ""}, {"session": b"s"}, {"segment": "../x"},
        {"segment": ".hidden"}, {"entries": [[0, 0, 0]]}, {"entries": [[0, 0, 0, -1]]},
        {"entries": {}}, {"more": 1},
    ],
)  # fmt: skip
def test_messages_are_strict(change: dict) -> None:
    good = {
        "v": PROTOCOL, "kind": "bucket", "session": "s", "seq": 0, "segment": "x", "base": 0,
        "length": 1, "entries": [[0, 0, 0, 1]],
    }  # fmt: skip
    assert wire.decode_to_rank(msgpack.packb(good)).seq == 0
    with pytest.raises(wire.WireError):
        wire.decode_to_rank(msgpack.packb(good | change))


def test_agents_messages_are_strict() -> None:
    good = {"v": PROTOCOL, "kind": "send", "id": 1, "session": "s", "timeout": 1}
    assert agent_wire.decode_to_agent(msgpack.packb(good)).timeout == 1
    for change in ({"timeout": 0}, {"timeout": float("nan")}, {"id": -1}, {"kind": "done"}):
        with pytest.raises(wire.WireError):
            agent_wire.decode_to_agent(msgpack.packb(good | change))


def test_the_agent_needs_no_torch() -> None:
    code = (
        "import sys, rollout_pod.weights.agent, rollout_pod.weights.agent_client;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'vllm', 'fastapi')"
        " or m.startswith(('rollout_pod.engine', 'rollout_pod.protocol'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_of_what_comes_one_after_another_few_are_alive_however_large_a_bucket_is(
    tmp_path: Path,
) -> None:
    """Else a trainer that gathers its shards would hold a bucket of whole tensors beside the bucket."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(40):
            alive.append(sum(ref() is not None for ref in made))
            tensor = torch.full((100,), float(number))
            made.append(weakref.ref(tensor))
            yield f"t{number}", tensor

    specs = tuple(spec_of(f"t{n}", torch.empty(100)) for n in range(40))
    (bucket,) = make_plan(specs, 1 << 20).buckets
    ring = SegmentRing(tmp_path, "r", 1 << 20)
    try:
        Filler(gathered(), Manifest("v", specs), ring).fill(bucket, 0)
        for entry in bucket.entries:
            piece = ring.view(entry.offset, entry.nbytes).view(torch.float32)
            assert piece.tolist() == [float(entry.tensor)] * 100
            del piece
    finally:
        ring.close()
    assert max(alive) <= 2

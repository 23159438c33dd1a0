"""Bytes that go to a GPU beside decoding go a little at a time, and arrive like all others."""

import ctypes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_pod.weights.copies import Copy, parts
from rollout_pod.weights.replay import UploadReplayer
from tests.support.fake_device import FakeDevice


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    """Offsets into a kilobyte on either side."""
    width, rows = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    gaps = st.integers(0, 9)
    source, target = draw(st.integers(0, 90)), draw(st.integers(0, 90))
    return Copy(source, target, width, rows, width + draw(gaps), width + draw(gaps))


def moved(copy: Copy) -> set[tuple[int, int]]:
    """Which byte goes where."""
    return {
        (copy.source + row * copy.source_pitch + at, copy.target + row * copy.target_pitch + at)
        for row in range(copy.rows)
        for at in range(copy.width)
    }


@given(st.lists(copies(), max_size=3), st.integers(1, 64))
def test_parts_are_the_same_bytes_and_small(whole: list[Copy], most: int) -> None:
    found = list(parts(whole, most))
    assert set().union(*map(moved, found)) == set().union(*map(moved, whole))
    assert sum(part.nbytes for part in found) == sum(copy.nbytes for copy in whole)
    for part in found:
        assert part.nbytes <= most or part.rows == 1, "a row of a strided copy stays whole"


class Queue(FakeDevice):
    """Counts what is queued, and what was queued at most."""

    queued = most = 0

    def copy_to_device(
        self, target: int, source: int, *, width: int, rows: int, target_pitch: int,
        source_pitch: int,
    ) -> None:  # fmt: skip
        super().copy_to_device(
            target, source, width=width, rows=rows, target_pitch=target_pitch,
            source_pitch=source_pitch,
        )  # fmt: skip
        self.queued += width * rows
        self.most = max(self.most, self.queued)

    def synchronize(self) -> None:
        self.queued = 0


@pytest.mark.parametrize(("at_a_time", "most"), [(None, 700), (100, 100), (700, 700)])
def test_no_more_is_queued_than_it_was_told(
    tmp_path: Path, at_a_time: int | None, most: int
) -> None:
    device = Queue(tmp_path)
    source = ctypes.create_string_buffer(bytes(i % 251 for i in range(1000)), 1000)
    target = ctypes.create_string_buffer(1000)
    here, there = ctypes.addressof(source), ctypes.addressof(target)
    flat = Copy(here, there, 460)
    rows = Copy(here + 500, there + 500, 30, 8, 40, 35)
    replayer = UploadReplayer(device, at_a_time=at_a_time)
    prepared = replayer.prepare([flat, rows])
    replayer.run(prepared)
    replayer.run(())
    assert device.most == most
    assert target.raw[:460] == source.raw[:460]
    for row in range(8):
        at, to = 500 + row * 40, 500 + row * 35
        assert target.raw[to : to + 30] == source.raw[at : at + 30]

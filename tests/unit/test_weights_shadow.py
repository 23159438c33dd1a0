"""Where a version waits on the device: every byte of the plan, and no other."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_pod.engine.device_slot import refusal
from rollout_pod.weights.buckets import ALIGN
from rollout_pod.weights.copies import Copy, CopyPlan
from rollout_pod.weights.replay import HostReplayer
from rollout_pod.weights.shadow_plan import room_for, shadow_of

SIZE = 4096


class Memory:
    """Real memory, whose first byte is aligned."""

    def __init__(self, nbytes: int, fill: int) -> None:
        self._all = ctypes.create_string_buffer(nbytes + ALIGN)
        start = ctypes.addressof(self._all)
        self.address = -(-start // ALIGN) * ALIGN
        self.nbytes = nbytes
        ctypes.memset(self.address, fill, nbytes)

    @property
    def data(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)


@st.composite
def copy_sets(draw) -> list[tuple[int, int, int, int]]:
    """(target, width, rows, pitch) that do not overlap, in memory of ``SIZE`` bytes."""
    found, at = [], 0
    while True:
        at += draw(st.sampled_from([0, 0, 0, 1, 8, 100]))
        width = draw(st.integers(1, 300))
        rows = draw(st.sampled_from([1, 1, 2, 5]))
        pitch = width + draw(st.sampled_from([0, 0, 8]))
        end = at + (rows - 1) * pitch + width
        if end > SIZE or len(found) == 12:
            return found
        found.append((at, width, rows, pitch))
        at = end


@given(copy_sets())
def test_switching_is_the_plan_in_two_steps(sizes) -> None:
    source, model, wanted = Memory(SIZE, 0), Memory(SIZE, 7), Memory(SIZE, 7)
    ctypes.memmove(source.address, bytes((i * 31 + i // 256) % 251 for i in range(SIZE)), SIZE)
    read = 0
    copies: dict[str, tuple[Copy, ...]] = {}
    for number, (target, width, rows, pitch) in enumerate(sizes):
        copies[f"t{number}"] = (
            Copy(source.address + read, model.address + target, width, rows, width, pitch),
        )
        read = (read + width * rows) % (SIZE // 2)
    replayer = HostReplayer()
    direct = [c for each in copies.values() for c in each]
    replayer.run([c._replace(target=c.target - model.address + wanted.address) for c in direct])

    slot = Memory(room_for([SIZE]) + 12 * ALIGN, 99)
    plan = shadow_of(CopyPlan(copies), slot.address)
    assert plan.nbytes <= slot.nbytes
    replayer.run([c for each in plan.inward.copies.values() for c in each])
    assert model.data == bytes([7]) * SIZE, "the model is not touched before the switch"
    replayer.run(plan.outward)
    assert model.data == wanted.data


def test_whole_parameters_are_one_copy_each() -> None:
    experts = {f"e{i}": (Copy(0, 1 << 20 | i * 512, 512),) for i in range(64)}
    rows = {
        "q": (Copy(0, 1 << 16, 64, 8, 64, 128),),
        "k": (Copy(0, (1 << 16) + 64, 64, 8, 64, 128),),
    }
    plan = shadow_of(CopyPlan({**experts, **rows}), 0)
    assert sorted(c.nbytes for c in plan.outward) == [1024, 64 * 512]
    assert plan.nbytes <= room_for([1024, 64 * 512])


def test_nothing_is_a_plan() -> None:
    plan = shadow_of(CopyPlan({"unused": (), "empty": (Copy(0, 5, 0),)}), 256)
    assert (plan.outward, plan.nbytes) == ((), 0)
    assert plan.inward.copies == {"unused": (), "empty": ()}


GIB = 1 << 30


@pytest.mark.parametrize(
    ("kv_cache", "utilization", "words"),
    [
        (None, 0.9, None),
        (None, 0.5, "2.00 GiB are missing"),
        (40 * GIB, 0.5, None),
        (70 * GIB, 0.9, "6.00 GiB are missing"),
    ],
)
def test_a_slot_that_leaves_nothing_is_refused_in_numbers(kv_cache, utilization, words) -> None:
    problem = refusal(
        16 * GIB, used=20 * GIB, free=80 * GIB, total=100 * GIB, utilization=utilization,
        kv_cache=kv_cache,
    )  # fmt: skip
    if words is None:
        assert problem == ""
    elif kv_cache:
        assert words in problem and "70.00 GiB for the KV cache" in problem
    else:
        problem = refusal(
            32 * GIB, used=20 * GIB, free=60 * GIB, total=100 * GIB, utilization=0.5, kv_cache=None
        )
        assert words in problem and "32.00 GiB" in problem and "20.00 GiB of the model" in problem

"""What tells whether two machines hold the same version."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_pod.weights.checkpoint import Checkpoint, Located, Sum
from rollout_pod.weights.contents import SPOT_BYTES, SPOTS, known_sums, sample
from rollout_pod.weights.spec import TensorSpec

BIG = SPOTS * SPOT_BYTES + 999


def spec(name: str = "a", nbytes: int = BIG, dtype: str = "uint8") -> TensorSpec:
    return TensorSpec(name, dtype, (nbytes,), nbytes)


def of(data: bytes, *specs: TensorSpec) -> str:
    offsets, at = [], 0
    for each in specs:
        offsets.append(at)
        at += each.nbytes
    return sample(memoryview(data), specs, offsets)


@given(st.integers(0, SPOTS * SPOT_BYTES), st.data())
def test_of_a_small_tensor_every_byte_counts(nbytes: int, data: st.DataObject) -> None:
    raw = bytearray(nbytes)
    before = of(bytes(raw), spec(nbytes=nbytes))
    assert of(bytes(raw), spec(nbytes=nbytes)) == before
    if nbytes:
        raw[data.draw(st.integers(0, nbytes - 1))] ^= 1
        assert of(bytes(raw), spec(nbytes=nbytes)) != before


@given(st.integers(SPOTS * SPOT_BYTES + 1, 1 << 20))
def test_of_a_large_one_its_ends_and_what_is_spread_between_count(nbytes: int) -> None:
    zero = of(bytes(nbytes), spec(nbytes=nbytes))
    for position in (0, SPOT_BYTES - 1, nbytes - SPOT_BYTES, nbytes - 1):
        raw = bytearray(nbytes)
        raw[position] = 1
        assert of(bytes(raw), spec(nbytes=nbytes)) != zero
    # values that change here and there all over it, as a step of a training makes them
    raw = bytearray(nbytes)
    raw[:: SPOT_BYTES // 2] = b"\1" * len(raw[:: SPOT_BYTES // 2])
    assert of(bytes(raw), spec(nbytes=nbytes)) != zero


@pytest.mark.parametrize(
    "other",
    [
        replace(spec(), name="b"),
        replace(spec(), dtype="int8"),
        replace(spec(), shape=(1, BIG)),
    ],
)
def test_what_the_tensors_are_counts(other: TensorSpec) -> None:
    assert of(bytes(BIG), spec()) != of(bytes(BIG), other)


def test_two_tensors_that_changed_places_are_not_the_same() -> None:
    assert of(bytes(2 * BIG), spec("a"), spec("b")) != of(bytes(2 * BIG), spec("b"), spec("a"))


def test_where_they_lie_does_not_count() -> None:
    raw = bytes(range(256)) * 64
    one = sample(memoryview(raw), [spec(nbytes=256)], [0])
    assert one == sample(memoryview(raw), [spec(nbytes=256)], [512])


def checkpoint(*sums: Sum | None) -> Checkpoint:
    return Checkpoint("/v", ("a", "b"), (Located(spec(), 0, 0),), (), sums)


def test_hashes_count_only_where_those_of_all_files_are_known() -> None:
    one, other = Sum("1" * 64, b"head"), Sum("2" * 64, b"head")
    assert known_sums(checkpoint()) == known_sums(checkpoint(one, None)) == ""
    assert known_sums(checkpoint(one, other)) == known_sums(checkpoint(one, other)) != ""
    assert known_sums(checkpoint(one, other)) != known_sums(checkpoint(other, one))

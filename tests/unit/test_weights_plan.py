"""The manifest, the plan of buckets and the count: pure."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pod.weights.buckets import ALIGN, Account, BucketError, Entry, Plan, make_plan
from rollout_pod.weights.manifest import (
    ITEM_BYTES,
    Manifest,
    check_manifest,
    shorten,
    tensor_nbytes,
)
from rollout_pod.weights.spec import Expected, TensorSpec


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name, dtype, shape, tensor_nbytes(dtype, shape))


A, B, HEAD = spec("a", 2, 3), spec("b", 4, dtype="float32"), spec("lm_head", 2, 3)
EXPECTED = Expected({t.name: t for t in (A, B, HEAD)}, optional=frozenset({"lm_head"}))


@pytest.mark.parametrize(
    ("tensors", "aliases", "problems"),
    [
        ([A, B, HEAD], [], []),
        ([B, A], [], []),
        ([A, B], [("lm_head", "a")], []),
        ([A], [], ["tensor 'b': missing"]),
        ([], [], ["tensor 'a': missing", "tensor 'b': missing"]),
        ([A, B, spec("c", 1)], [], ["tensor 'c': unknown"]),
        ([spec("a", 3, 2), B], [], ["tensor 'a': shape [3, 2], expected [2, 3]"]),
        ([spec("a", 2, 3, dtype="float16"), B], [], ["tensor 'a': dtype float16, expected bfl"]),
        (
            [spec("a", 6, dtype="float32"), B],
            [],
            ["tensor 'a': shape [6], expected [2, 3]", "tensor 'a': dtype float32, expected bfl"],
        ),
        ([A, A, B], [], ["tensor 'a': named 2 times"]),
        ([A, B], [("lm_head", "c")], ["alias 'lm_head': stands for 'c', which"]),
        ([A, B], [("lm_head", "b")], ["tensor 'lm_head': shape", "tensor 'lm_head': dtype"]),
        ([A, B, HEAD], [("lm_head", "a")], ["tensor 'lm_head': named 2 times"]),
        ([A, B], [("x", "a")], ["tensor 'x': unknown"]),
        (
            [TensorSpec("a", "bfloat16", (2, 3), 11), B],
            [],
            ["tensor 'a': nbytes 11, but bfloat16 [2, 3] takes 12", "tensor 'a': nbytes 11, exp"],
        ),
        (
            [TensorSpec("a", "bfloat16", (-2, -3), 12), B],
            [],
            ["tensor 'a': negative size", "tensor 'a': shape"],
        ),
        (
            [TensorSpec("a", "float7", (2, 3), 12), B],
            [],
            ["tensor 'a': dtype 'float7' is not supported", "tensor 'a': dtype float7, expected"],
        ),
    ],
)
def test_check_manifest(tensors, aliases, problems) -> None:
    found = check_manifest(Manifest("v", tuple(tensors), tuple(aliases)), EXPECTED)
    assert len(found) == len(problems), found
    for problem, words in zip(found, problems, strict=True):
        assert problem.startswith(words)


def test_shorten() -> None:
    assert shorten(["a", "b"], 2) == ("a", "b")
    assert shorten(["a", "b", "c"], 1) == ("a", "and 2 more")


SIZES = st.lists(st.one_of(st.integers(0, 5000), st.sampled_from([0, 255, 256, 257, 512])))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[TensorSpec], int, Plan]:
    sizes = draw(SIZES)
    bucket_bytes = draw(st.integers(ALIGN, 3000))
    tensors = [spec(f"t{i}", size, dtype="uint8") for i, size in enumerate(sizes)]
    return tensors, bucket_bytes, make_plan(tensors, bucket_bytes)


@settings(deadline=None)
@given(plans())
def test_a_plan_covers_every_byte_once_and_in_its_place(made) -> None:
    tensors, bucket_bytes, plan = made
    account = Account(tensors)
    pieces: dict[int, list[Entry]] = {}
    for seq, bucket in enumerate(plan.buckets):
        assert bucket.seq == seq
        assert bucket.start % ALIGN == 0
        assert bucket.length <= bucket_bytes
        assert bucket.start + bucket.length <= plan.nbytes
        account.take(seq, bucket.length, bucket.entries)
        for entry in bucket.entries:
            # a bucket is a window of the layout: the piece lies where the tensor does
            assert bucket.start + entry.offset == plan.offsets[entry.tensor] + entry.tensor_offset
            pieces.setdefault(entry.tensor, []).append(entry)
    assert account.missing() == []
    assert account.nbytes == sum(tensor.nbytes for tensor in tensors)
    assert account.buckets == len(plan.buckets)
    for index, found in pieces.items():
        if tensors[index].nbytes <= bucket_bytes - bucket_bytes % ALIGN:
            assert len(found) == 1, "only what is larger than a bucket is split"
    ends = [*plan.offsets[1:], plan.nbytes]
    for tensor, offset, end in zip(tensors, plan.offsets, ends, strict=False):
        assert offset % ALIGN == 0
        assert offset + tensor.nbytes <= end


@settings(deadline=None)
@given(plans(), st.data())
def test_the_layout_does_not_depend_on_the_bucket(made, data) -> None:
    tensors, _, plan = made
    other = make_plan(tensors, data.draw(st.integers(ALIGN, 3000)))
    assert (other.offsets, other.nbytes) == (plan.offsets, plan.nbytes)


@settings(deadline=None)
@given(plans(), st.data())
def test_any_other_order_is_refused_and_changes_nothing(made, data) -> None:
    tensors, _, plan = made
    account = Account(tensors)
    at = data.draw(st.integers(0, len(plan.buckets)))
    for bucket in plan.buckets[:at]:
        account.take(bucket.seq, bucket.length, bucket.entries)
    before = account.missing()
    for bucket in plan.buckets:
        if bucket.seq != at:
            with pytest.raises(BucketError):
                account.take(bucket.seq, bucket.length, bucket.entries)
        if bucket.seq < at:
            with pytest.raises(BucketError):  # nor again under the number that is due
                account.take(at, bucket.length, bucket.entries)
    assert account.missing() == before
    for bucket in plan.buckets[at:]:
        account.take(bucket.seq, bucket.length, bucket.entries)
    assert account.missing() == []


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "is empty"),
        ([Entry(2, 0, 0, 1)], "has 2 tensors"),
        ([Entry(-1, 0, 0, 1)], "has 2 tensors"),
        ([Entry(0, 0, 256, 44)], "piece at 256, expected 0"),
        ([Entry(0, 0, 0, 0)], "piece of 0 bytes"),
        ([Entry(0, 0, 0, -1)], "piece of -1 bytes"),
        ([Entry(0, 0, 0, 301)], "ends beyond its 300 bytes"),
        ([Entry(0, 1, 0, 300)], "no multiple of 256"),
        ([Entry(0, 0, 0, 300), Entry(1, 256, 0, 10)], "overlaps"),
        ([Entry(0, 512, 0, 300)], "ends beyond the bucket's 768 bytes"),
        ([Entry(0, 0, 0, 256), Entry(0, 256, 0, 256)], "piece at 0, expected 256"),
        ([Entry(1, 0, 0, 10), Entry(1, 256, 10, 0)], "was complete before"),
    ],
)
def test_account_refuses(entries, words) -> None:
    account = Account([spec("a", 300, dtype="uint8"), spec("b", 10, dtype="uint8")])
    with pytest.raises(BucketError, match=words):
        account.take(0, 768, entries)
    assert account.missing() == ["a", "b"]


@pytest.mark.parametrize("parts", [[(0, None)], [(0, 2)], [(0, 1), (1, 1)], [(0, 0), (0, None)]])
def test_tensors_that_are_read_in_place(parts) -> None:
    specs = (TensorSpec("a", "uint8", (300,), 300), TensorSpec("b", "uint8", (0,), 0))
    account = Account(specs)
    for first, count in parts:
        assert account.missing()
        account.take_whole(first, count)
    assert (account.buckets, account.nbytes, account.missing()) == (len(parts), 300, [])
    with pytest.raises(BucketError, match="read in place before"):
        account.take(len(parts), 512, make_plan(specs, 512).buckets[0].entries)
    with pytest.raises(BucketError, match="tensors 0 to 1; the next is 2 of 2"):
        account.take_whole(0, 1)


@pytest.mark.parametrize("part", [(1, 1), (0, 3), (1, None), (3, None)])
def test_tensors_that_are_not_the_next(part) -> None:
    account = Account([spec("a", 300, dtype="uint8"), spec("b", 10, dtype="uint8")])
    with pytest.raises(BucketError, match="the next is 0 of 2"):
        account.take_whole(*part)
    assert account.missing() == ["a", "b"]
    bucket = make_plan([spec("a", 300, dtype="uint8"), spec("b", 10, dtype="uint8")], 1024)
    account.take(0, bucket.buckets[0].length, bucket.buckets[0].entries)
    with pytest.raises(BucketError, match="after a bucket"):
        account.take_whole(0, None)


def test_versions_of_the_same_tensors_share_what_was_made_of_them() -> None:
    first = Manifest("v1", (TensorSpec("a", "uint8", (300,), 300),), (("b", "a"),))
    second = first.renamed("v2")
    assert second.version == "v2"
    assert second.names is first.names
    assert second.plan(256) is first.plan(256)
    assert len(second.plan(512).buckets) != len(second.plan(256).buckets)
    assert second.within(second.names)
    assert second.within(frozenset("ab"))
    assert not second.within(frozenset("b"))


def test_small_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes 255"):
        make_plan([], 255)


def test_every_type_is_torchs() -> None:
    import torch

    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size

"""A load is watched, and its copies alone put another version where the loaders would."""

import pytest
import torch

from rollout_pod.weights.copies import (
    Copy,
    CopyPlan,
    Layout,
    Piece,
    UnplannableError,
    decompose,
    place,
    uncovered,
)
from rollout_pod.weights.recording import Recorder, checksum, mixed
from rollout_pod.weights.replay import HostReplayer

Model = dict[str, torch.Tensor]


def dense(model: Model, name: str, value: torch.Tensor) -> None:
    """Fused projections: rows of one parameter from three tensors."""
    rows = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}
    if name in rows:
        start, count = rows[name]
        model["qkv"].narrow(0, start, count).copy_(value)
    else:
        model[name].copy_(value)


DENSE = {
    "q": (8, 6), "k": (4, 6), "v": (4, 6), "norm": (6,), "embed": (10, 6), "scale": (),
}  # fmt: skip
DENSE_MODEL = {"qkv": (16, 6), "norm": (6,), "embed": (10, 6), "scale": ()}


def tied(model: Model, name: str, value: torch.Tensor) -> None:
    model[name].copy_(value)
    if name == "embed":
        model["head"].copy_(value)


def sliced(model: Model, name: str, value: torch.Tensor) -> None:
    """Rank 1 of 2: rows of one tensor, columns of the other, and the whole of a third."""
    if name == "columns":
        value = value.narrow(1, 5, 5)
    elif name == "rows":
        value = value.chunk(2)[1]
    model[name].copy_(value)


def experts(model: Model, name: str, value: torch.Tensor) -> None:
    """Two fused and stacked, the third sliced to the columns of rank 1."""
    number, which = name.split(".")
    target = model["w2"][int(number)] if which == "down" else model["w13"][int(number)]
    if which == "down":
        target.copy_(value[:, 3:6])
    else:
        half = target.shape[0] // 2
        target.narrow(0, 0 if which == "gate" else half, half).copy_(value)


def staged(model: Model, name: str, value: torch.Tensor) -> None:
    """As vLLM reloads: into a new parameter first, which is copied to the old one as a whole."""
    fresh = torch.empty_like(model[name])
    fresh.narrow(0, 0, 2).copy_(value.contiguous()[:2])
    fresh.narrow(0, 2, 2).copy_(value[2:].clone())
    model[name].data.copy_(fresh)


EXPERTS = {
    f"{e}.{w}": (2, 6) if w == "down" else (4, 2) for e in range(5) for w in ("gate", "up", "down")
}


def padded(model: Model, name: str, value: torch.Tensor) -> None:
    """As vLLM loads an embedding: what the vocabulary is padded with is zeroed."""
    model[name][:7].data.copy_(value)
    model[name][7:].data.fill_(0)


def padded_columns(model: Model, name: str, value: torch.Tensor) -> None:
    """The same beside each row, before and after it."""
    model[name][:, :1].zero_()
    model[name][:, 1:4].copy_(value)
    model[name][:, 4:].fill_(0)


def twice(model: Model, name: str, value: torch.Tensor) -> None:
    for _ in range(2):
        model[name][:, :3].copy_(value)
        model[name][:, 3:].copy_(value)


CASES = [
    (dense, DENSE, DENSE_MODEL),
    (tied, {"embed": (7, 3)}, {"embed": (7, 3), "head": (7, 3)}),
    (sliced, {"columns": (4, 10), "rows": (6, 3)}, {"columns": (4, 5), "rows": (3, 3)}),
    (experts, EXPERTS, {"w13": (5, 8, 2), "w2": (5, 2, 3)}),
    (padded, {"w": (7, 3)}, {"w": (8, 3)}),
    (padded_columns, {"w": (7, 3)}, {"w": (7, 5)}),
    (twice, {"w": (7, 3)}, {"w": (7, 6)}),
    (staged, {"w": (4, 5)}, {"w": (4, 5)}),
]


def version(shapes: dict, dtype: torch.dtype, seed: int) -> Model:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g).to(dtype) for n, s in shapes.items()}


def bits(model: Model) -> dict[str, list[int]]:
    return {n: t.reshape(-1).view(torch.uint8).tolist() for n, t in model.items()}


def record(load, model: Model, tensors: Model) -> tuple[CopyPlan, Recorder]:
    recorder = Recorder()
    with recorder:
        for name, tensor in tensors.items():
            given = tensor.clone()
            recorder.source(name, given)
            load(model, name, given)
            del given  # its memory is used again
    copies: dict[str, tuple[Copy, ...]] = dict.fromkeys(tensors, ())
    for tensor in model.values():
        base = tensor.untyped_storage().data_ptr()
        for each in recorder.slices_in(tensor):
            moved = (c._replace(target=c.target + base) for c in each.copies)
            copies[each.name] += tuple(moved)
    return CopyPlan(copies), recorder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("cut", [1 << 20, 24, 7])
@pytest.mark.parametrize(("load", "shapes", "model_shapes"), CASES)
def test_replay_is_the_load(load, shapes, model_shapes, cut: int, dtype: torch.dtype) -> None:
    fast = {n: torch.zeros(s, dtype=dtype) for n, s in model_shapes.items()}
    slow = {n: torch.zeros(s, dtype=dtype) for n, s in model_shapes.items()}
    plan, recorder = record(load, fast, version(shapes, dtype, 0))
    assert recorder.impure == {}

    new = version(shapes, dtype, 1)
    for name, tensor in new.items():
        load(slow, name, tensor)
    pieces = [
        Piece(name, at, min(cut, size - at), tensor.data_ptr() + at)
        for name, tensor in new.items()
        for size in [tensor.numel() * tensor.element_size()]
        for at in range(0, size, cut)
    ]
    replayer = HostReplayer()
    replayer.run(replayer.prepare(place(plan, pieces)))
    assert bits(fast) == bits(slow)
    ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in fast.values()]
    if load in (padded, padded_columns):
        return
    everything = [c for copies in plan.copies.values() for c in copies]
    assert uncovered(ranges, everything) == 0
    assert uncovered(ranges, everything[1:]) == everything[0].nbytes


def test_every_expert_of_a_large_model_comes_where_the_loaders_put_it() -> None:
    """Rank 1 of 2 of 48 layers with 128 experts, as Qwen3-30B-A3B has: 18,432 small tensors."""
    layers, count = range(48), 128
    shapes = {
        f"{layer}.{expert}.{which}": (2, 6) if which == "down" else (4, 2)
        for layer in layers
        for expert in range(count)
        for which in ("gate", "up", "down")
    }
    assert len(shapes) == 18_432

    def load(model: Model, name: str, value: torch.Tensor) -> None:
        layer, _, rest = name.partition(".")
        experts({which: model[f"{layer}.{which}"] for which in ("w13", "w2")}, rest, value)

    def hollow() -> Model:
        parts = {"w13": (count, 8, 2), "w2": (count, 2, 3)}
        return {
            f"{i}.{n}": torch.zeros(s, dtype=torch.bfloat16)
            for i in layers
            for n, s in parts.items()
        }

    fast, slow = hollow(), hollow()
    plan, recorder = record(load, fast, version(shapes, torch.bfloat16, 0))
    assert recorder.impure == {}
    new = version(shapes, torch.bfloat16, 1)
    for name, tensor in new.items():
        load(slow, name, tensor)
    replayer = HostReplayer()
    pieces = [Piece(n, 0, t.numel() * t.element_size(), t.data_ptr()) for n, t in new.items()]
    replayer.run(replayer.prepare(place(plan, pieces)))
    assert all(torch.equal(fast[n].view(torch.int16), slow[n].view(torch.int16)) for n in slow)


def computed(model, value):
    model.copy_(value * 2)


def converted(model, value):
    model.copy_(value.to(torch.float64))


def added(model, value):
    model.copy_(value)
    model.add_(value)


def scaled_later(model, value):
    model.copy_(value)
    model.mul_(2)


def transposed_later(model, value):
    fresh = torch.empty_like(model)
    fresh.copy_(value)
    model.copy_(fresh.t().contiguous().t())


def packed_elsewhere(model, value):
    model.copy_(value)
    model.packed = model.t().contiguous()


def overwritten(model, value):
    model.copy_(value)
    model[0].zero_()


def overwritten_by_a_copy(model, value):
    model.copy_(value)
    model[:, :1].copy_(torch.zeros(4, 1))


def overwritten_by_another_type(model, value):
    model.copy_(value)
    model[:, :1].copy_(torch.zeros(4, 1, dtype=torch.float64))


def clamped_later(model, value):
    model.copy_(value)
    model.clamp_(-100, 100)


def rounded_in_part(model, value):
    model.copy_(value)
    model[2].round_()


def replaced_where_not_a_number(model, value):
    model.copy_(value)
    model.nan_to_num_()


def looked_at(model, value):
    model.copy_(value * float(value.abs().max()))


@pytest.mark.parametrize("values", ["any", "zeros", "small"])
@pytest.mark.parametrize(
    "load",
    [
        computed, converted, added, scaled_later, transposed_later, packed_elsewhere, overwritten,
        overwritten_by_a_copy, overwritten_by_another_type, clamped_later, rounded_in_part,
        replaced_where_not_a_number, looked_at,
    ],
)  # fmt: skip
def test_more_than_copies_is_noticed(load, values: str) -> None:
    """Also where the recorded values are such that it changes none of them."""
    model = {"w": torch.zeros(4, 4)}
    given = {
        "any": torch.randn(4, 4), "zeros": torch.zeros(4, 4), "small": torch.ones(4, 4),
    }[values]  # fmt: skip
    _, recorder = record(lambda m, n, v: load(m["w"], v), model, {"w": given})
    assert "w" in recorder.impure


@pytest.mark.parametrize("check", [checksum, lambda t: mixed(t.view(torch.uint8))])
def test_checksums_see_order_and_every_bit(check) -> None:
    tensor = torch.arange(64, dtype=torch.float32)
    want = check(tensor)
    assert check(tensor.clone()) == want
    assert check(tensor.flip(0)) != want
    for byte in range(0, 256, 17):
        for bit in (1, 128):
            other = tensor.clone()
            other.view(torch.uint8)[byte] ^= bit
            assert check(other) != want


def test_what_takes_too_many_copies_is_refused() -> None:
    with pytest.raises(UnplannableError, match="copies for one view"):
        decompose((300, 300, 300), 2, Layout(0, (1, 300, 90_000)), Layout(0, (90_000, 300, 1)))
    assert decompose((0, 4), 2, Layout(0, (4, 1)), Layout(0, (4, 1))) == ()
    (flat,) = decompose((3, 4), 2, Layout(6, (4, 1)), Layout(2, (4, 1)))
    assert flat == Copy(6, 2, 24)
    (rows,) = decompose((3, 4), 2, Layout(0, (10, 1)), Layout(0, (4, 1)))
    assert rows == Copy(0, 0, 8, 3, 20, 8)

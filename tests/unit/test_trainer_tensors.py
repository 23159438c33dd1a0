"""Tensors on their way: read once, handed to all, never in a mix; all without a pod."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_client.trainer.muster import Missed, Muster
from rollout_client.trainer.parcel import Packer
from rollout_client.trainer.pump import Pump, SourceFailed
from rollout_client.trainer.tensors import Guarded, Naming, TensorsChanged, refuse_changed

pytestmark = pytest.mark.timeout(60)


def pairs(count: int = 20) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(count):
        yield f"t{number}", torch.full((4,), float(number))


def read_on_threads(pump: Pump, takes: dict[str, int]) -> dict[str, list[str]]:
    """Each reader takes so many and leaves; -1 takes all."""
    found: dict[str, list[str]] = {}

    def read(name: str, count: int) -> None:
        mine = found[name] = []
        for number, (tensor, _) in enumerate(pump.pairs(name)):
            mine.append(tensor)
            if number + 1 == count:
                break
        pump.leave(name)

    threads = [threading.Thread(target=read, args=item) for item in takes.items()]
    for thread in threads:
        thread.start()
    pump.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    pump.join()
    return found


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(st.sampled_from("abcd"), st.sampled_from([-1, 1, 3, 19]), min_size=1),
       st.booleans())  # fmt: skip
def test_each_reader_gets_all_it_takes_whoever_leaves(takes: dict[str, int], drained: bool) -> None:
    kept: list[str] = []
    pump = Pump(
        pairs, tuple(takes), is_drained=drained, keep=lambda name, tensor: kept.append(name)
    )
    found = read_on_threads(pump, takes)
    names = [name for name, _ in pairs()]
    for reader, count in takes.items():
        assert found[reader] == (names if count < 0 else names[:count])
    if drained or -1 in takes.values():
        assert kept == names
        assert pump.is_whole
    else:
        assert len(kept) < 20 or 19 in takes.values()


def test_a_source_that_breaks_is_told_to_every_reader() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from pairs(3)
        raise MemoryError("no room")

    pump = Pump(broken, ("a", "b"))
    told: list[str] = []

    def read(name: str) -> None:
        with pytest.raises(SourceFailed, match="MemoryError: no room"):
            list(pump.pairs(name))
        told.append(name)

    threads = [threading.Thread(target=read, args=name) for name in "ab"]
    for thread in threads:
        thread.start()
    pump.start()
    for thread in threads:
        thread.join(10)
    assert sorted(told) == ["a", "b"]
    assert not pump.is_whole


def test_a_pump_that_never_starts_ends() -> None:
    pump = Pump(pairs, ("a",))
    pump.leave("a")
    assert list(pump.pairs("a")) == []
    pump.join()


def test_all_begin_together_and_one_of_them_starts() -> None:
    starts: list[frozenset[str]] = []
    muster = Muster("abc", lambda missing: starts.append(frozenset(missing)), lag_s=30)
    threads = [threading.Thread(target=muster.arrive, args=name) for name in "ab"]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert not starts
    muster.leave("c")
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert starts == [frozenset("c")]
    muster.arrive("a")  # again, after a retry
    assert len(starts) == 1
    with pytest.raises(Missed):
        muster.arrive("c")


def test_who_is_late_is_left_behind() -> None:
    starts: list[frozenset[str]] = []
    muster = Muster("ab", lambda missing: starts.append(frozenset(missing)), lag_s=0.1)
    muster.arrive("a")
    assert starts == [frozenset("b")]
    with pytest.raises(Missed, match="was not ready for them in time"):
        muster.arrive("b")


def test_who_is_let_go_while_it_waits_does_not_begin() -> None:
    muster = Muster("ab", lambda missing: pytest.fail("it began"), lag_s=30)
    failed = threading.Event()

    def arrive() -> None:
        with pytest.raises(Missed):
            muster.arrive("a")
        failed.set()

    threading.Thread(target=arrive).start()
    time.sleep(0.05)
    muster.leave("a")
    assert failed.wait(10)


def test_guarded_tensors_are_read_whole_or_not_at_all() -> None:
    tensors = dict(pairs(3))
    guarded = Guarded(tensors)
    assert [name for name, _ in guarded.pairs()] == list(tensors)
    reading = guarded.pairs()
    next(reading)
    tensors["t0"].mul_(2)
    with pytest.raises(TensorsChanged, match="'t0' was written to"):
        list(reading)
    # the same names in other memory are other tensors
    refuse_changed(guarded.marks, Guarded(dict(pairs(3))).marks)
    with torch.inference_mode():
        assert list(Guarded({"i": torch.ones(2)}).pairs())


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 3), max_size=6))
def test_names_are_never_lost_and_never_doubled(sizes: dict[str, int]) -> None:
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    naming = Naming(lambda name: None if name.startswith("a") else name[:1])
    wanted = [name[:1] for name in tensors if not name.startswith("a")]
    if len(set(wanted)) < len(wanted):
        with pytest.raises(ValueError, match="both became"):
            naming.named(tensors)
        return
    assert list(naming.named(tensors)) == wanted
    manifest = naming.manifest("v", naming.named(tensors))
    assert [spec.name for spec in manifest.tensors] == wanted
    assert [name for name, _ in naming.whole_pairs(tensors)] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64,
                                   torch.bool])  # fmt: skip
def test_a_cast_is_in_the_manifest_and_only_of_floats(dtype: torch.dtype) -> None:
    naming = Naming(cast=torch.float16)
    tensor = torch.ones(3, 2).to(dtype)
    spec = naming.spec("t", tensor)
    sent = naming.whole("t", tensor)
    assert spec.dtype == str(sent.dtype).removeprefix("torch.")
    assert sent.dtype == (torch.float16 if dtype.is_floating_point else dtype)
    assert (spec.shape, spec.nbytes) == ((3, 2), sent.numel() * sent.element_size())
    assert naming.is_as_sent("t", tensor) == (sent.dtype == dtype)


def test_pairs_without_a_manifest_are_read_at_once_and_can_be_sent_again() -> None:
    packer = Packer(Naming(), "nothing", gathers=False)
    begun: list[int] = []
    parcel = packer.pack("v", pairs(3), ("a",), before_reading=lambda: begun.append(1))
    assert begun == [1]
    assert parcel.is_repeatable
    for _ in range(2):
        assert [name for name, _ in parcel.tensors("a")] == ["t0", "t1", "t2"]
    with pytest.raises(ValueError, match="came twice"):
        packer.pack("v", [*pairs(2), *pairs(1)], ("a",))
    streamed = packer.pack("w", pairs(3), ("a",), manifest=parcel.manifest)
    assert not streamed.is_repeatable
    assert streamed.manifest.version == "w"

"""Tensors whose bytes change on the way: found where hashes are sent, before they are the model's."""

import pytest
import torch

from rollout_pod.weights import wire
from rollout_pod.weights.device import NotExportableError
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.hashes import hashed
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import ManifestError, TransferFailed
from rollout_pod.weights.trainer import WeightSender
from tests.support.fake_device import FakeDevice
from tests.support.updates import update
from tests.support.weights import ModelLoader, Place, expected_of, mixed_tensors, same

FIRST = mixed_tensors(0)
MANIFEST = Manifest("v0", tuple(spec_of(n, t) for n, t in FIRST.items()))


@pytest.fixture(params=["cuda_ipc", "shared_memory"])
def trainer(request: pytest.FixtureRequest, place: Place):
    place.start_receivers(expected_of(FIRST), device=FakeDevice(place.root / "gpu"))
    made = WeightSender(
        place.rank_sockets, shm_dir=place.shm_dir, device=FakeDevice(place.root / "gpu"),
        transport=request.param, bucket_bytes=1024, hashes=True,
    )  # fmt: skip
    yield made
    made.close()


async def test_every_tensor_is_compared(place, trainer) -> None:
    for number in range(3):
        tensors = mixed_tensors(number)
        sent, loaders = await update(place, trainer, f"v{number}", tensors)
        assert same(loaders[0].model, tensors)
        assert sent.seconds["hash"] > 0
        assert dict(sent.reports[0].steps)["hash"] > 0


@pytest.mark.parametrize("at", [0, 5, -1])
async def test_a_byte_that_changes_on_the_way_is_found(place, trainer, monkeypatch, at) -> None:
    await update(place, trainer, "v0", FIRST)
    buckets = MANIFEST.plan(1024).buckets
    bad = buckets[at]
    push = Session.push

    def damage(self, bucket, *, segment: str, base: int, filled: int = 0) -> None:
        if bucket.seq == bad.seq:
            piece = bucket.entries[-1]
            trainer._memory.ring.view(base + piece.offset, piece.nbytes)[-1] ^= 1
        push(self, bucket, segment=segment, base=base, filled=filled)

    monkeypatch.setattr(Session, "push", damage)
    loader = ModelLoader()
    name = MANIFEST.tensors[bad.entries[-1].tensor].name
    with pytest.raises(TransferFailed, match=rf"tensor '{name}': its bytes are not those"):
        await update(place, trainer, "v1", mixed_tensors(1), [loader])
    assert name not in loader.model
    assert "finish" not in loader.calls
    monkeypatch.undo()
    tensors = mixed_tensors(2)
    _, loaders = await update(place, trainer, "v2", tensors)
    assert same(loaders[0].model, tensors)


async def test_hashes_of_the_bytes_before_they_changed(place, trainer) -> None:
    """A trainer's own mistake: the tensors went on changing while they were sent."""
    manifest = hashed(MANIFEST, FIRST)
    other = mixed_tensors(1)
    with pytest.raises(TransferFailed, match="the manifest says"):
        await update(place, trainer, "v0", other, manifest=manifest)


async def test_pairs_need_a_manifest_that_has_them(place, trainer) -> None:
    manifest = hashed(MANIFEST, FIRST)
    _, loaders = await update(place, trainer, "v0", iter(FIRST.items()), manifest=manifest)
    assert same(loaders[0].model, FIRST)
    with pytest.raises(TransferFailed, match="hashes are sent before the bytes"):
        trainer.send("v1", iter(FIRST.items()), manifest=MANIFEST.renamed("v1"))


async def test_direct_is_refused_or_not_chosen(place) -> None:
    place.start_receivers(expected_of(FIRST), device=FakeDevice(place.root / "gpu"))
    gpu = FakeDevice(place.root / "gpu")
    held = gpu.give(FIRST)
    settings = {"shm_dir": place.shm_dir, "device": gpu}
    with pytest.raises(ValueError, match="mode direct: hashes are compared in buckets only"):
        WeightSender(place.rank_sockets, mode="direct", hashes=True, **settings)
    auto = WeightSender(place.rank_sockets, hashes=True, **settings)
    sent, _ = await update(place, auto, "v0", held)
    assert (sent.mode, sent.reason) == ("bucketed", "bucketed: hashes are compared in buckets only")
    auto.close()
    named = WeightSender(place.rank_sockets, mode="direct", **settings)
    with pytest.raises(NotExportableError, match="hashes are compared"):
        named.send("v1", held, manifest=hashed(MANIFEST, held).renamed("v1").with_hashes(
            hashed(MANIFEST, held).hashes))  # fmt: skip
    named.close()


async def test_not_as_many_as_tensors(place) -> None:
    place.start_receivers(expected_of(FIRST))
    session = Session("s1", place.rank_sockets, place.shm_dir)
    session.greet(5)
    bad = Manifest("v0", MANIFEST.tensors, (), (b"12345678",))
    with pytest.raises(ManifestError, match=f"1 hashes for {len(FIRST)} tensors"):
        session.offer(bad, 5)
    session.close()
    with pytest.raises(ValueError, match="hashes"):
        wire.Offer(session="s", version="v", hashes=(b"short",))


def test_hashes_are_of_the_bits_and_of_nothing_else() -> None:
    one = hashed(MANIFEST, FIRST)
    assert one == hashed(MANIFEST, {n: t.clone() for n, t in FIRST.items()})
    assert one.digest == MANIFEST.digest, "the manifest of the next version can be sent in short"
    assert one.renamed("v1").hashes == ()
    turned = dict(FIRST)
    turned["layers.1.big"] = FIRST["layers.1.big"].t().contiguous().t()
    assert hashed(MANIFEST, turned) == one
    turned["layers.0.norm"] = -torch.zeros_like(FIRST["layers.0.norm"])
    assert hashed(MANIFEST, turned).hashes[1] != one.hashes[1]

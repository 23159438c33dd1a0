"""What a sender says before the ranks have answered: manifest and places with the greeting, and what
becomes of them when a rank has forgotten, falls back, or is taken over.
"""

import asyncio
import time
from collections.abc import Sequence

import pytest
import torch

from rollout_pod.weights import direct, wire
from rollout_pod.weights.device import DeviceError
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import RanksError, TransferFailed
from rollout_pod.weights.talking import Talker
from tests.support.fake_device import FakeDevice
from tests.support.updates import Loads, sender, start_on, update
from tests.support.weights import ModelLoader, Place, mixed_tensors, same

FIRST = mixed_tensors(0)


def start(place: Place, devices: Sequence[FakeDevice], tensors=FIRST) -> None:
    start_on(place, devices, tensors)


def views(place: Place, count: int) -> list[FakeDevice]:
    return [FakeDevice(place.root / "gpu") for _ in range(count)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("forgotten", ["all", "places", "manifests"])
async def test_one_rank_of_two_that_has_forgotten_is_told_again(
    place, gpu, monkeypatch, forgotten, rank
) -> None:
    monkeypatch.setattr(direct, "LOOK_FIRST", 8)
    many = {f"t{i}": torch.full((5,), float(i)) for i in range(100)}
    start(place, views(place, 2), many)
    trainer = sender(place, gpu, mode="direct")
    held = gpu.give(many)
    await update(place, trainer, "step-0", held)
    await update(place, trainer, "step-1", held)
    greeter = place.receivers[rank]._talker._greeter
    if forgotten == "all":
        assert greeter.forget()
    elif forgotten == "places":
        greeter._places.clear()
    else:
        greeter._manifests.clear()
    held["t50"].fill_(7.0)
    _, loaders = await update(place, trainer, "step-2", held)
    assert all(same(loader.model, held) for loader in loaders)
    trainer.close()


@pytest.mark.parametrize("where", ["gpu", "host"])
async def test_a_fallback_after_which_all_is_said_again(place, gpu, where) -> None:
    start(place, [*views(place, 1), FakeDevice(place.root / "other", uuid="GPU-other")])
    trainer = sender(place, gpu)
    for number in range(3):
        held = gpu.give(FIRST) if where == "gpu" else FIRST
        sent, loaders = await update(place, trainer, f"step-{number}", held)
        assert sent.transport == "shared_memory"
        assert all(same(loader.model, FIRST) for loader in loaders)
    trainer.close()


async def test_a_fallback_of_one_rank_after_direct_updates(place, gpu) -> None:
    start(place, views(place, 2))
    trainer = sender(place, gpu)
    held = gpu.give(FIRST)
    for number in range(2):
        sent, _ = await update(place, trainer, f"step-{number}", held)
        assert sent.mode == "direct"
    place.receivers[1]._memories.device = None
    sent, loaders = await update(place, trainer, "step-2", held)
    assert sent.transport == "shared_memory"
    assert all(same(loader.model, FIRST) for loader in loaders)
    trainer.close()


async def test_direct_and_bucketed_updates_in_turns(place, gpu, monkeypatch) -> None:
    monkeypatch.setattr(direct, "LOOK_FIRST", 4)
    start(place, views(place, 1))
    trainer = sender(place, gpu)
    held = gpu.give(FIRST)
    modes = []
    for number in range(6):
        tensors = list(held.items()) if number in (2, 4) else held
        sent, loaders = await update(place, trainer, f"step-{number}", tensors)
        modes.append(sent.mode)
        assert same(loaders[0].model, held)
    assert modes == ["direct", "direct", "bucketed", "direct", "bucketed", "direct"]
    trainer.close()


@pytest.mark.parametrize("said", ["all", "not the end"])
async def test_nothing_is_read_of_a_sender_that_has_gone_before_the_load(
    place, gpu, monkeypatch, said
) -> None:
    start(place, views(place, 1))
    trainer = sender(place, gpu, mode="direct")
    held = gpu.give(FIRST)
    for number in range(2):  # the second is offered with places that the rank holds already
        await update(place, trainer, f"step-{number}", held)

    def dies(*_: object) -> None:
        time.sleep(0.1)  # all that was said is on its way
        raise Killed

    monkeypatch.setattr(Session, "_look_out" if said == "all" else "finish", dies)
    monkeypatch.setattr(Session, "abort", lambda *_: None)  # who is killed says nothing
    with pytest.raises(Killed):
        await trainer.send_async("step-2", held, timeout_s=20, session="s")
    trainer._hang_up("killed")
    await asyncio.sleep(0.3)
    loader = ModelLoader()
    report = await asyncio.to_thread(
        place.receivers[0].load, "s", loader, version="step-2", flush=False, timeout_s=5
    )
    assert (report.ok, report.touched, loader.model) == (False, False, {})
    assert "the sender is gone" in report.error


class Killed(Exception):
    pass


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("before", [0, 2])
async def test_a_sender_that_is_replaced_after_acceptance_hears_of_it(
    place, gpu, ranks, before
) -> None:
    start(place, views(place, ranks))
    trainer = sender(place, gpu, mode="direct")
    held = gpu.give(FIRST)
    for number in range(before):
        await update(place, trainer, f"step-{number}", held)
    other = Session("other", place.rank_sockets, place.shm_dir)
    try:
        async with asyncio.timeout(20):  # and not at the update's own deadline
            with pytest.raises((RanksError, TransferFailed), match=r"replaced|say hello again"):
                await trainer.send_async(
                    "step-x", held, timeout_s=40, on_accepted=lambda _: other.greet(5)
                )
    finally:
        other.close()
    _, loaders = await update(place, trainer, "step-y", held)
    assert all(same(loader.model, held) for loader in loaders)
    trainer.close()


async def test_a_sender_that_fails_once_the_load_has_begun_is_healed_by_a_resend(
    place, gpu
) -> None:
    start(place, views(place, 1))
    trainer = sender(place, gpu, mode="direct")
    held = gpu.give(FIRST)
    await update(place, trainer, "step-0", held)
    loads = Loads(place, "step-1", [ModelLoader()])

    def accepted(session: str) -> None:
        loads(session)
        raise RuntimeError("the pod did not answer")

    with pytest.raises(RuntimeError, match="did not answer"):
        await trainer.send_async("step-1", held, timeout_s=10, on_accepted=accepted)
    (report,) = await loads.reports()
    assert not report.ok
    held["layers.0.norm"].add_(1)
    _, loaders = await update(place, trainer, "step-2", held)
    assert same(loaders[0].model, held)
    trainer.close()


async def test_places_that_do_not_fit_the_manifest_cost_an_update(place, gpu, monkeypatch) -> None:
    start(place, views(place, 1))
    trainer = sender(place, gpu, mode="direct")
    held = gpu.give(FIRST)
    await update(place, trainer, "step-0", held)
    with monkeypatch.context() as patch:
        more = property(
            lambda self: self.message.model_copy(update={"same": self.digest, "count": 1000})
        )
        patch.setattr(direct.Exports, "first", more)
        with pytest.raises(RanksError, match=r"manifest: .* direct: tensors 0 to 1000"):
            await asyncio.to_thread(trainer.send, "step-1", held, timeout_s=5)
    held["layers.0.norm"].add_(1)
    _, loaders = await update(place, trainer, "step-2", held)
    assert same(loaders[0].model, held)
    trainer.close()


async def test_places_for_a_session_that_was_given_up_are_refused(place, gpu, monkeypatch) -> None:
    said: list[wire.Message | None] = []
    answer = Talker._answer

    def listen(self, peer: bytes, message: wire.ToRank) -> wire.Message | None:
        said.append(answer(self, peer, message))
        return said[-1]

    monkeypatch.setattr(Talker, "_answer", listen)
    start(place, views(place, 1))
    trainer = sender(place, gpu, mode="direct")
    await update(place, trainer, "step-0", gpu.give(FIRST))
    link, exports = trainer._session, trainer._looker._exports
    assert link is not None
    assert exports is not None
    assert exports.manifest is not None
    link.renew("given-up")
    link.greet(5, device=trainer._memory.token())
    link.abort("something else came")
    with pytest.raises(RanksError, match="something else came"):
        link.offer(exports.manifest, 5, exports.first)
    assert isinstance(said[-1], wire.Refused)
    assert said[-1].code == "order"
    trainer.close()


async def test_a_token_that_could_not_be_written_is_written_again(place, gpu) -> None:
    start(place, views(place, 1))
    trainer = sender(place, gpu, transport="cuda_ipc")  # auto would do without it
    held = gpu.give(FIRST)
    write = gpu.write

    def fails(*_: object) -> None:
        raise DeviceError("no room")

    gpu.write = fails
    with pytest.raises(DeviceError, match="no room"):
        await asyncio.to_thread(trainer.send, "step-0", held, timeout_s=5)
    gpu.write = write
    sent, _ = await update(place, trainer, "step-1", held)
    assert (sent.transport, sent.reason) == ("cuda_ipc", "")
    trainer.close()

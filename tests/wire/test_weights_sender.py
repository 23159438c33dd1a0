"""A trainer's persistent sender, by CUDA IPC and shared memory, on a GPU whose memory is files."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from rollout_pod.weights import direct, wire
from rollout_pod.weights.buckets import Account
from rollout_pod.weights.device import DeviceError, NotExportableError
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.greeting import Greeter
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.memory import Memories
from rollout_pod.weights.peer import RankPeer
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import ManifestError, RanksError, TransferFailed
from rollout_pod.weights.talking import Talker
from rollout_pod.weights.trainer import WeightSender
from tests.support.fake_device import FakeDevice
from tests.support.updates import Loads, sender, start_on, update
from tests.support.weights import ModelLoader, expected_of, mixed_tensors, same, until

FIRST = mixed_tensors(0)


@pytest.mark.parametrize("bucket_bytes", [256, 4096, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_bucketed_through_the_gpu(place, gpu, ranks_view, bucket_bytes, ranks) -> None:
    place.start_receivers(*[expected_of(FIRST)] * ranks, device=ranks_view)
    trainer = sender(place, gpu, mode="bucketed", transport="cuda_ipc", bucket_bytes=bucket_bytes)
    for number in range(3):
        tensors = mixed_tensors(number)
        sent, loaders = await update(place, trainer, f"step-{number}", tensors)
        assert (sent.transport, sent.mode, sent.reason) == ("cuda_ipc", "bucketed", "")
        assert all(same(loader.model, tensors) for loader in loaders)
        if number == 0:
            made = dict(gpu.calls), dict(ranks_view.calls)
    # handles and buckets are made once
    for calls, device in zip(made, (gpu, ranks_view), strict=True):
        for what in ("allocate", "export", "open"):
            assert device.calls.get(what) == calls.get(what), what
    trainer.close()
    assert (gpu.in_use, ranks_view.in_use) == (0, 0)


async def test_direct_exports_allocations_once(place, gpu, ranks_view) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    held = gpu.give(FIRST)
    trainer = sender(place, gpu)
    sent, loaders = await update(place, trainer, "step-0", held)
    assert (sent.transport, sent.mode, sent.reason) == ("cuda_ipc", "direct", "")
    assert same(loaders[0].model, FIRST)
    exports, opens = gpu.calls["export"], ranks_view.calls["open"]
    assert exports == 2, "the probe's allocation, and the one that all tensors lie in"
    for seed in (1, 2):
        for name, tensor in mixed_tensors(seed).items():
            held[name].copy_(tensor)
        _, loaders = await update(place, trainer, f"step-{seed}", held)
        assert same(loaders[0].model, mixed_tensors(seed))
    assert (gpu.calls["export"], ranks_view.calls["open"]) == (exports, opens)
    trainer.close()
    assert ranks_view.in_use == 0


@pytest.mark.parametrize("mode", ["auto", "bucketed"])
async def test_other_names_of_a_manifest_go_in_every_mode(place, gpu, ranks_view, mode) -> None:
    tied = FIRST | {"head": FIRST["embed.weight"]}
    place.start_receivers(expected_of(tied), device=ranks_view)
    trainer = sender(place, gpu, mode=mode)
    held = gpu.give(FIRST)

    def manifest(version: str, *names: str) -> Manifest:
        specs = tuple(spec_of(name, tensor) for name, tensor in held.items())
        return Manifest(version, specs, tuple((name, "embed.weight") for name in names))

    for given in (manifest("step-0", "head"), manifest("step-0", "head"), None):  # as the last one
        held["embed.weight"].add_(1)
        tied["head"] = tied["embed.weight"] = held["embed.weight"]
        sent, loaders = await update(place, trainer, "step-0", held, manifest=given)
        assert sent.mode == ("direct" if mode == "auto" else mode)
        assert same(loaders[0].model, tied)
    with pytest.raises(TransferFailed, match="the manifest is of version 'step-0'"):
        trainer.send("step-1", held, manifest=manifest("step-0", "head"), timeout_s=5)
    with pytest.raises(ManifestError, match="'tail': unknown"):
        trainer.send("step-1", held, manifest=manifest("step-1", "head", "tail"), timeout_s=5)
    with pytest.raises(ManifestError, match="'head': missing"):
        trainer.send("step-1", held, manifest=manifest("step-1"), timeout_s=5)
    trainer.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda specs: specs[1:], "the tensor is .*embed.*, manifest: "),
        (lambda specs: specs[:-1], "the tensor is .*, manifest: none"),
        (lambda specs: (*specs, specs[0]), "the tensor is missing, manifest: .*embed"),
        (lambda specs: (*specs[:-1], replace(specs[-1], dtype="int8")), "manifest: .*int8"),
    ],
    ids=["one is not in it", "the last is not in it", "one more", "another dtype"],
)
async def test_direct_refuses_a_manifest_of_other_tensors(
    place, gpu, ranks_view, change, says
) -> None:
    """The tensors are found by their addresses: what the caller says of them would go unread."""
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer, held = sender(place, gpu), gpu.give(FIRST)
    specs = tuple(spec_of(name, tensor) for name, tensor in held.items())
    for version in ("step-0", "step-1"):  # the second knows what the first found
        with pytest.raises(TransferFailed, match=says):
            trainer.send(version, held, manifest=Manifest(version, change(specs)), timeout_s=5)
        sent, loaders = await update(
            place, trainer, version, held, manifest=Manifest(version, specs)
        )
        assert sent.mode == "direct" and same(loaders[0].model, FIRST)
    trainer.close()


async def test_tensors_that_move_are_noticed(place, gpu, ranks_view) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu)
    held = gpu.give(FIRST)
    await update(place, trainer, "step-0", held)

    # another allocation, old one still there
    moved = gpu.give(mixed_tensors(1))
    sent, loaders = await update(place, trainer, "step-1", moved)
    assert sent.mode == "direct" and same(loaders[0].model, mixed_tensors(1))

    # one tensor only, by its data
    value = mixed_tensors(2)["layers.1.big"]
    moved["layers.1.big"].data = gpu.give({"big": value})["big"]
    sent, loaders = await update(place, trainer, "step-2", moved)
    want = mixed_tensors(1) | {"layers.1.big": value}
    assert sent.mode == "direct" and same(loaders[0].model, want)

    # another allocation at the same address: only its identity tells
    exports = gpu.calls["export"]
    start = gpu._find(moved["layers.1.big"].data_ptr())
    name, mapped, identity = gpu._made[start]
    gpu._made[start] = (name, mapped, identity + 1000)
    gpu.calls["free"] = gpu.calls.get("free", 0) + 1
    await update(place, trainer, "step-3", moved)
    assert gpu.calls["export"] > exports

    # and so by memory that is not from torch's allocator, whose count does not tell
    gpu._made[start] = (name, mapped, identity + 2000)
    loads = Loads(place, "step-4", [ModelLoader()])
    with pytest.raises(TransferFailed, match="given back and taken anew"):
        await trainer.send_async("step-4", moved, timeout_s=20, on_accepted=loads)
    assert not (await loads.reports())[0].ok
    sent, loaders = await update(place, trainer, "step-5", moved)
    assert sent.mode == "direct" and same(loaders[0].model, want)

    # other names for the same tensors
    renamed = dict(zip(reversed(moved), moved.values(), strict=True))
    with pytest.raises(ManifestError):
        await trainer.send_async("step-6", renamed, timeout_s=20)
    trainer.close()


async def test_a_tensor_that_changes_during_the_update_fails_it(place, gpu, ranks_view) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu)
    held = gpu.give(FIRST)
    await update(place, trainer, "step-0", held)
    held["layers.1.big"].t_()  # the same address, other bytes
    loads = Loads(place, "step-1", [ModelLoader()])
    with pytest.raises(TransferFailed, match=r"'layers\.1\.big' was changed"):
        await trainer.send_async("step-1", held, timeout_s=20, on_accepted=loads)
    (report,) = await loads.reports()
    assert not report.ok
    held["layers.1.big"].t_()
    _, loaders = await update(place, trainer, "step-2", held)
    assert same(loaders[0].model, FIRST)
    trainer.close()


@pytest.mark.parametrize("moved", ["t3", "t40", "t99"])
async def test_many_tensors_are_looked_at_while_the_first_are_copied(
    place, gpu, ranks_view, monkeypatch, moved
) -> None:
    """What has moved is never read: it is exported anew, or fails the update and then is."""
    monkeypatch.setattr(direct, "LOOK_FIRST", 8)
    many = {f"t{i}": torch.full((5,), float(i)) for i in range(100)}
    place.start_receivers(expected_of(many), device=ranks_view)
    trainer = sender(place, gpu, mode="direct")
    held = gpu.give(many)
    heard: list[tuple[int, int | None]] = []
    take = Account.take_whole

    def listen(self, first: int, count: int | None) -> None:
        heard.append((first, count))
        take(self, first, count)

    monkeypatch.setattr(Account, "take_whole", listen)
    await update(place, trainer, "step-0", held)
    assert heard == [(0, 100)]
    heard.clear()
    held["t99"].fill_(7.0)
    _, loaders = await update(place, trainer, "step-1", held)
    assert heard == [(0, 8), (8, 24), (32, 68)]
    assert same(loaders[0].model, held)

    elsewhere = gpu.give({moved: torch.full((5,), -1.0)})
    held[moved] = elsewhere[moved]
    heard.clear()
    if moved == "t3":  # seen before anything is read
        _, loaders = await update(place, trainer, "step-2", held)
        assert heard == [(0, 100)]
        assert same(loaders[0].model, held)
        trainer.close()
        return
    loads = Loads(place, "step-2", [ModelLoader()])
    with pytest.raises(TransferFailed, match="some tensors have moved; send once more"):
        await trainer.send_async("step-2", held, timeout_s=20, on_accepted=loads)
    (report,) = await loads.reports()
    assert not report.ok
    assert heard == ([(0, 8), (8, 24)])
    heard.clear()
    for step in ("step-3", "step-4"):
        _, loaders = await update(place, trainer, step, held)
        assert same(loaders[0].model, held)
    assert heard == [(0, 100), (0, 100)], "it has become careful"
    trainer.close()


async def test_memory_that_no_handle_carries_goes_bucketed_and_says_so(
    place, gpu, ranks_view
) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    held = gpu.give(FIRST)
    gpu.poolish.add(gpu._find(held["layers.1.big"].data_ptr()))
    trainer = sender(place, gpu)
    sent, loaders = await update(place, trainer, "step-0", held)
    assert (sent.transport, sent.mode) == ("cuda_ipc", "bucketed")
    assert "comes from a pool" in sent.reason
    assert same(loaders[0].model, FIRST)
    trainer.close()
    named = sender(place, gpu, mode="direct")
    with pytest.raises(NotExportableError, match=r"mode direct does not work.*pool"):
        named.send("step-1", held, timeout_s=5)
    named.close()


@pytest.mark.parametrize("why", ["another GPU", "no GPU", "cannot be opened"])
async def test_auto_says_why_it_is_shared_memory_and_a_named_transport_fails(
    place, gpu, why
) -> None:
    theirs = {
        "another GPU": FakeDevice(place.root / "other", uuid="GPU-other"),
        "no GPU": None,
        "cannot be opened": FakeDevice(place.root / "other"),
    }[why]
    words = {
        "another GPU": "the sender is on GPU-fake, rank 0 on GPU-other",
        "no GPU": "rank 0 has no GPU",
        "cannot be opened": "shareProcessNamespace",
    }[why]
    place.start_receivers(expected_of(FIRST), device=theirs)
    with pytest.raises(RanksError, match=words):
        sender(place, gpu, transport="cuda_ipc").send("step-0", FIRST, timeout_s=5)
    trainer = sender(place, gpu)
    sent, loaders = await update(place, trainer, "step-0", FIRST)
    assert (sent.transport, sent.mode) == ("shared_memory", "bucketed")
    assert words in sent.reason
    assert same(loaders[0].model, FIRST)
    trainer.close()
    assert place.segments() == []
    assert theirs is None or theirs.in_use == 0


@pytest.mark.parametrize("at", ["allocate", "export", "write"])
async def test_a_gpu_of_the_senders_that_shares_nothing_is_no_error_of_auto(
    place, gpu, ranks_view, at
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceError("operation not supported")

    place.start_receivers(expected_of(FIRST), device=ranks_view)
    held = gpu.give(FIRST)
    before = gpu.in_use
    setattr(gpu, at, refuse)
    named, trainer = sender(place, gpu, transport="cuda_ipc"), sender(place, gpu)
    with pytest.raises(DeviceError, match="operation not supported"):
        named.send("step-0", held, timeout_s=5)
    for number in range(2):
        sent, loaders = await update(place, trainer, f"step-{number}", held)
        assert (sent.transport, sent.mode) == ("shared_memory", "bucketed")
        assert sent.reason == "the sender's GPU shares no memory: operation not supported"
        assert same(loaders[0].model, FIRST)
    delattr(gpu, at)
    sent, _ = await update(place, trainer, "step-2", held)
    assert (sent.transport, sent.reason) == ("cuda_ipc", "")
    for each in (named, trainer):
        each.close()
    assert (gpu.in_use, place.segments()) == (before, [])


async def test_shared_memory_is_pinned_once_on_both_sides(place, gpu, ranks_view) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu, transport="shared_memory")
    for number in range(3):
        _, loaders = await update(place, trainer, f"step-{number}", mixed_tensors(number))
        assert same(loaders[0].model, mixed_tensors(number))
        assert (gpu.calls["register"], ranks_view.calls["register"]) == (1, 1)
    trainer.close()
    assert (gpu.in_use, ranks_view.in_use) == (0, 0)
    assert place.segments() == []


async def test_memory_that_cannot_be_pinned_is_slower_and_no_error(place, gpu, ranks_view) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise DeviceError("operation not permitted")

    ranks_view.register = refuse
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu, transport="shared_memory")
    for number in range(2):
        tensors = mixed_tensors(number)
        sent, loaders = await update(place, trainer, f"step-{number}", tensors)
        assert "rank 0: segment" in sent.reason
        assert "cannot be pinned: operation not permitted" in sent.reason
        assert same(loaders[0].model, tensors)
    trainer.close()
    assert place.segments() == []


async def test_pairs_are_taken_one_after_another(place, gpu, ranks_view) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    alive = most = 0

    class Counted(dict):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, most
        for name, tensor in FIRST.items():
            made = tensor.clone()
            made.__dict__["counted"] = Counted()
            alive += 1
            most = max(most, alive)
            yield name, made

    manifest = Manifest("step-0", tuple(spec_of(n, t) for n, t in FIRST.items()))
    trainer = sender(place, gpu, bucket_bytes=512)
    with pytest.raises(TransferFailed, match="need a manifest"):
        trainer.send("step-0", pairs(), timeout_s=5)
    sent, loaders = await update(place, trainer, "step-0", pairs(), manifest=manifest)
    assert sent.mode == "bucketed" and "cannot be read in place" in sent.reason
    assert same(loaders[0].model, FIRST)
    assert most <= 3
    await update(place, trainer, "step-1", pairs())  # consists of the same
    with pytest.raises(TransferFailed, match=r"no more tensors|comes after all"):
        await update(place, trainer, "step-2", list(pairs())[:-1])
    trainer.close()


async def test_a_rejected_manifest_touches_nothing(place, gpu, ranks_view) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu)
    held = gpu.give({n: t for n, t in FIRST.items() if n != "layers.0.norm"})
    with pytest.raises(ManifestError, match=r"layers\.0\.norm.*missing"):
        trainer.send("step-0", held, timeout_s=5)
    _, loaders = await update(place, trainer, "step-1", gpu.give(FIRST))
    assert same(loaders[0].model, FIRST)
    trainer.close()


async def test_a_dead_sender_leaves_nothing_mapped(place, gpu, ranks_view, monkeypatch) -> None:
    from rollout_pod.weights import talking

    monkeypatch.setattr(talking, "IDLE_S", 0.1)
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu)
    await update(place, trainer, "step-0", gpu.give(FIRST))
    assert ranks_view.in_use > 0
    trainer._hang_up("as if killed")
    async with asyncio.timeout(10):
        while ranks_view.in_use:
            await asyncio.sleep(0.02)


async def test_another_sender_takes_over(place, gpu, ranks_view) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    one, two = sender(place, gpu), sender(place, gpu)
    first, second = gpu.give(FIRST), gpu.give(mixed_tensors(1))
    await update(place, one, "step-0", first)
    mapped = ranks_view.in_use
    _, loaders = await update(place, two, "step-1", second)
    assert same(loaders[0].model, mixed_tensors(1))
    assert ranks_view.in_use == mapped, "the first one's memory is unmapped"
    _, loaders = await update(place, one, "step-2", first)
    assert same(loaders[0].model, FIRST)
    for each in (one, two):
        each.close()
    assert ranks_view.in_use == 0


@pytest.mark.parametrize("mode", ["direct", "bucketed"])
async def test_a_sender_that_is_refused_takes_nothing_from_the_one_before(
    place, gpu, ranks_view, mode
) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu, mode=mode)
    held = gpu.give(FIRST)
    await update(place, trainer, "step-0", held)
    foreign = FakeDevice(place.root / "other", uuid="GPU-other")
    other = sender(place, foreign, transport="cuda_ipc")
    loader = ModelLoader()
    loads = Loads(place, "step-1", [loader])

    def accepted(session: str) -> None:
        with pytest.raises(RanksError, match="the sender is on GPU-other"):
            other.send("step-1", foreign.give(FIRST), timeout_s=5)
        loads(session)

    held["layers.0.norm"].add_(1)
    await trainer.send_async("step-1", held, timeout_s=20, on_accepted=accepted)
    assert (await loads.reports())[0].ok
    assert same(loader.model, held)
    for each in (trainer, other):
        each.close()
    assert ranks_view.in_use == 0


@pytest.mark.parametrize(("owner", "at"), [(Greeter, "_probe"), (Memories, "forget")])
async def test_a_load_that_begins_while_another_greets_keeps_its_memory(
    place, gpu, ranks_view, monkeypatch, owner, at
) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    one, two = sender(place, gpu), sender(place, gpu)
    held = gpu.give(FIRST)
    await update(place, one, "step-0", held)
    mapped = ranks_view.in_use
    found = []
    original = getattr(owner, at)

    def meanwhile(*args):
        claim = threading.Thread(
            target=lambda: found.append(place.receivers[0]._talker.claim("one", "step-1")[0])
        )
        claim.start()
        claim.join(0.3)  # it may have to wait until the greeting is answered
        return original(*args)

    class EnoughError(Exception):
        pass

    def accepted(_: str) -> None:
        link = Session("two", place.rank_sockets, place.shm_dir)
        with monkeypatch.context() as patch:
            patch.setattr(owner, at, meanwhile)
            with contextlib.suppress(RanksError):  # where the load was the first
                link.greet(5, device=two._memory.token())
        link.close()
        until(lambda: bool(found))
        raise EnoughError

    with pytest.raises(EnoughError):
        await one.send_async("step-1", held, session="one", timeout_s=20, on_accepted=accepted)
    now = ranks_view.in_use
    for each in (one, two):
        each.close()
    assert found[0] is None or now == mapped


async def test_two_senders_each_to_its_own_rank(place) -> None:
    """A rank on each GPU, one session: every sender reaches the rank that shares its GPU."""
    ours = [FakeDevice(place.root / f"gpu-{i}", uuid=f"GPU-{i}") for i in range(2)]
    theirs = [FakeDevice(place.root / f"gpu-{i}", uuid=f"GPU-{i}") for i in range(2)]
    start_on(place, theirs, FIRST)
    loaders = [ModelLoader(), ModelLoader()]
    accepted: list[str] = []
    loads = Loads(place, "step-0", loaders)

    def both(session: str) -> None:
        accepted.append(session)
        if len(accepted) == 2:
            loads(session)

    senders = [
        WeightSender(
            [place.rank_sockets[i]], shm_dir=place.shm_dir, device=ours[i], ranks=[i], world=2,
            transport="cuda_ipc",
        )
        for i in range(2)
    ]  # fmt: skip
    sent = await asyncio.gather(
        *(
            each.send_async(
                "step-0", ours[i].give(FIRST), session="both", timeout_s=20, on_accepted=both
            )
            for i, each in enumerate(senders)
        )
    )
    assert [s.mode for s in sent] == ["direct", "direct"]
    assert all(same(loader.model, FIRST) for loader in loaders)
    for each in senders:
        each.close()


@pytest.mark.parametrize("mode", ["direct", "bucketed"])
async def test_many_updates_leave_nothing_behind(place, gpu, ranks_view, mode) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu, mode=mode)
    held = gpu.give(FIRST)
    here = psutil.Process(os.getpid())
    loader = ModelLoader()
    for number in range(100):
        if number == 20:
            before = here.num_fds(), here.num_threads(), gpu.in_use, ranks_view.in_use
        await update(place, trainer, f"step-{number}", held, [loader])
    after = here.num_fds(), here.num_threads(), gpu.in_use, ranks_view.in_use
    assert max(a - b for a, b in zip(after, before, strict=True)) <= 2, (before, after)
    trainer.close()


async def test_a_rank_that_is_gone_fails_the_update_and_the_next_finds_it_again(
    place, gpu, ranks_view
) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu)
    held = gpu.give(FIRST)
    await update(place, trainer, "step-0", held)
    place.receivers.pop().close()
    with pytest.raises(RanksError):
        await update(place, trainer, "step-1", held)
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    _, loaders = await update(place, trainer, "step-2", held)
    assert same(loaders[0].model, FIRST)
    trainer.close()


@pytest.mark.parametrize("at", ["its begin", "the load"])
async def test_a_cancelled_send_gives_its_session_up(
    place, gpu, ranks_view, at, monkeypatch
) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu)
    held = gpu.give(FIRST)
    accepted, go = threading.Event(), threading.Event()
    if at == "its begin":  # its thread has no turn before
        begin = trainer._alone
        monkeypatch.setattr(trainer, "_alone", lambda *given: go.wait(10) and begin(*given))
    send = asyncio.create_task(
        trainer.send_async(
            "step-0", held, session="one", timeout_s=20, on_accepted=lambda _: accepted.set()
        )
    )
    if at == "the load":
        await asyncio.to_thread(accepted.wait, 10)
    else:
        await asyncio.sleep(0.05)
    send.cancel()
    await asyncio.sleep(0.05)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await send
    assert accepted.is_set() == (at == "the load")
    report = place.receivers[0].load(
        "one", ModelLoader(), version="step-0", flush=False, timeout_s=5
    )
    assert (report.ok, report.touched) == (False, False)
    _, loaders = await update(place, trainer, "step-1", held)
    assert same(loaders[0].model, FIRST)
    trainer.close()


async def test_one_send_at_a_time(place, gpu, ranks_view) -> None:
    """The second is refused, and its end or cancellation is no matter of the first."""
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu)
    held = gpu.give(FIRST)
    loader = ModelLoader()
    loads = Loads(place, "step-0", [loader])
    accepted, go = threading.Event(), threading.Event()

    def hold(session: str) -> None:
        accepted.set()
        assert go.wait(10)
        loads(session)

    first = asyncio.create_task(trainer.send_async("step-0", held, timeout_s=20, on_accepted=hold))
    await asyncio.to_thread(accepted.wait, 10)
    with pytest.raises(RuntimeError, match="sending already"):
        trainer.send("step-1", held, timeout_s=5)
    with pytest.raises(RuntimeError, match="is sending: cancel that"):
        trainer.close()
    second = asyncio.create_task(trainer.send_async("step-1", held, timeout_s=5))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises((asyncio.CancelledError, RuntimeError)):
        await second
    go.set()
    await first
    assert (await loads.reports())[0].ok
    assert same(loader.model, FIRST)
    trainer.close()


def test_settings_that_contradict(tmp_path: Path, gpu) -> None:
    with pytest.raises(ValueError, match="device"):
        WeightSender([tmp_path], transport="cuda_ipc")
    with pytest.raises(ValueError, match="shared memory is filled"):
        WeightSender([tmp_path], transport="shared_memory", mode="direct", device=gpu)


async def test_a_manifest_that_is_known_is_shown_with_the_greeting(
    place, gpu, ranks_view, monkeypatch
) -> None:
    heard: list[str] = []
    answer = Talker._answer

    def listen(self, peer: bytes, message: wire.ToRank) -> wire.Message | None:
        heard.append(message.kind)
        return answer(self, peer, message)

    monkeypatch.setattr(Talker, "_answer", listen)
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu, mode="direct")
    held = gpu.give(FIRST)
    waited = trainer_waits(monkeypatch)
    await update(place, trainer, "step-0", held)
    assert waited[:2] == ["hello", ""]  # the manifest is sent in its own wait
    assert heard[:2] == ["hello", "manifest"]
    heard.clear()
    waited.clear()
    _, loaders = await update(place, trainer, "step-1", held)
    assert heard == ["hello", "manifest", "finish"]  # the places came with the manifest
    assert waited[0].endswith("hello, then manifest")
    assert same(loaders[0].model, FIRST)
    trainer.close()


def trainer_waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a session had sent each time it began to wait for its ranks."""
    said: list[str] = []
    since: list[str] = []
    send, wait = RankPeer.send, Session._wait_ranks

    def sends(self, message: wire.Message) -> None:
        since.append(message.kind)
        send(self, message)

    def waits(self, *args) -> None:
        said.append(", then ".join(since))
        since.clear()
        wait(self, *args)

    monkeypatch.setattr(RankPeer, "send", sends)
    monkeypatch.setattr(Session, "_wait_ranks", waits)
    return said


@pytest.mark.parametrize("why", ["forgotten", "another sender", "places forgotten"])
async def test_a_manifest_that_was_shown_too_early_is_shown_again(
    place, gpu, ranks_view, why
) -> None:
    place.start_receivers(expected_of(FIRST), device=ranks_view)
    trainer = sender(place, gpu)
    held = gpu.give(FIRST)
    await update(place, trainer, "step-0", held)
    greeter = place.receivers[0]._talker._greeter
    if why == "places forgotten":
        greeter._places.clear()
    else:
        greeter._manifests.clear()
    if why == "another sender":
        other = sender(place, gpu)
        await update(place, other, "step-1", gpu.give(mixed_tensors(1)))
        greeter._manifests.clear()
    held["layers.0.norm"].add_(1)
    sent, loaders = await update(place, trainer, "step-2", held)
    assert sent.mode == "direct"
    assert same(loaders[0].model, held)
    trainer.close()
    if why == "another sender":
        other.close()

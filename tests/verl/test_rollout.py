"""verl's ``BaseRollout`` on a scripted adapter: what it asks for, and what it refuses."""

from typing import Any

import pytest
import torch
from verl.workers.rollout.base import get_rollout_class

from rollout_client.trainer import UpdateFailed
from rollout_client.verl import rollout as bridge
from tests.verl.kit import model_config, rollout_config

POD = {"data": "http://127.0.0.1:1", "admin": "http://127.0.0.1:2", "run_dir": "/run/a"}


class FakeAdapter:
    """Remembers what it is asked; reads ``stops_at`` tensors of an update, then fails."""

    def __init__(self, target: Any, **settings: Any) -> None:
        self.target, self.settings = target, settings
        self.asked: list[tuple[Any, ...]] = []
        self.stops_at: int | None = None

    async def resume(self, tags):
        self.asked.append(("resume", tuple(tags)))

    async def release(self, level):
        self.asked.append(("release", level))

    async def update_weights(self, weights, *, global_steps, version):
        names = []
        for name, tensor in weights:
            if len(names) == self.stops_at:
                raise UpdateFailed("rejected")
            names.append((name, self.settings["cast"](name, tensor.dtype)))
        self.asked.append(("update", version, global_steps, names))
        return {}

    async def aclose(self):
        self.asked.append(("close",))


@pytest.fixture
def made(monkeypatch):
    adapters: list[FakeAdapter] = []

    def make(target, **settings):
        adapters.append(FakeAdapter(target, **settings))
        return adapters[-1]

    monkeypatch.setattr(bridge, "ServerAdapter", make)
    return adapters


def rollout(monkeypatch, *, rank: int = 0, **changes: Any):
    monkeypatch.setenv("RANK", str(rank))
    changes.setdefault("mine", {"pods": [POD, POD | {"run_dir": "/run/b"}]})
    kind = get_rollout_class("rollout_replica", "async")
    return kind(config=rollout_config(**changes), model_config=model_config(), device_mesh=None)


class Gathered:
    """A generator of verl's that says how far it was read."""

    def __init__(self, count: int = 3) -> None:
        self.read = 0
        self._count = count

    def __iter__(self):
        for i in range(self._count):
            self.read += 1
            yield f"t{i}", torch.zeros(2)


async def test_it_asks_the_replica_of_its_rank(monkeypatch, made):
    it = rollout(monkeypatch, rank=1)
    assert (it.replica_rank, it.is_leader_rank) == (1, True)
    await it.resume(["weights"])
    await it.update_weights(Gathered(), global_steps=7)
    await it.resume(["kv_cache"])
    await it.release()
    (adapter,) = made
    assert str(adapter.target.run_dir) == "/run/b"
    names = [(f"t{i}", torch.float32) for i in range(3)]
    assert adapter.asked == [
        ("resume", ("weights",)),
        ("update", "step-7", 7, names),
        ("resume", ("kv_cache",)),
        ("release", 2),
    ]
    await it.aclose()
    await it.aclose()
    assert adapter.asked[4:] == [("close",)]


async def test_a_version_without_a_step_has_a_name_of_its_own(monkeypatch, made):
    it = rollout(monkeypatch)
    await it.update_weights(Gathered())
    await it.update_weights(Gathered())
    first, second = (asked[1] for asked in made[0].asked)
    assert first != second
    assert made[0].asked[0][2] is None


async def test_verl_may_set_the_sleep_level(monkeypatch, made):
    it = rollout(monkeypatch)
    it.sleep_level = 1
    await it.release()
    assert made[0].asked == [("release", 1)]


@pytest.mark.parametrize("wire_format", ["delta_flush", "sparse", ""])
async def test_a_wire_format_that_cannot_be_sent_is_refused(monkeypatch, made, wire_format):
    weights = Gathered()
    with pytest.raises(ValueError, match=r"wire_format: .* only 'named_tensors'"):
        await rollout(monkeypatch).update_weights(weights, wire_format=wire_format, global_steps=1)
    assert weights.read == 0
    assert not made


async def test_an_adapter_is_refused_with_the_remedy(monkeypatch, made):
    with pytest.raises(ValueError, match=r"peft_config: .*lora\.merge=True"):
        await rollout(monkeypatch).update_weights(
            Gathered(), peft_config={"r": 8}, base_sync_done=True, global_steps=1
        )
    assert not made


async def test_other_ranks_take_part_in_gathering_and_steer_nothing(monkeypatch, made):
    it = rollout(monkeypatch, rank=1, data_parallel_size=2)
    assert (it.replica_rank, it.is_leader_rank) == (0, False)
    weights = Gathered()
    await it.resume(["weights"])
    await it.update_weights(weights, global_steps=1)
    await it.release()
    assert weights.read == 3
    assert not made


async def test_a_failed_update_is_told_after_all_was_read(monkeypatch, made):
    it = rollout(monkeypatch)
    await it.resume(["weights"])
    made[0].stops_at = 1
    weights = Gathered()
    with pytest.raises(UpdateFailed):
        await it.update_weights(weights, global_steps=1)
    assert weights.read == 3  # no other rank waits for this one
    made[0].stops_at = None
    await it.update_weights(Gathered(), global_steps=1)
    assert made[0].asked[-1][:2] == ("update", "step-1")


async def test_memory_that_verl_does_not_manage_is_left_alone(monkeypatch, made):
    it = rollout(monkeypatch, free_cache_engine=False)
    await it.resume(["weights", "kv_cache"])
    await it.release()
    assert not made


async def test_what_is_configured_reaches_the_adapter(monkeypatch, made):
    mine = {
        "pods": [POD], "keep": "copy", "transport": "shared_memory", "control_timeout_s": 9,
        "version": "run7-{step}", "sleep_level": 1,
    }  # fmt: skip
    it = rollout(monkeypatch, mine=mine)
    await it.update_weights(Gathered(), global_steps=3)
    await it.release()
    settings = made[0].settings
    assert settings["manager"] == "verl"
    assert (settings["keep"], settings["transport"]) == ("copy", "shared_memory")
    assert settings["timeout_s"] == 9
    assert [asked[1] for asked in made[0].asked] == ["run7-3", 1]

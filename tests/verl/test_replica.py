"""verl's ``RolloutReplica``: which replica it is, and where its receiver runs. Without Ray."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verl.workers.rollout.replica import get_rollout_replica_class

from rollout_client.trainer import ReplicaTarget
from rollout_client.verl import SettingsError, receivers
from rollout_client.verl.parsing import parse
from rollout_client.verl.replica import PodReplica
from tests.verl.kit import model_config, rollout_config

HERE = ReplicaTarget(name="qwen-1", namespace="rl", run_dir=Path("/run/rollout"))
ELSEWHERE = ReplicaTarget(name="qwen-2", namespace="rl", run_dir=Path("/run/rollout"))


def worker(home: ReplicaTarget | None, node: str = "node-a") -> Any:
    """A handle of an actor that runs there."""

    async def remote(function: Any) -> Any:
        assert function is receivers.look_around
        return home, node

    return SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote))


def replica(**more: Any) -> PodReplica:
    kind = get_rollout_replica_class("rollout_replica")
    return kind(0, rollout_config(**more), model_config(), gpus_per_node=1)


async def test_it_is_the_replica_whose_pod_its_workers_run_in():
    made = replica()
    made.workers = [worker(HERE), worker(HERE, "node-b")]
    assert await made._home() == (HERE, "node-a")
    made.workers = []
    assert await made._home() == (None, None)


async def test_workers_in_pods_of_several_replicas_are_refused():
    made = replica()
    made.workers = [worker(HERE), worker(ELSEWHERE)]
    with pytest.raises(SettingsError, match=r"pods of several replicas .*qwen-1.*qwen-2"):
        await made._home()


def test_wrong_settings_are_told_before_anything_is_made():
    with pytest.raises(SettingsError, match="replica: unknown"):
        replica(mine={"replica": ["a"]})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ({}, "rollout_replica_server_0_0"),
        ({"is_reward_model": True}, "rollout_replica_server_reward_0_0"),
        ({"is_teacher_model": True, "name_suffix": "m"}, "rollout_replica_server_teacher_0_0_m"),
    ],
)
def test_servers_have_names_as_verls_own(kind, name):
    made = PodReplica(0, rollout_config(), model_config(), gpus_per_node=1, **kind)
    assert made._server_name() == name


class Actors:
    """verl's worker class with its arguments, and what was made of it."""

    def __init__(self, started: Any) -> None:
        self.args, self.kwargs = (), {"replica_rank": 1}
        self.options_used: dict[str, Any] = {}
        self.cls = SimpleNamespace(options=self._options)
        self._started = started

    def _options(self, **options: Any) -> Any:
        self.options_used = options
        return SimpleNamespace(remote=lambda **_: self._started)


async def test_a_receiver_starts_where_its_resource_is(monkeypatch):
    monkeypatch.setattr(receivers.ray, "cluster_resources", lambda: {"in-b": 1.0})
    settings = parse({"rollout_replica": {"replicas": ["a", "b"], "receivers": "in-{name}"}})
    started = worker(HERE)
    actors = Actors(started)
    assert await receivers.start_receivers(settings, actors, rank=1) == [started]
    assert actors.options_used["resources"] == {"in-b": 0.001}
    assert actors.options_used["num_gpus"] == 1
    assert actors.options_used["runtime_env"]["env_vars"]["WORLD_SIZE"] == "1"
    with pytest.raises(SettingsError, match=r"resource 'in-a'; start Ray .*'\{\"in-a\": 1\}'"):
        await receivers.start_receivers(settings, actors, rank=0)
    assert await receivers.start_receivers(parse({}), actors, rank=0) == []


async def test_a_receiver_that_does_not_start_is_ended_and_told(monkeypatch):
    killed: list[Any] = []
    monkeypatch.setattr(receivers.ray, "cluster_resources", lambda: {"r-0": 1.0})
    monkeypatch.setattr(receivers.ray, "kill", killed.append)

    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    stuck = SimpleNamespace(__ray_call__=SimpleNamespace(remote=never))
    mine = {"receivers": "r-{rank}", "control_timeout_s": 0.05}
    with pytest.raises(SettingsError, match=r"did not start in 0\.05 s; .*receiver_gpus"):
        await receivers.start_receivers(parse({"rollout_replica": mine}), Actors(stuck), rank=0)
    assert killed == [stuck]

"""What the configuration says, and which replica is verl's nth."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rollout_client.trainer import PodTarget, ReplicaTarget
from rollout_client.verl import Settings, SettingsError
from rollout_client.verl.parsing import parse
from rollout_client.verl.settings import Place, home_of

POD = {"data": "http://a:8000", "admin": "http://a:8001", "run_dir": "/run/a"}
HOME = ReplicaTarget(name="qwen-1", namespace="rl", run_dir=Path("/run/rollout"))


def of(**mine: object) -> Settings:
    return parse({"rollout_replica": mine})


def test_nothing_said_is_all_defaults():
    assert parse(None) == parse({}) == parse({"other": 1}) == of() == Settings()


def test_what_hydra_hands_over_is_read():
    custom = OmegaConf.create({"rollout_replica": {"replicas": ["a", "b"], "deadline_s": 60}})
    assert parse(custom) == Settings(replicas=("a", "b"), deadline_s=60)


def test_replicas_are_found_by_verls_rank():
    settings = of(replicas=["qwen-0", "qwen-1"], namespace="rl")
    assert settings.place(1) == Place(
        data_url="http://qwen-1.rl.svc:8000", target=ReplicaTarget(name="qwen-1", namespace="rl")
    )


def test_a_name_alone_is_of_the_namespace_that_we_run_in():
    place = of(replicas=["qwen-0"]).place(0)
    assert place == Place(data_url="http://qwen-0:8000", target=ReplicaTarget(name="qwen-0"))


def test_a_replica_is_the_one_that_its_workers_run_in():
    place = of().place(7, HOME)
    assert place == Place(
        data_url="http://qwen-1.rl.svc:8000",
        target=ReplicaTarget(name="qwen-1", namespace="rl", run_dir=Path("/run/rollout")),
    )
    assert of(replicas=["qwen-0", "qwen-1"]).place(1, HOME) == place


def test_pods_without_an_operator():
    place = of(pods=[POD]).place(0)
    assert place == Place(
        data_url="http://a:8000",
        target=PodTarget(
            url="http://a:8001", token=Path("/run/a/admin/token"), run_dir=Path("/run/a")
        ),
    )


def test_the_pod_that_a_process_runs_in():
    env = {"ROLLOUT_REPLICA": "qwen-1", "ROLLOUT_NAMESPACE": "rl"}
    assert home_of(env | {"ROLLOUT_RUN_DIR": "/run/rollout"}) == HOME
    assert home_of(env) is None
    assert home_of({}) is None


@pytest.mark.parametrize(
    ("settings", "rank", "home", "told"),
    [
        ({"replicas": ["a"]}, 1, None, "names 1, and verl makes at least 2 replicas"),
        ({"pods": [POD]}, 3, None, "names 1, and verl makes at least 4 replicas"),
        ({}, 0, None, "nothing says which RolloutReplica verl's replica 0 is"),
        ({"replicas": ["qwen-0"]}, 0, HOME, "'qwen-0', but .* run in a pod of 'qwen-1'"),
    ],
)
def test_what_cannot_be_found_is_told_with_the_remedy(settings, rank, home, told):
    with pytest.raises(SettingsError, match=told):
        of(**settings).place(rank, home)


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        ({"replica": ["a"]}, r"rollout_replica\.replica: unknown; known are replicas, namespace"),
        ({"replicas": "a"}, r"\.replicas: must be a list"),
        ({"replicas": []}, r"\.replicas: empty"),
        ({"replicas": ["a", "a"]}, r"\.replicas: names one twice"),
        ({"replicas": ["a", 1]}, r"\.replicas\.1: must be a text, not 1"),
        ({"replicas": ["a"], "pods": [POD]}, "one of `replicas` and `pods`"),
        ({"pods": [{"data": "x"}]}, r"\.pods\.0: must have data, admin and run_dir"),
        ({"pods": [POD | {"admin": ""}]}, r"\.pods\.0\.admin: must be a text"),
        ({"deadline_s": 0}, r"\.deadline_s: must be a positive number, not 0"),
        ({"max_concurrency": True}, r"\.max_concurrency: must be a positive number"),
        ({"max_concurrency": 0.5}, r"\.max_concurrency: must be a whole number"),
        ({"sleep_level": 3}, r"\.sleep_level: one of 1, 2, not 3"),
        ({"sleep_level": True}, r"\.sleep_level: one of 1, 2, not True"),
        ({"keep": "reference"}, r"\.keep: one of nothing, copy"),
        ({"transport": "nccl"}, r"\.transport: one of auto, shared_memory, cuda_ipc"),
        ({"data_url": "http://x:1"}, r"\.data_url: .* must hold \{name\}"),
        ({"version": "step"}, r"\.version: 'step' must hold \{step\}"),
        ({"version": "{step}{x}"}, r"\.version: .* may hold \{step\}"),
        ({"version": "{step"}, r"\.version: '\{step': "),
        ({"receivers": "node-{name}"}, r"\.receivers: .* may hold \{rank\}"),
        ("qwen", "must be a mapping, not 'qwen'"),
    ],
)
def test_a_wrong_field_is_named(mine, told):
    with pytest.raises(SettingsError, match=told):
        parse({"rollout_replica": mine})


def test_versions_are_named_by_step_or_never_twice():
    assert of(version="run7-{step}").version_of(12) == "run7-12"
    assert of().version_of(12) == "step-12"
    first, second = (of().version_of(None) for _ in range(2))
    assert first != second


def test_receivers_are_found_by_name_or_rank():
    assert of().receiver(0) is None
    assert of(replicas=["a", "b"], receivers="in-{name}").receiver(1) == "in-b"
    assert of(receivers="in-{rank}", receiver_gpus=0).receiver(1) == "in-1"

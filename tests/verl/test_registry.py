"""verl finds us by name, in a process that imports nothing of ours."""

import os
import subprocess
import sys

import pytest
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.replica import (
    RolloutReplica,
    RolloutReplicaRegistry,
    get_rollout_replica_class,
)

from tests.verl.kit import trainer_config

FIND = """
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_rollout_class("rollout_replica").__name__, end=" ")
print(get_rollout_replica_class("rollout_replica").__name__)
"""


def test_both_registries_know_the_name():
    rollout = get_rollout_class("rollout_replica", "async")
    replica = RolloutReplicaRegistry.get("rollout_replica")
    assert issubclass(rollout, BaseRollout)
    assert issubclass(replica, RolloutReplica)
    assert get_rollout_replica_class("rollout_replica") is replica
    assert not rollout.__abstractmethods__
    assert not replica.__abstractmethods__


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, True),  # the entry point
        ({"VERL_USE_EXTERNAL_PLUGINS": "rollout-replica"}, True),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, False),
        (
            {
                "VERL_USE_EXTERNAL_PLUGINS": "none",
                "VERL_USE_EXTERNAL_MODULES": "rollout_client.verl",
            },
            True,
        ),
    ],
)
def test_importing_verl_is_enough(env, found):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIND],
        env=os.environ | env, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.stdout.strip() == "PodRollout PodReplica") is found, done.stderr


def test_verls_configuration_can_name_the_module_too():
    config = trainer_config("actor_rollout_ref.model.external_lib=rollout_client.verl")
    assert config.actor_rollout_ref.model.external_lib == "rollout_client.verl"

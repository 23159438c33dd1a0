"""The commands of docs/verl.md name fields that verl's configuration and ours have."""

import importlib.util
import re
import shlex

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass

from rollout_client.trainer import PodTarget, ReplicaTarget
from rollout_client.verl import Settings
from rollout_client.verl.parsing import parse
from rollout_client.verl.settings import WHERE, home_of
from tests.support import docs
from tests.verl.kit import FULLY_ASYNC, PPO, trainer_config


def command(name: str) -> tuple[str, list[str]]:
    """The module that is run, and its overrides."""
    (block,) = docs.blocks("verl.md", f"console {name}")
    python, flag, module, *overrides = shlex.split(block.removeprefix("$ ").replace("\\\n", " "))
    assert (python, flag) == ("python", "-m")
    return module, overrides


def composed(name: str, *more: str) -> DictConfig:
    module, overrides = command(name)
    assert importlib.util.find_spec(module) is not None
    of = FULLY_ASYNC if "fully_async" in module else PPO
    return trainer_config(*overrides, *more, of=of)


def settings_of(name: str) -> Settings:
    config = composed(name)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.name == "rollout_replica"
    return parse(rollout.custom)


def test_fully_asynchronous_training():
    settings = settings_of("fully-async")
    assert [settings.place(rank).data_url for rank in (0, 1)] == [
        "http://qwen-0.rollout.svc:8000",
        "http://qwen-1.rollout.svc:8000",
    ]
    assert settings.receiver(1) == "rollout-qwen-1"
    assert settings.version_of(3) == "run7-3"


def test_training_on_shared_gpus():
    home = home_of(
        {"ROLLOUT_REPLICA": "q", "ROLLOUT_NAMESPACE": "n", "ROLLOUT_RUN_DIR": "/run/rollout"}
    )
    assert isinstance(settings_of("hybrid").place(0, home).target, ReplicaTarget)


def test_pods_without_kubernetes():
    place = settings_of("local").place(0)
    assert place.data_url == "http://127.0.0.1:8000"
    assert isinstance(place.target, PodTarget)


def test_every_setting_is_in_the_table_with_its_default():
    page = (docs.FOLDER / "verl.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page[page.index("## Settings") :], re.M)
    defaults = {name: text.strip("`") for name, text in rows if hasattr(Settings(), name)}
    assert defaults.keys() == vars(Settings()).keys()
    for name, value in vars(Settings()).items():
        if value not in (None, ()):
            assert defaults[name] == (f"{value:g}" if isinstance(value, float) else str(value))
    assert WHERE in page


@pytest.mark.parametrize("name", ["fully-async", "hybrid", "local"])
def test_a_misspelt_override_would_fail(name):
    with pytest.raises(ConfigCompositionException, match="rollout_nam"):
        composed(name, "actor_rollout_ref.rollout_nam=x")

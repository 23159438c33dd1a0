"""verl's configuration objects for the tiny models."""

from pathlib import Path
from typing import Any

import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from verl.workers.config import HFModelConfig, RolloutConfig

from tests.support.engine_kit import checkpoint


def rollout_config(**changes: Any) -> RolloutConfig:
    """As verl reads it for one rank."""
    mine = changes.pop("mine", {})
    return RolloutConfig(
        name="rollout_replica",
        tensor_model_parallel_size=1,
        custom={"rollout_replica": mine},
        dtype="float32",
        **changes,
    )


def model_config() -> HFModelConfig:
    return HFModelConfig(
        path=str(checkpoint("dense", 0)), override_config={"attn_implementation": "eager"}
    )


FULLY_ASYNC = "experimental/fully_async_policy/config", "fully_async_ppo_trainer"
PPO = "trainer/config", "ppo_trainer"


def trainer_config(*overrides: str, of: tuple[str, str] = PPO) -> DictConfig:
    """A configuration of verl's own with these overrides, as its command line takes them."""
    package, (folder, name) = Path(verl.__file__).parent, of
    # theirs names this folder as it lies in a checkout of verl
    found = f"hydra.searchpath=[file://{package / PPO[0]}]"
    with initialize_config_dir(str(package / folder), version_base=None):
        return compose(name, overrides=[*overrides, found])

"""What takes no weight updates, found in vLLM's own configuration. No engine is started."""

import dataclasses
from typing import Any

import pytest

from rollout_pod.engine import arguments
from rollout_pod.engine.reloading import refusal_of
from tests.support.engine_kit import checkpoint, settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

EXPERTS = "--enable-expert-parallel"
FILTER = "--enable-ep-weight-filter"


def config_of(*args: str) -> Any:
    with settings(checkpoint("moe", 0), *args) as given:
        return arguments.parse(given)[0].create_engine_config()


def test_vllm_still_calls_them_so() -> None:
    """One that had another name would be off for us, and an update silently wrong."""
    from vllm.config import ParallelConfig

    fields = {field.name: field.default for field in dataclasses.fields(ParallelConfig)}
    for name in ("enable_eplb", "enable_expert_parallel", "enable_ep_weight_filter"):
        assert fields[name] is False, name


@pytest.mark.parametrize(
    ("args", "is_refused"),
    [((EXPERTS, FILTER), True), ((EXPERTS,), False), ((FILTER,), False), ((), False)],
)
def test_the_filter_of_experts_is_refused_where_it_filters(
    args: tuple[str, ...], is_refused: bool
) -> None:
    message = refusal_of(config_of(*args), is_recorded=True)
    assert (message is not None) == is_refused
    assert not message or f"an engine with {FILTER} takes no weight updates" in message


def test_experts_that_move_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import ParallelConfig
    from vllm.platforms import current_platform

    config = config_of(EXPERTS)
    with monkeypatch.context() as patch:  # vLLM moves experts on GPUs only, and between ranks
        patch.setattr(type(current_platform), "is_cuda_alike", lambda _: True)
        config.parallel_config = ParallelConfig(
            enable_eplb=True, enable_expert_parallel=True, tensor_parallel_size=2
        )
    message = refusal_of(config, is_recorded=True)
    assert message and "an engine with --enable-eplb takes no weight updates" in message

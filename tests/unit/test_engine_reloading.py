"""What cannot be loaded again is refused by name, before anything is sent."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rollout_pod.engine.reloading import refusal, refusal_of, stale_draft

FINE = {
    "load_format": "auto",
    "is_recorded": True,
    "eplb": False,
    "expert_filter": False,
    "lora": False,
    "lora_reloads": True,
}


def test_a_plain_engine_takes_updates():
    assert refusal(**FINE) is None
    assert refusal(**FINE | {"lora": True}) is None
    assert refusal(**FINE | {"lora_reloads": False}) is None


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"eplb": True}, "--enable-eplb"),
        ({"expert_filter": True}, "--enable-ep-weight-filter"),
        ({"lora": True, "lora_reloads": False}, "--enable-lora"),
        ({"is_recorded": False, "load_format": "dummy"}, "--load-format dummy"),
    ],
)
def test_one_that_cannot_says_which_argument_and_what_to_do(what, named):
    message = refusal(**FINE | what)
    assert message is not None
    assert named in message
    assert "use " in message or "start " in message


FILTERED = {"enable_expert_parallel": True, "enable_ep_weight_filter": True}


@pytest.mark.parametrize(
    ("parallel", "is_moe", "is_refused"),
    [
        (FILTERED, True, True),
        (FILTERED, False, False),
        (FILTERED | {"enable_expert_parallel": False}, True, False),
        ({"enable_expert_parallel": True}, True, False),  # a vLLM that has no such argument
    ],
)
def test_the_expert_filter_is_found_where_vllm_filters(monkeypatch, parallel, is_moe, is_refused):
    layers = ModuleType("vllm.lora.layers.base")
    layers.BaseLayerWithLoRA = object
    for name in ("vllm", "vllm.lora", "vllm.lora.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    config = SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(enable_eplb=False, **parallel),
        model_config=SimpleNamespace(is_moe=is_moe),
        lora_config=None,
    )
    message = refusal_of(config, is_recorded=True)
    assert is_refused == (message is not None and "--enable-ep-weight-filter" in message)


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_a_draft_model_that_stays_as_it_was_is_told_of(method):
    config = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
    assert f"the draft model ({method}) keeps" in stale_draft(config)


@pytest.mark.parametrize("method", [None, "ngram", "suffix"])
def test_without_a_draft_model_nothing_is_told(method):
    speculative = method and SimpleNamespace(method=method)
    assert not stale_draft(SimpleNamespace(speculative_config=speculative))

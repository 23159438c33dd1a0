"""What cannot be loaded again is refused by name, before anything is sent."""

from types import SimpleNamespace

import pytest

from rollout_pod.engine.reloading import refusal, stale_draft

FINE = {
    "load_format": "auto",
    "is_recorded": True,
    "eplb": False,
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
        ({"lora": True, "lora_reloads": False}, "--enable-lora"),
        ({"is_recorded": False, "load_format": "dummy"}, "--load-format dummy"),
    ],
)
def test_one_that_cannot_says_which_argument_and_what_to_do(what, named):
    message = refusal(**FINE | what)
    assert message is not None
    assert named in message
    assert "use " in message or "start " in message


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_a_draft_model_that_stays_as_it_was_is_told_of(method):
    config = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
    assert f"the draft model ({method}) keeps" in stale_draft(config)


@pytest.mark.parametrize("method", [None, "ngram", "suffix"])
def test_without_a_draft_model_nothing_is_told(method):
    speculative = method and SimpleNamespace(method=method)
    assert not stale_draft(SimpleNamespace(speculative_config=speculative))

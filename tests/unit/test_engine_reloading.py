"""What cannot be loaded again is refused by name, before anything is sent."""

import pytest

from rollout_pod.engine.reloading import refusal

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

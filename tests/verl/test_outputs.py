"""verl's parameters and outputs against what vLLM's own server of verl makes of them."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from verl.workers.rollout.replica import TokenOutput

from rollout_client.rollout import Rollout
from rollout_client.verl.outputs import Asked, Defaults, output_fields, translate
from rollout_pod.protocol import FinishReason, RoutedExperts, TokenLogProb, WeightVersionSpan

DEFAULTS = Defaults(prompt_length=100, response_length=50)


def asked(params: dict, prompt_len: int = 10, **more) -> Asked:
    return translate(params, prompt_len=prompt_len, defaults=more.pop("defaults", DEFAULTS), **more)


@pytest.mark.parametrize(
    ("params", "prompt_len", "max_model_len", "budget"),
    [
        ({}, 10, None, 50),
        ({}, 120, None, 30),  # what is left of prompt_length + response_length
        ({}, 200, None, 1),
        ({"max_tokens": 7}, 10, None, 7),
        ({"max_new_tokens": 8}, 10, None, 8),
        ({"max_tokens": 7, "max_new_tokens": 8}, 10, None, 7),
        ({"max_tokens": 500}, 10, 64, 54),
        ({"max_tokens": 0}, 10, None, 1),
    ],
)
def test_the_budget(params, prompt_len, max_model_len, budget):
    defaults = Defaults(prompt_length=100, response_length=50, max_model_len=max_model_len)
    found = asked(params, prompt_len, defaults=defaults).sampling_params
    assert found["max_tokens"] == budget
    assert "max_new_tokens" not in found


def test_a_prompt_without_room_behind_it_is_refused():
    defaults = Defaults(prompt_length=100, response_length=50, max_model_len=64)
    with pytest.raises(ValueError, match="64 tokens leave no room in max_model_len 64"):
        asked({}, 64, defaults=defaults)


def test_verls_defaults_and_flags_and_nothing_of_the_callers_is_changed():
    params = {"temperature": 0.5, "logprobs": True, "seed": 3}
    defaults = Defaults(
        prompt_length=1, response_length=9, repetition_penalty=1.1, ignore_eos=True, seed=42
    )
    found = asked(params, 1, defaults=defaults)
    assert found.log_probs
    assert found.sampling_params == {
        "temperature": 0.5, "seed": 3, "repetition_penalty": 1.1, "ignore_eos": True,
        "max_tokens": 9,
    }  # fmt: skip
    assert params == {"temperature": 0.5, "logprobs": True, "seed": 3}
    assert asked({}, 1, defaults=defaults).sampling_params["seed"] == 42
    assert not asked({}).log_probs
    assert "seed" not in asked({}).sampling_params


def test_fields_are_named_only_where_something_is_asked():
    assert asked({}).fields == {}
    experts = Defaults(prompt_length=1, response_length=9, routed_experts=True)
    assert asked({}, 1, defaults=experts, priority=-2).fields == {
        "priority": -2,
        "return_routed_experts": True,
    }


def test_images_travel_without_loss_and_urls_as_they_are():
    image = Image.new("RGB", (3, 2), (1, 2, 3))
    fields = asked({}, images=[image, "https://x/y.png"]).fields
    first, second = fields["multi_modal_data"]["image"]
    assert second == "https://x/y.png"
    raw = base64.b64decode(first.removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(raw)).tobytes() == image.tobytes()
    with pytest.raises(ValueError, match=r"image_data\.1: int is no PIL image"):
        asked({}, images=[image, 5])


def span(version: str, step: int | None, start: int, end: int) -> WeightVersionSpan:
    return WeightVersionSpan(version=version, step=step, start=start, end=end)


def output(rollout: Rollout, **params) -> TokenOutput:
    return TokenOutput(**output_fields(rollout, asked(params)))


def test_a_rollout_over_two_versions():
    rollout = Rollout(
        request_id="r", token_ids=(1, 2, 3), log_probs=(-1.0, -2.0, -3.0),
        weight_versions=(span("step-4", 4, 0, 2), span("step-5", 5, 2, 3)),
        finish_reason=FinishReason.LENGTH,
    )  # fmt: skip
    found = output(rollout, logprobs=True)
    assert (found.token_ids, found.log_probs) == ([1, 2, 3], [-1.0, -2.0, -3.0])
    assert found.stop_reason == "completed"
    extra = found.extra_fields
    assert (extra["global_steps"], extra["min_global_steps"], extra["max_global_steps"]) == (
        4,
        4,
        5,
    )
    assert [s["version"] for s in extra["weight_versions"]] == ["step-4", "step-5"]
    assert output(rollout).log_probs is None


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (FinishReason.STOP, "completed"),
        (FinishReason.LENGTH, "completed"),
        (FinishReason.ABORT, "aborted"),
        (None, "aborted"),
        (FinishReason.REPETITION, "repetition"),
    ],
)
def test_stop_reasons(reason, told):
    assert output(Rollout(request_id="r", finish_reason=reason)).stop_reason == told


def test_nothing_generated_has_no_step():
    extra = output(Rollout(request_id="r")).extra_fields
    assert extra["global_steps"] is extra["min_global_steps"] is extra["max_global_steps"] is None
    base = Rollout(request_id="r", token_ids=(1,), weight_versions=(span("base", None, 0, 1),))
    assert output(base).extra_fields["global_steps"] is None


def entry(*found: tuple[int, float, int]) -> list[TokenLogProb]:
    return [TokenLogProb(token_id=t, log_prob=p, rank=r) for t, p, r in found]


def test_log_probs_of_the_prompt_as_verls_teachers_read_them():
    entries = [
        None,
        entry((7, -9.0, 5), (1, -0.1, 1), (2, -0.2, 2)),
        entry((3, -0.3, 1), (4, -0.4, 2)),
    ]
    rollout = Rollout(request_id="r", prompt_log_probs=entries)
    two = output(rollout, prompt_logprobs=2).extra_fields
    assert two["prompt_ids"] == [[1, 2], [3, 4], [0, 0]]
    assert two["prompt_logprobs"] == [[-0.1, -0.2], [-0.3, -0.4], [0.0, 0.0]]
    own = output(rollout, prompt_logprobs=0).extra_fields
    assert own["prompt_ids"] == [[7], [3], [0]]
    assert own["prompt_logprobs"] == [[-9.0], [-0.3], [0.0]]


def test_routed_experts_are_an_array():
    array = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    data = base64.b64encode(array.tobytes()).decode()
    found = RoutedExperts(shape=array.shape, dtype="uint8", data=data)
    assert (output(Rollout(request_id="r", routed_experts=found)).routed_experts == array).all()

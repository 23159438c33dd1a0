"""What a request may bring besides tokens, on a GPU: adapters, images, and experts told of.

In bfloat16 the same is not always computed in the same order: ``agreed`` says what may differ.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout_pod.protocol import GenerateResponse, RoutedExperts
from tests.support.engine_kit import LORA_RANK, adapter, merged, prompts
from tests.support.gpu_kit import ENGINE_ARGS, PROMPT, agreed, make_versions
from tests.support.images import data_url, png
from tests.support.process import GREEDY, ServeProcess, serve_process
from tests.support.tiny_vision import END, IMAGE, START, make_vision

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(250)]

LEN = 32


def ask(
    pod: ServeProcess, prompt: list[int], max_tokens: int = LEN, **more: object
) -> GenerateResponse:
    """Greedy, with what ``agreed`` needs."""
    sampling = GREEDY | {"max_tokens": max_tokens, "logprobs": 2}
    answer = pod.generate(prompt, max_tokens, sampling_params=sampling, **more)
    assert len(answer.token_ids) == len(answer.log_probs)
    return answer


# --- adapters ---


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_versions(tmp_path_factory.mktemp("lora"), "dense") / "base"


@pytest.fixture(scope="module")
def of_merged_weights(base: Path) -> np.ndarray:
    with serve_process(merged(base, 1), engine_args=ENGINE_ARGS) as pod:
        pod.start()
        pod.serving("base")
        return log_probs(pod, LONG)


@pytest.fixture(scope="module")
def lora_pod(base: Path, of_merged_weights: object) -> Iterator[ServeProcess]:
    args = (
        *ENGINE_ARGS, "--enable-lora", f"--max-lora-rank={max(8, LORA_RANK)}",
        "--lora-modules", f"one={adapter(base, 1)}",
    )  # fmt: skip
    with serve_process(base, engine_args=args) as pod:
        pod.start()
        pod.serving("base")
        yield pod


def log_probs(pod: ServeProcess, prompt: list[int], **more: object) -> np.ndarray:
    """Of the prompt's own tokens, whatever is sampled after them."""
    sampling = GREEDY | {"max_tokens": 1, "prompt_logprobs": 0}
    answer = pod.generate(prompt, 1, sampling_params=sampling, **more)
    assert answer.prompt_log_probs is not None
    return np.array([entries[0].log_prob for entries in answer.prompt_log_probs if entries])


LONG = [token for prompt in prompts(40) for token in prompt][:400]


def test_an_adapter_is_as_good_as_merged_weights(
    lora_pod: ServeProcess, of_merged_weights: np.ndarray
) -> None:
    """Merged weights are rounded to bfloat16 once more, so not the same to the last bit."""
    adapted = np.abs(log_probs(lora_pod, LONG, lora="one") - of_merged_weights)
    plain = np.abs(log_probs(lora_pod, LONG) - of_merged_weights)
    assert np.median(plain) > 0.1, "the adapter changes nothing: the test shows nothing"
    assert np.median(adapted) < np.median(plain) / 4, (np.median(adapted), np.median(plain))


def test_an_update_reaches_the_base_under_an_adapter_or_is_refused(
    lora_pod: ServeProcess, base: Path, of_merged_weights: np.ndarray
) -> None:
    """vLLM 0.26 does not find the layers that adapters wrap."""
    done = lora_pod.cli("update", "merged", f"--path={merged(base, 1)}", "--timeout=20")
    with lora_pod.ctl() as ctl:
        info = ctl.state().engine
    assert info is not None
    if tuple(int(part) for part in info.version.split(".")[:2]) < (0, 32):
        assert done.returncode == 1
        assert "--enable-lora takes no weight updates" in done.stderr
        assert lora_pod.generate(PROMPT, 4).weight_versions[0].version == "base"
        return
    assert done.returncode == 0, f"{done.stderr}\n{lora_pod.tail()}"
    updated = np.abs(log_probs(lora_pod, LONG) - of_merged_weights)
    assert np.median(updated) < 0.02
    assert lora_pod.cli("update", "base").returncode == 0


# --- images ---


@pytest.fixture(scope="module")
def vision_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    model = tmp_path_factory.mktemp("vision")
    # heads of 64: smaller ones have no kernel everywhere
    make_vision(model, seed=0, hidden=256, tower=256, dtype="bfloat16")
    args = (
        *ENGINE_ARGS, '--limit-mm-per-prompt={"image": 2, "video": 0}',
        "--mm-encoder-attn-backend=TORCH_SDPA",
    )  # fmt: skip
    with serve_process(model, engine_args=args) as pod:
        pod.start()
        pod.serving("base")
        yield pod


def test_a_partial_with_images_goes_on_from_the_original_prompt(vision_pod: ServeProcess) -> None:
    prompt = [5, 6, *[START, IMAGE, END] * 2, 8, 9]
    seen = {"image": [data_url(png()), data_url(png(1, (120, 50)))]}
    other = {"image": [data_url(png(2)), data_url(png(3, (120, 50)))]}
    whole = ask(vision_pod, prompt, multi_modal_data=seen)
    assert agreed(whole, ask(vision_pod, prompt, multi_modal_data=seen)) > 0
    assert agreed(whole, ask(vision_pod, prompt, multi_modal_data=other)) < 1, "it is blind"
    for cut in (1, 9, 17, 25):
        rest = ask(
            vision_pod, prompt, LEN, multi_modal_data=seen,
            generated_token_ids=whole.token_ids[:cut],
        )  # fmt: skip
        assert len(rest.token_ids) == LEN - cut, "the budget is that of the whole rollout"
        assert agreed(whole, rest, start=cut) >= 0

    running = vision_pod.begin(prompt, 1500, multi_modal_data=seen)
    while vision_pod.metric("rollout_unfinished ") < 1:
        time.sleep(0.005)
    assert vision_pod.cli("pause").returncode == 0
    partial = running.result(10)
    assert partial.is_cancel and partial.cancel_reason == "paused"
    assert vision_pod.cli("resume").returncode == 0
    budget = len(partial.token_ids) + 8
    rest = ask(
        vision_pod, prompt, budget, multi_modal_data=seen, generated_token_ids=partial.token_ids
    )
    assert len(rest.token_ids) == 8


# --- experts ---


@pytest.fixture(scope="module")
def expert_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    model = make_versions(tmp_path_factory.mktemp("experts"), "moe") / "base"
    args = (*ENGINE_ARGS, "--enable-return-routed-experts", "--kv-cache-memory-bytes=1073741824")
    with serve_process(model, engine_args=args) as pod:
        pod.start()
        pod.serving("base")
        yield pod


def routes(experts: RoutedExperts | None) -> np.ndarray:
    """``[tokens, layers, experts per token]``, each token's in ascending order."""
    assert experts is not None
    array = np.frombuffer(_raw(experts), dtype=experts.dtype).reshape(experts.shape)
    layers, experts_of_a_token, there_are = 3, 2, 8
    assert array.shape[1:] == (layers, experts_of_a_token)
    assert array.min() >= 0 and array.max() < there_are
    return np.sort(array, axis=-1)


def _raw(experts: RoutedExperts) -> bytes:
    import base64

    return base64.b64decode(experts.data)


def test_experts_are_told_of_across_a_cut(expert_pod: ServeProcess) -> None:
    """Every token that was an input of the model has a row: all but the last one."""
    tell = {"return_routed_experts": True}
    whole = ask(expert_pod, PROMPT, 200, **tell)
    rows = routes(whole.routed_experts)
    assert len(rows) == len(PROMPT) + 200 - 1
    assert len(np.unique(rows.reshape(-1, 2), axis=0)) > 3, "all took the same way"
    assert ask(expert_pod, PROMPT, 4).routed_experts is None

    again = routes(ask(expert_pod, PROMPT, 8, **tell).routed_experts)  # of cached blocks
    assert (again[: len(PROMPT)] == rows[: len(PROMPT)]).mean() > 0.9

    running = expert_pod.begin(PROMPT, 1900, **tell)
    while expert_pod.metric("rollout_unfinished ") < 1:
        time.sleep(0.005)
    time.sleep(0.5)
    assert expert_pod.cli("pause").returncode == 0
    partial = running.result(10)
    assert partial.cancel_reason == "paused" and partial.token_ids
    assert expert_pod.cli("resume").returncode == 0
    had = len(PROMPT) + len(partial.token_ids) - 1
    first = routes(partial.routed_experts)
    assert len(first) == had
    shared = min(had, len(rows))
    same = min(len(whole.token_ids), len(partial.token_ids))
    assert partial.token_ids[:same] == whole.token_ids[:same]
    assert (first[:shared] == rows[:shared]).mean() > 0.9

    rest = ask(
        expert_pod, PROMPT, len(partial.token_ids) + 20,
        generated_token_ids=partial.token_ids, **tell,
    )  # fmt: skip
    joined = routes(rest.routed_experts)
    assert len(rest.token_ids) == 20
    assert len(joined) == had + 20, "of the whole rollout, not of this attempt"
    assert (joined[:had] == first).mean() > 0.9

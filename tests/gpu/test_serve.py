"""``rollout-pod serve`` on a GPU: cut and continued, updated through shared memory, agent killed.

bfloat16, one request at a time: the kernels are then deterministic, so that an updated engine
gives exactly the tokens of one that was started with the checkpoint.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gpu_kit import ENGINE_ARGS, PROMPT, agreed, fresh_tokens_of, make_versions
from tests.support.process import GREEDY, ServeProcess, serve_process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

LONG = 1900


@pytest.fixture(scope="module", params=["dense", "moe"])
def versions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_versions(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def fresh_tokens(versions: Path) -> list[int]:
    return fresh_tokens_of(versions / "step-1")


@pytest.fixture(scope="module")
def pod(versions: Path, fresh_tokens: list[int]) -> Iterator[ServeProcess]:
    with serve_process(versions / "base", engine_args=ENGINE_ARGS) as pod:
        pod.start()
        pod.serving("base")
        yield pod


def test_cut_and_continued_is_uncut(pod: ServeProcess) -> None:
    sampling = GREEDY | {"max_tokens": LONG, "logprobs": 2}
    uncut = pod.generate(PROMPT, LONG, sampling_params=sampling)
    running = pod.begin(PROMPT, LONG)
    while pod.metric("rollout_unfinished ") < 1:
        time.sleep(0.005)
    assert pod.cli("pause").returncode == 0
    partial = running.result(10)
    assert partial.is_cancel and partial.cancel_reason == "paused"
    assert partial.token_ids and len(partial.token_ids) == len(partial.log_probs)
    assert pod.cli("resume").returncode == 0
    n = min(400, len(partial.token_ids))
    assert partial.token_ids[:n] == uncut.token_ids[:n]
    rest = pod.generate(PROMPT, LONG, generated_token_ids=partial.token_ids)
    assert rest.finish_reason == "length"
    assert len(partial.token_ids) + len(rest.token_ids) == LONG, "the budget is the whole rollout's"
    whole = partial.model_copy(
        update={
            "token_ids": partial.token_ids + rest.token_ids,
            "log_probs": partial.log_probs + rest.log_probs,
        }
    )
    # what was cut is computed anew in one go, and rounded differently
    assert agreed(uncut, whole) >= n, "not what it would have said without the cut"


def test_an_updated_engine_is_a_fresh_one(
    pod: ServeProcess, versions: Path, fresh_tokens: list[int]
) -> None:
    before = pod.generate(PROMPT, 64).token_ids
    assert before != fresh_tokens
    done = pod.cli("update", "step-1", f"--path={versions / 'step-1'}")
    assert done.returncode == 0, done.stderr
    assert pod.generate(PROMPT, 64).token_ids == fresh_tokens
    assert pod.cli("update", "base").returncode == 0
    assert pod.generate(PROMPT, 64).token_ids == before


def test_a_cache_that_is_warm_with_old_weights_is_not_used(
    pod: ServeProcess, versions: Path, fresh_tokens: list[int]
) -> None:
    pod.generate(PROMPT, 64)
    assert pod.generate(PROMPT, 64).num_cached_tokens > 0, "the cache is not warm"
    running = pod.begin(PROMPT, LONG)
    while pod.metric("rollout_unfinished ") < 1:
        time.sleep(0.005)
    done = pod.cli("update", "step-1", f"--path={versions / 'step-1'}")
    assert done.returncode == 0, done.stderr
    assert running.result(10).cancel_reason == "updating"
    answer = pod.generate(PROMPT, 64)
    assert answer.num_cached_tokens == 0
    assert answer.token_ids == fresh_tokens
    assert pod.generate(PROMPT, 64).num_cached_tokens > 0
    assert pod.cli("update", "base").returncode == 0


def test_keep_goes_on_under_the_new_weights(pod: ServeProcess, versions: Path) -> None:
    """What it had is computed anew: its next tokens are those of the new version after them."""
    uncut = pod.generate(PROMPT, 400)
    pod.interrupt("keep")
    running = pod.begin(PROMPT, LONG)
    while pod.metric("rollout_unfinished ") < 1:
        time.sleep(0.005)
    time.sleep(0.2)
    done = pod.cli("update", "step-1", f"--path={versions / 'step-1'}")
    assert done.returncode == 0, done.stderr
    answer = running.result(60)
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", LONG)
    old, new = answer.weight_versions
    assert (old.version, new.version) == ("base", "step-1")
    n = min(400, old.end)
    assert answer.token_ids[:n] == uncut.token_ids[:n]
    after = slice(new.start, new.start + 64)
    part = answer.model_copy(
        update={"token_ids": answer.token_ids[after], "log_probs": answer.log_probs[after]}
    )
    sampling = GREEDY | {"max_tokens": 64, "logprobs": 2}
    history = PROMPT + answer.token_ids[: new.start]
    whole = pod.generate(history, 64, sampling_params=sampling)
    assert agreed(whole, part) > 8, "not what the new version says after it"
    pod.interrupt("abort")
    assert pod.cli("update", "base").returncode == 0


def test_the_agent_killed_in_a_transfer(
    pod: ServeProcess, versions: Path, fresh_tokens: list[int]
) -> None:
    agent = pod.child("rollout_pod", "weights")
    source = {"version": "step-1", "source": {"path": str(versions / "step-1")}}
    with pod.ctl() as ctl:
        ctl.change(
            lambda d: type(d).model_validate(
                d.model_dump() | {"weights": source, "bucket_bytes": 4096}
            )
        )
    pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"), timeout_s=20)
    agent.kill()
    state = pod.serving("step-1", timeout_s=60)
    assert state.update and state.update.attempt >= 2
    assert pod.generate(PROMPT, 64).token_ids == fresh_tokens

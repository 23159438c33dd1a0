"""``rollout-pod serve`` and ``ctl`` as a person on a laptop runs them: nothing is fake."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from examples.tiny_models import make
from tests.support.engine_kit import BASE_ARGS, checkpoint, prompts, reference
from tests.support.process import ServeProcess, command_of, serve_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LONG = 1900


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """step-1 and step-2, large enough that a transfer in tiny buckets takes a while."""
    folder = tmp_path_factory.mktemp("versions")
    for seed in (1, 2):
        make(folder / f"step-{seed}", kind="dense", seed=seed, hidden=256, layers=4, vocab=4096)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base"
    make(path, kind="dense", seed=0, hidden=256, layers=4, vocab=4096)
    return path


one_process = pytest.mark.parametrize("pod", ["one process"], indirect=True)
"""For what is no other with several."""


@pytest.fixture(scope="module", params=["one process", "two front ends"])
def pod(request: pytest.FixtureRequest, base: Path, versions: Path) -> Iterator[ServeProcess]:
    args = BASE_ARGS if request.param == "one process" else (*BASE_ARGS, "--api-server-count=2")
    with serve_process(base, f"--source={versions}/{{version}}", engine_args=args) as pod:
        pod.start()
        pod.serving("base")
        yield pod


def test_pause_resume_update_from_the_command_line(
    pod: ServeProcess, base: Path, versions: Path
) -> None:
    asked = prompts(4)
    uncut = pod.generate(asked[0], 300)
    running = [pod.begin(p, LONG) for p in asked]
    while pod.metric("rollout_unfinished ") < len(asked):
        time.sleep(0.01)
    paused = pod.cli("pause")
    assert paused.returncode == 0, paused.stderr
    assert json.loads(paused.stdout)["phase"] == "Paused"
    partials = [future.result(10) for future in running]
    assert all(p.is_cancel and p.cancel_reason == "paused" for p in partials)
    assert any(p.token_ids for p in partials)
    assert pod.cli("resume").returncode == 0
    for prompt, partial in zip(asked, partials, strict=True):
        budget = len(partial.token_ids) + 40
        rest = pod.generate(prompt, budget, generated_token_ids=partial.token_ids)
        whole = partial.model_copy(
            update={
                "token_ids": partial.token_ids + rest.token_ids,
                "log_probs": partial.log_probs + rest.log_probs,
            }
        )
        assert len(whole.token_ids) == budget
        assert pod.is_greedy(base, prompt, whole)
    n = min(300, len(partials[0].token_ids))
    assert partials[0].token_ids[:n] == uncut.token_ids[:n], "cut and uncut differ"

    updated = pod.cli("update", "step-1")
    assert updated.returncode == 0, updated.stderr
    answer = pod.generate(asked[0], 60)
    assert [s.version for s in answer.weight_versions] == ["step-1"]
    assert pod.is_greedy(versions / "step-1", asked[0], answer)
    bad = pod.cli("update", "step-404", "--timeout=3")
    assert bad.returncode == 1
    assert "step-404" in bad.stderr and "Traceback" not in bad.stderr
    assert pod.generate(asked[0], 60).token_ids == answer.token_ids
    assert pod.cli("update", "base").returncode == 0
    assert pod.is_greedy(base, asked[0], pod.generate(asked[0], 60))


def test_keep_goes_on_under_the_new_weights(pod: ServeProcess, base: Path, versions: Path) -> None:
    """Exactly what each version would have sampled: the KV cache of the old one is computed anew."""
    assert pod.cli("update", "base").returncode == 0
    pod.interrupt("keep")
    asked = prompts(4, seed=2)
    running = [pod.begin(p, LONG) for p in asked]
    while pod.metric("rollout_unfinished ") < len(asked):
        time.sleep(0.01)
    time.sleep(0.3)
    assert pod.cli("pause").returncode == 0
    assert pod.metric("rollout_unfinished ") == len(asked)
    assert not any(future.done() for future in running)
    assert pod.cli("resume").returncode == 0
    assert pod.cli("update", "step-1").returncode == 0
    for prompt, future in zip(asked, running, strict=True):
        answer = future.result(60)
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", LONG)
        old, new = answer.weight_versions
        assert (old.version, new.version) == ("base", "step-1")
        history = prompt
        for span, path in ((old, base), (new, versions / "step-1")):
            part = answer.model_copy(
                update={
                    "token_ids": answer.token_ids[span.start : span.end],
                    "log_probs": answer.log_probs[span.start : span.end],
                }
            )
            assert pod.is_greedy(path, history, part)
            history = history + part.token_ids
    pod.interrupt("drain", timeout_s=60)
    running = [pod.begin(prompts(1)[0], 300)]
    while pod.metric("rollout_unfinished ") < 1:
        time.sleep(0.01)
    assert pod.cli("update", "base").returncode == 0
    assert running[0].result(30).finish_reason == "length"
    pod.interrupt("abort")


def test_streams(pod: ServeProcess, versions: Path) -> None:
    assert pod.cli("update", "step-1").returncode == 0
    prompt = prompts(1)[0]
    whole = pod.generate(prompt, 200)
    tokens: list[int] = []
    deltas, end = 0, {}
    with pod.stream(prompt, 200) as events:
        for name, data in events:
            if name == "delta":
                deltas += 1
                tokens += data["token_ids"]
                assert len(data["token_ids"]) == len(data["log_probs"])
                assert data["version"] == "step-1"
            else:
                end = {"event": name} | data
    assert deltas > 1
    assert tokens == whole.token_ids
    assert (end["event"], end["num_tokens"], end["finish_reason"]) == ("end", 200, "length")

    with pod.stream(prompt, LONG) as events:
        assert next(events)[0] == "delta"
    deadline = time.monotonic() + 10
    while pod.metric("rollout_unfinished "):  # the reader has gone: so does its request
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pod.stream(prompt, LONG, request_id="cut-me") as events:
        assert next(events)[0] == "delta"
        assert pod.delete("cut-me").cancel_reason == "cancelled"
        *_, (name, data) = events
        assert (name, data["cancel_reason"]) == ("end", "cancelled")


@one_process
def test_top_log_probs(pod: ServeProcess, versions: Path) -> None:
    assert pod.cli("update", "step-1").returncode == 0
    prompt = prompts(1)[0]
    sampling = {"temperature": 0.7, "seed": 3, "max_tokens": 30, "logprobs": 4}
    answer = pod.generate(prompt, 30, sampling_params=sampling)
    assert answer.top_log_probs is not None
    logits = reference(versions / "step-1").logits(prompt, tuple(answer.token_ids)) / 0.7
    expected = logits.log_softmax(-1)
    for i, (token, value, top) in enumerate(
        zip(answer.token_ids, answer.log_probs, answer.top_log_probs, strict=True)
    ):
        values, ids = expected[i].topk(4)
        assert [t.rank for t in top] == [1, 2, 3, 4]
        assert [t.token_id for t in top] == ids.tolist()
        assert [t.log_prob for t in top] == pytest.approx(values.tolist(), abs=1e-3)
        assert value == pytest.approx(expected[i, token].item(), abs=1e-3)


@one_process
@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "truncated"])
def test_a_broken_source_loads_nothing(
    pod: ServeProcess, base: Path, versions: Path, tmp_path: Path, fault: str
) -> None:
    broken = tmp_path / "broken"
    make(broken, kind="dense", seed=5, hidden=256, layers=4, vocab=4096)
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        tensors["model.layers.9.mlp.down_proj.weight"] = tensors[name].clone()
    elif fault == "shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, file)
    if fault == "truncated":
        with file.open("r+b") as f:
            f.truncate(file.stat().st_size - 4096)
    assert pod.cli("update", "step-2").returncode == 0
    before = pod.generate(prompts(1)[0], 40)
    refused = pod.cli("update", f"broken-{fault}", f"--path={broken}", "--timeout=2")
    assert refused.returncode == 1
    assert (file.name if fault == "truncated" else "down_proj") in refused.stderr
    state = pod.until(lambda s: bool(s.update and s.update.phase == "Waiting"), timeout_s=10)
    assert (state.phase, state.ready, state.weight_version) == ("Serving", True, "step-2")
    after = pod.generate(prompts(1)[0], 40)
    assert after.token_ids == before.token_ids
    assert pod.is_greedy(versions / "step-2", prompts(1)[0], after)


def test_sleep_wake_and_clear_caches_from_the_command_line(
    pod: ServeProcess, base: Path, versions: Path
) -> None:
    """What vLLM does on CPU: it rests, and releases nothing. All else is as on a GPU."""
    assert pod.cli("update", "step-1").returncode == 0
    prompt, *asked = prompts(4, length=200)
    before = pod.generate(prompt, 60)
    assert pod.generate(prompt, 60).num_cached_tokens > 0
    cleared = pod.cli("clear-caches")
    assert json.loads(cleared.stdout)["cleared"] == ["prefix", "multimodal", "encoder"]
    assert pod.generate(prompt, 60).num_cached_tokens == 0
    running = [pod.begin(p, 1500) for p in asked]
    while pod.metric("rollout_unfinished ") < len(asked):
        time.sleep(0.01)
    in_use = pod.cli("clear-caches", "--timeout=0")
    assert in_use.returncode == 1 and "Caches in use" in in_use.stderr

    slept = pod.cli("sleep")
    assert slept.returncode == 0, slept.stderr
    state = json.loads(slept.stdout)
    assert (state["phase"], state["ready"], state["weight_version"]) == (
        "Sleeping",
        False,
        "step-1",
    )
    assert state["sleep"]["tags"] == ["weights", "kv_cache"] == state["resident"]
    assert not state["sleep"]["released"] and "CPU" in state["sleep"]["message"]
    assert all(future.result(10).cancel_reason == "sleeping" for future in running)
    assert (pod.get("/readyz"), pod.get("/healthz")) == (503, 200)
    refused = pod.cli("clear-caches")
    assert refused.returncode == 1 and "Asleep" in refused.stderr
    assert pod.cli("wake").returncode == 0
    pod.serving("step-1")
    after = pod.generate(prompt, 60)
    assert (after.token_ids, after.num_cached_tokens) == (before.token_ids, 0)

    assert pod.cli("sleep", "--level=2").returncode == 0
    assert json.loads(pod.cli("state").stdout)["weight_version"] is None
    late = pod.cli("update", "step-2", "--timeout=3")  # it waits for the wake, and says so
    assert late.returncode == 1 and "waits until the weights wake" in late.stderr
    woken = pod.cli("wake", "--tag=weights")
    assert woken.returncode == 0, woken.stderr
    done = pod.cli("update", "step-2")
    assert json.loads(done.stdout)["phase"] == "Sleeping"
    assert pod.get("/readyz") == 200
    assert pod.cli("wake").returncode == 0
    pod.serving("step-2")
    assert pod.is_greedy(versions / "step-2", prompt, pod.generate(prompt, 60))
    pod.cli("update", "base")
    assert pod.cli("sleep", "--level=2").returncode == 0
    assert pod.cli("wake").returncode == 0
    pod.serving("base")  # loaded again, from the model's own folder
    assert pod.is_greedy(base, prompt, pod.generate(prompt, 60))


@pytest.mark.parametrize("victim", ["agent", "worker_is_paused_then_agent"])
def test_the_agent_is_killed_in_the_middle_of_a_transfer(
    pod: ServeProcess, versions: Path, victim: str
) -> None:
    assert pod.cli("update", "step-1").returncode == 0
    agent = pod.child("rollout_pod", "weights")
    with pod.ctl() as ctl:
        ctl.change(
            lambda d: d.model_copy(
                update={
                    "bucket_bytes": 4096,
                    "weights": d.weights.model_copy(
                        update={
                            "version": "step-2",
                            "source": d.weights.source.model_copy(
                                update={"path": str(versions / "step-2")}
                            ),
                        }
                    ),
                }
            )
        )
    pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"), timeout_s=20)
    if victim != "agent":
        agent.suspend()  # hung first: nothing may wait for it for ever
        time.sleep(0.5)
    agent.kill()
    poisoned = pod.until(lambda s: s.last_error is not None, timeout_s=20)
    assert poisoned.weight_version != "step-2" or poisoned.update.attempt > 1
    state = pod.serving("step-2", timeout_s=60)
    assert state.update.attempt >= 2
    assert pod.is_greedy(versions / "step-2", prompts(1)[0], pod.generate(prompts(1)[0], 60))
    with pod.ctl() as ctl:
        ctl.change(lambda d: d.model_copy(update={"bucket_bytes": 1 << 20}))


def test_a_killed_container_comes_back_by_itself(base: Path, versions: Path) -> None:
    """Not ready until the version it had is committed again; nobody tells it."""
    with serve_process(base, f"--source={versions}/{{version}}", "--keep-state") as pod:
        pod.start()
        pod.serving("base")
        assert pod.cli("update", "step-1").returncode == 0
        pod.kill()
        pod.start()
        seen = set()

        def converged(state: object) -> bool:
            seen.add((state.phase, state.ready, state.weight_version))
            return state.phase == "Serving"

        pod.until(converged)
        assert all(version == "step-1" for _, ready, version in seen if ready)
        assert not any(version == "base" for _, _, version in seen)
        assert pod.get("/readyz") == 200
        assert pod.is_greedy(versions / "step-1", prompts(1)[0], pod.generate(prompts(1)[0], 60))

        # asleep, the engine's own process dies: the container ends, with its last words
        assert pod.cli("sleep").returncode == 0
        pod.child("EngineCore").kill()
        assert pod.process.wait(30) == 1
        pod.start()
        state = pod.until(lambda s: s.phase == "Sleeping")  # as the document says
        assert not state.ready
        assert pod.cli("wake").returncode == 0
        pod.serving("step-1")
        running = pod.begin(prompts(1)[0], LONG)
        while pod.metric("rollout_unfinished ") < 1:
            time.sleep(0.01)
        assert pod.stop() == 0
        answer = running.result(10)
        assert answer.finish_reason in ("length", "abort")


def test_sigterm_cuts_what_outlasts_the_drain(base: Path) -> None:
    with serve_process(base, "--drain-timeout=0.3") as pod:
        pod.start()
        pod.serving("base")
        running = pod.begin(prompts(1)[0], LONG)
        while pod.metric("rollout_unfinished ") < 1:
            time.sleep(0.01)
        assert pod.stop() == 0
        answer = running.result(10)
        assert (answer.is_cancel, answer.cancel_reason) == (True, "draining")
        assert pod.is_greedy(base, prompts(1)[0], answer)


@pytest.mark.parametrize(
    "victim", ["a front end", "one that hangs", "the engine", "the steering process"]
)
def test_no_front_end_outlives_the_others(base: Path, victim: str) -> None:
    args = (*BASE_ARGS, "--api-server-count=2")
    with serve_process(base, "--heartbeat-timeout=5", engine_args=args) as pod:
        pod.start()
        pod.serving("base")
        assert pod.process
        family = psutil.Process(pod.process.pid).children(recursive=True)
        running = [pod.begin(prompt, LONG) for prompt in prompts(8)]
        while pod.metric("rollout_unfinished ") < 8:
            time.sleep(0.01)
        if victim == "a front end":
            next(p for p in family if "front-end" in command_of(p)).kill()
            assert pod.process.wait(30) == 1
            assert "front end 1 ended" in pod.tail() or "front end 2 ended" in pod.tail()
        elif victim == "the engine":
            pod.child("EngineCore").kill()
            assert pod.process.wait(30) == 1
            assert "EngineCore" in pod.log.read_text()
        elif victim == "one that hangs":
            next(p for p in family if "front-end" in command_of(p)).suspend()
            assert pod.process.wait(40) == 1
            assert "no answer for 5 s, its loop hangs" in pod.log.read_text()
        else:
            pod.process.kill()
            pod.process.wait(10)
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive, alive
        wait(running, timeout=20)
        assert all(future.done() for future in running), "a caller is left waiting"


def test_a_hung_engine_ends_the_container(base: Path) -> None:
    with serve_process(base, "--heartbeat-timeout=2") as pod:
        pod.start()
        pod.serving("base")
        pod.child("EngineCore").suspend()
        assert pod.process.wait(30) == 1
        assert "its loop hangs" in pod.tail()


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with serve_process(tmp_path / "no-such-model") as pod:
        pod.start()
        assert pod.process.wait(60) == 1
        assert "no-such-model" in pod.tail()
    with serve_process(checkpoint("dense", 0), engine_args=("--no-such-argument",)) as pod:
        pod.start()
        assert pod.process.wait(60) == 1
        assert "--no-such-argument" in pod.tail()

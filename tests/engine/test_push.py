"""A trainer pushes to ``rollout-pod serve`` with the real engine, by shared memory."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from examples.tiny_models import Kind, make
from rollout_pod.protocol import DesiredDocument, WeightsRef, WeightsSource
from rollout_pod.weights.push_errors import PushRefused
from rollout_pod.weights.pusher import Pusher
from tests.support.engine_kit import BASE_ARGS, prompts, tensors_of
from tests.support.process import ServeProcess, serve_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]

KINDS: tuple[Kind, ...] = ("dense", "tied", "moe")
PUSH = WeightsSource.model_validate({"push": {}})
BUCKET = 65536
"""Small: a version takes many."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    for kind in KINDS:
        for seed in range(3):
            make(folder / kind / f"step-{seed}", kind=kind, seed=seed)
    return folder


def want(pod: ServeProcess, version: str, source: WeightsSource = PUSH, **changes: object) -> None:
    weights = WeightsRef(version=version, source=source)
    more = {"weights": weights.model_dump(), "bucket_bytes": BUCKET, **changes}
    with pod.ctl() as ctl:
        ctl.change(lambda d: DesiredDocument.model_validate(d.model_dump() | more))


@contextmanager
def trainer_process(
    pod: ServeProcess, version: str, checkpoint: Path, stop_at: int = -1
) -> Iterator["subprocess.Popen[str]"]:
    command = [
        sys.executable, "-m", "tests.support.engine_trainer", str(pod.run_dir), version,
        str(checkpoint), str(stop_at),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def says(pod: ServeProcess) -> list[tuple[list[int], list[float]]]:
    answers = [pod.generate(prompt, 40) for prompt in prompts(3)]
    return [(answer.token_ids, answer.log_probs) for answer in answers]


def serves(pod: ServeProcess, checkpoint: Path) -> bool:
    """Every token is what a model that was loaded from there says."""
    return all(pod.is_greedy(checkpoint, p, pod.generate(p, 40)) for p in prompts(3))


@pytest.fixture(scope="module")
def pod(versions: Path) -> Iterator[ServeProcess]:
    with serve_process(versions / "dense" / "step-0") as made:
        made.start()
        made.serving("base")
        yield made


@pytest.fixture
def pusher(pod: ServeProcess) -> Iterator[Pusher]:
    with Pusher(pod.run_dir) as made:
        yield made


def test_what_does_not_fit_interrupts_nobody(
    pod: ServeProcess, pusher: Pusher, versions: Path
) -> None:
    folder = versions / "dense"
    pod.serving("base")
    want(pod, "step-1")
    wrong = tensors_of(folder / "step-1")
    name = next(n for n in wrong if n.endswith("norm.weight"))
    wrong[name] = wrong[name][:-1].clone()
    with pytest.raises(PushRefused, match=name):
        pusher.push("step-1", wrong, timeout_s=30)
    assert pod.metric("rollout_gate_open ") == 1
    assert serves(pod, folder / "step-0")
    shown = pod.cli("update", "step-1", "--push", "--timeout=1")
    assert shown.returncode == 1, shown.stdout
    assert "A trainer has to push step-1" in shown.stderr


def test_killed_in_the_middle_and_another_takes_over(pod: ServeProcess, versions: Path) -> None:
    folder = versions / "dense"
    count = len(tensors_of(folder / "step-1"))
    # before the first byte: the old version serves on
    want(pod, "step-1", max_attempts=9)
    with trainer_process(pod, "step-1", folder / "step-1", 0) as trainer:
        assert trainer.stdout and trainer.stdout.readline() == "stopped\n"
        pod.until(lambda s: s.phase == "Updating", timeout_s=30)
        trainer.kill()
        state = pod.until(lambda s: s.phase == "Serving" and s.needs == "step-1")
    assert state.weight_version == "base" and serves(pod, folder / "step-0")

    # in the middle: nothing is served, and the agent brings back what it can
    with trainer_process(pod, "step-1", folder / "step-1", count - 1) as trainer:
        assert trainer.stdout and trainer.stdout.readline() == "stopped\n"
        pod.until(lambda s: s.phase == "Updating", timeout_s=30)
        trainer.kill()
        pod.until(lambda s: not s.ready, timeout_s=30)
        state = pod.serving("base")
    assert state.needs == "step-1" and serves(pod, folder / "step-0")

    with trainer_process(pod, "step-1", folder / "step-1") as trainer:
        assert trainer.stdout and json.loads(trainer.stdout.readline())["version"] == "step-1"
    pod.serving("step-1")
    assert serves(pod, folder / "step-1")

    # with nothing that the agent could bring it stays poisoned until somebody pushes
    want(pod, "step-2", max_attempts=9)
    with trainer_process(pod, "step-2", folder / "step-2", count - 1) as trainer:
        assert trainer.stdout and trainer.stdout.readline() == "stopped\n"
        pod.until(lambda s: s.phase == "Updating", timeout_s=30)
        trainer.kill()
    state = pod.until(lambda s: s.phase == "Poisoned" and s.needs == "step-2", timeout_s=30)
    assert not state.ready and pod.get("/readyz") == 503
    with trainer_process(pod, "step-2", folder / "step-2") as trainer:
        assert trainer.stdout and json.loads(trainer.stdout.readline())["version"] == "step-2"
    pod.serving("step-2")
    assert serves(pod, folder / "step-2")


def test_after_level_2_a_push_has_to_write_every_byte(
    pod: ServeProcess, pusher: Pusher, versions: Path
) -> None:
    folder = versions / "dense"
    for version in ("again-1", "again-2"):
        want(pod, version)
        pusher.push(version, tensors_of(folder / "step-1"))
    assert pod.serving("again-2").ranks[0].path == "mixed"
    want(pod, "step-2", sleep={"level": 2})
    state = pod.until(lambda s: s.phase == "Sleeping" and s.weight_version is None)
    assert state.needs is None
    want(pod, "step-2", sleep={"level": 2, "tags": ["kv_cache"]})
    done = pusher.push("step-2", tensors_of(folder / "step-2"))
    rank = done.state.ranks[0]
    assert rank.path == "reference" and "every byte" in rank.note
    want(pod, "step-2", sleep=None)
    pod.serving("step-2")
    assert serves(pod, folder / "step-2")


@pytest.mark.parametrize("kind", KINDS)
def test_pushed_is_freshly_loaded(
    kind: Kind, versions: Path, request: pytest.FixtureRequest
) -> None:
    """The first push goes by vLLM's loaders, the second by the copies seen then, where it can."""
    folder = versions / kind
    if kind == "dense":
        check_pushed(request.getfixturevalue("pod"), folder)
        pushed = says(request.getfixturevalue("pod"))
        with serve_process(folder / "step-2") as fresh:
            fresh.start()
            fresh.serving("base")
            assert says(fresh) == pushed, "to the last bit of the log-probs"
        return
    with serve_process(folder / "step-0") as pod:
        pod.start()
        pod.serving("base")
        check_pushed(pod, folder)


def check_pushed(pod: ServeProcess, folder: Path) -> None:
    says(pod)  # warms the prefix cache with other weights
    with Pusher(pod.run_dir) as pusher:
        for seed in (1, 2):
            want(pod, f"pushed-{seed}")
            done = pusher.push(f"pushed-{seed}", tensors_of(folder / f"step-{seed}"))
            assert done.sent and done.state.weight_version == f"pushed-{seed}"
        state = pod.serving("pushed-2")
        assert serves(pod, folder / "step-2")
    update = state.update
    assert update and (update.transport, update.mode) == ("shared_memory", "bucketed")
    assert update.seconds.transfer and update.seconds.paused
    assert {"first", "load", "finish"} <= update.steps.keys()
    assert update.bytes == sum(t.nbytes for t in tensors_of(folder / "step-2").values())
    assert state.ranks[0].path == "mixed" and state.ranks[0].note, "vLLM packs layers on CPU"


def test_a_restarted_container_needs_what_it_held(versions: Path) -> None:
    folder = versions / "dense"
    options = ("--agent=external",)
    with serve_process(folder / "step-0", *options) as pod, Pusher(pod.run_dir) as pusher:
        first = pod.run_dir / "first.json"
        document = DesiredDocument(owner="local", generation=0)
        first.write_text(document.model_dump_json())
        pod.start(f"--desired-file={first}")
        pod.serving("base")
        want(pod, "step-1")
        pusher.push("step-1", tensors_of(folder / "step-1"))
        pod.serving("step-1")
        pod.kill()
        pod.start(f"--desired-file={first}")
        state = pod.until(lambda s: s.needs == "step-1")
        assert (state.ready, state.weight_version) == (False, None)
        done = pusher.push("step-1", tensors_of(folder / "step-1"), timeout_s=60)
        assert done.sent is not None
        pod.serving("step-1")
        assert serves(pod, folder / "step-1")


def test_pushes_under_load_lose_no_token_and_leave_nothing(versions: Path) -> None:
    """Fifty of them; every partial and its continuation are what the named versions sample."""
    folder = versions / "dense"
    held = {n: tensors_of(folder / f"step-{n}") for n in (1, 2)}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="push-") as shm,
        # What grows with the requests, not with the pushes, is kept small: the KV cache, whose pages
        # are first touched one by one, and oneDNN's code for each new length of a prompt.
        serve_process(
            folder / "step-0", f"--shm-dir={shm}",
            engine_args=(*BASE_ARGS, f"--kv-cache-memory-bytes={32 << 20}"),
            env=os.environ | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"},
        ) as pod,
        Pusher(pod.run_dir) as pusher,
    ):  # fmt: skip
        pod.start()
        pod.serving("base")
        over = False

        def roll_out(number: int) -> int:
            """Callers that come back with their partials, until the pushes are over."""
            prompt, rounds = prompts(4, seed=7)[number], 0
            while not over:
                answer = pod.generate(prompt, 200, on_pause="wait")
                tokens, log_probs, spans = (
                    answer.token_ids,
                    answer.log_probs,
                    answer.weight_versions,
                )
                whole = 0
                while answer.is_cancel:
                    answer = pod.generate(prompt, 200, generated_token_ids=tokens, on_pause="wait")
                    shift = len(tokens)
                    tokens = tokens + answer.token_ids
                    log_probs = log_probs + answer.log_probs
                    spans = spans + [
                        s.model_copy(update={"start": s.start + shift, "end": s.end + shift})
                        for s in answer.weight_versions
                    ]
                assert len(tokens) == len(log_probs) == 200
                for span in spans:
                    assert span.start == whole, "a gap"
                    whole = span.end
                    part = answer.model_copy(
                        update={
                            "token_ids": tokens[span.start : span.end],
                            "log_probs": log_probs[span.start : span.end],
                        }
                    )
                    of = (
                        "step-0"
                        if span.version == "base"
                        else f"step-{1 + int(span.version[5:]) % 2}"
                    )
                    if rounds % 8 == 0:  # transformers is slow
                        history = prompt + tokens[: span.start]
                        assert pod.is_greedy(folder / of, history, part), span
                assert whole == 200
                rounds += 1
            return rounds

        with ThreadPoolExecutor(4) as pool:
            callers = [pool.submit(roll_out, n) for n in range(4)]
            try:
                for number in range(50):
                    want(pod, f"step-{number}")
                    done = pusher.push(f"step-{number}", held[1 + number % 2], timeout_s=60)
                    assert done.state.weight_version == f"step-{number}"
                    pod.serving(f"step-{number}")
                    if number == 24:  # allocators have found their size
                        base = usage(pod)
                    time.sleep(0.02)
            finally:
                over = True
            assert all(caller.result(60) > 0 for caller in callers)
        fds, memory = usage(pod)
        assert fds <= base[0] + 3, "descriptors"
        assert memory <= base[1] + (64 << 20), "memory"
        pusher.close()
        assert not [name for name in os.listdir(shm) if name.startswith("rollout-push-")]


def usage(pod: ServeProcess) -> tuple[int, int]:
    """Descriptors and private memory of the pod's processes."""
    assert pod.process
    family = [psutil.Process(pod.process.pid)]
    family += family[0].children(recursive=True)
    return (
        sum(p.num_fds() for p in family),
        sum(p.memory_full_info().uss for p in family),
    )

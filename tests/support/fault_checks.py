"""What a pod has to do when the device of its engine faults, on a GPU and played on CPU."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.installed import installed_engines
from tests.support.process import GREEDY, ServeProcess, serve_process

CALLERS = 4
LONG = 1900
IN_FLIGHT_S = 30.0
"""Of which the pod itself needs some two; the rest is the engine's dying process."""
IDLE_S = 35.0
"""The same, after the next heartbeat."""


@contextmanager
def faulty_pod(model: Path, engine_args: Sequence[str]) -> Iterator[ServeProcess]:
    engines = {"faulty": "tests.support.faulty_engine:create"}
    with installed_engines(engines) as env:
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        options = ("--engine=faulty", "--heartbeat-timeout=5")
        with serve_process(model, *options, engine_args=engine_args, env=env) as pod:
            pod.start()
            pod.serving("base")
            yield pod


def callers_are_answered_and_the_pod_ends(pod: ServeProcess, cause: str) -> None:
    """With requests in flight: the next step meets the fault."""
    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [pool.submit(_ask, pod, i) for i in range(CALLERS)]
        while pod.metric("rollout_unfinished ") < CALLERS:
            time.sleep(0.005)
        _fault(pod)
        _ends(pod, IN_FLIGHT_S, cause)
        for call in calls:
            answer = call.result(1)
            assert answer.status_code == 503, answer.text
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["code"] == "not_ready"


def an_idle_pod_finds_out_and_ends(pod: ServeProcess, cause: str) -> None:
    """Nobody asks anything: the heartbeat meets the fault."""
    assert pod.metric("rollout_unfinished ") == 0
    _fault(pod)
    _ends(pod, IDLE_S, cause)


def _ask(pod: ServeProcess, i: int) -> httpx.Response:
    body = {
        "request_id": f"caller-{i}",
        "prompt_token_ids": [5, 6, 7 + i],
        "sampling_params": GREEDY | {"max_tokens": LONG},
    }
    return httpx.post(f"http://{pod.data}/v1/rollout/generate", json=body, timeout=60)


def _fault(pod: ServeProcess) -> None:
    assert pod.process
    assert pod.get("/healthz") == 200
    os.kill(pod.process.pid, signal.SIGUSR1)


def _ends(pod: ServeProcess, within_s: float, cause: str) -> None:
    """The pod says 503 until it is gone, which it is in time, with the cause as its last words."""
    assert pod.process
    deadline = time.monotonic() + within_s
    statuses = [200]
    while pod.process.poll() is None:
        assert time.monotonic() < deadline, f"lives on, {statuses[-1]}\n{pod.tail()}"
        try:
            statuses.append(pod.get("/healthz"))
        except httpx.TransportError:
            time.sleep(0.05)  # it listens no more, or breaks off
        time.sleep(0.002)
    assert sorted(set(statuses)) in ([200], [200, 503]), statuses
    assert statuses == sorted(statuses), "alive again after it was dead"
    assert pod.process.returncode == 1, pod.tail()
    words = [line for line in pod.log.read_text().splitlines() if '"event": "failed"' in line]
    assert len(words) == 1 and cause in words[0], pod.tail()

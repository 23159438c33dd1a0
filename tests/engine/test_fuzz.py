"""A real pod under a fuzzer, on both ports: no 500, no leak, no dead engine. And what it exports.

The tests run in their order: the admin port comes after the data port, the end of the pod last.
"""

import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import given, settings
from prometheus_client.parser import text_string_to_metric_families

from rollout_pod.protocol import BASE_VERSION, LOCAL_OWNER
from tests.support.collector import Collector
from tests.support.engine_kit import BASE_ARGS, checkpoint, prompts
from tests.support.fuzz import close_to_valid, documents, fuzzer, no_leak, quick
from tests.support.fuzz_openai import SAMPLING, VOCAB, openai_document
from tests.support.process import ServeProcess, serve_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

MAX_LEN = 256
ARGS = (
    *BASE_ARGS, f"--max-model-len={MAX_LEN}", "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
)  # fmt: skip
PROMPT = prompts(1)[0]

data_document, admin_document = documents()
data_port = fuzzer(data_document, examples=40)
generating = fuzzer(
    close_to_valid(data_document, sampling=SAMPLING, vocab_size=VOCAB),
    examples=150,
    valid_only=True,
)
admin_port = fuzzer(admin_document, examples=40)
serial = itertools.count(1)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def pod(collector: Collector) -> Iterator[ServeProcess]:
    args = (*ARGS, f"--otlp-traces-endpoint={collector.url}")
    with pytest.MonkeyPatch.context() as patch, serve_process(
        checkpoint("dense", 0), engine_args=args
    ) as pod:  # fmt: skip
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        pod.start()
        pod.serving(BASE_VERSION)
        yield pod


@pytest.fixture(scope="module")
def before(pod: ServeProcess) -> tuple[list[int], int]:
    """Greedy tokens, and how many descriptors the server's process has."""
    tokens = pod.generate(PROMPT, 40).token_ids
    chat(pod, {"max_tokens": 2})
    return tokens, descriptors(pod)


@pytest.fixture(scope="module")
def token(pod: ServeProcess) -> str:
    return (pod.run_dir / "admin" / "token").read_text()


def chat(pod: ServeProcess, more: dict[str, Any], **headers: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "w9"}], "temperature": 0} | more
    url = f"http://{pod.data}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60)


def descriptors(pod: ServeProcess) -> int:
    assert pod.process
    return psutil.Process(pod.process.pid).num_fds()


def is_as_before(pod: ServeProcess, before: tuple[list[int], int]) -> None:
    tokens, fds = before
    assert pod.process and pod.process.poll() is None, pod.tail()
    for path in ("/startupz", "/readyz", "/healthz"):
        assert pod.get(path) == 200
    deadline = time.monotonic() + 10
    while (
        pod.metric("rollout_unfinished ") or pod.metric("rollout_parked ") or descriptors(pod) > fds
    ):
        assert time.monotonic() < deadline, (descriptors(pod), fds)
        time.sleep(0.05)
    assert pod.generate(PROMPT, 40).token_ids == tokens
    assert "Traceback" not in pod.log.read_text()


def test_the_engines_metrics_stand_beside_the_pods(pod: ServeProcess) -> None:
    def values() -> dict[str, float]:
        text = httpx.get(f"http://{pod.data}/metrics").text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.removesuffix("_bucket") == sample.name:
                    found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    first = values()
    pod.generate(PROMPT, 40)
    second = values()
    for name in ("vllm:generation_tokens_total", "rollout_generated_tokens_total"):
        assert second[name] - first[name] == 40
    assert second["vllm:prompt_tokens_total"] - first["vllm:prompt_tokens_total"] == len(PROMPT)
    name = "vllm:e2e_request_latency_seconds_count"
    assert second[name] - first[name] == 1
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"`(vllm:\w+)`", page))
    assert named
    for name in named:
        assert {name, f"{name}_count"} & second.keys(), name


def test_trace_context_is_passed_on(pod: ServeProcess, collector: Collector) -> None:
    """vLLM's spans are children of the caller's, on both kinds of routes."""
    body = {"request_id": "t", "prompt_token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
    for trace, asking in (
        ("a1" * 16, lambda h: httpx.post(f"http://{pod.data}/v1/rollout/generate", json=body, headers=h)),
        ("b2" * 16, lambda h: chat(pod, {"max_tokens": 4}, **h)),
    ):  # fmt: skip
        assert asking({"traceparent": f"00-{trace}-{'c3' * 8}-01"}).status_code == 200
        deadline = time.monotonic() + 20
        while not (bytes.fromhex(trace) in collector.bodies and b"llm_request" in collector.bodies):
            assert time.monotonic() < deadline, "no span came"
            time.sleep(0.05)


@data_port.parametrize()
@quick
def test_the_data_port(
    case: schemathesis.Case, pod: ServeProcess, before: object, token: str
) -> None:
    if isinstance(case.body, dict):
        sampling = case.body.get("sampling_params", {})
        if isinstance(sampling, dict):  # else the rollout fills the model
            case.body["sampling_params"] = {"max_tokens": 4} | sampling
    case.call_and_validate(
        base_url=f"http://{pod.data}", additional_checks=[no_leak([token, str(pod.run_dir)])]
    )


@generating.parametrize()
@quick
def test_what_the_engine_gets(
    case: schemathesis.Case, pod: ServeProcess, before: object, token: str
) -> None:
    case.body["sampling_params"] = {"max_tokens": 4} | case.body.get("sampling_params", {})
    case.call_and_validate(
        base_url=f"http://{pod.data}", additional_checks=[no_leak([token, str(pod.run_dir)])]
    )


@pytest.mark.parametrize(
    ("path", "kind", "examples"),
    [
        *itertools.product(["/v1/completions", "/v1/chat/completions"], ["close"], [100]),
        *itertools.product(
            ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"],
            ["positive", "negative"],
            [50],
        ),
    ],
)
def test_the_openai_routes(
    pod: ServeProcess, before: object, token: str, path: str, kind: str, examples: int
) -> None:
    document = openai_document(close=kind == "close")
    operation = fuzzer(document, examples=examples)[path]["POST"]
    mode = schemathesis.GenerationMode("negative" if kind == "negative" else "positive")
    check = no_leak([token, str(pod.run_dir)])
    statuses: Counter[int] = Counter()

    @settings(
        quick, max_examples=examples, derandomize=not os.environ.get("FUZZ_AT_RANDOM"), database=None
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # else most are refused for it
            case.body.setdefault("max_tokens", 4)  # else a chat fills the model
            for name in ("max_tokens", "max_completion_tokens", "n"):
                if isinstance(case.body.get(name), int) and case.body[name] > 8:
                    case.body[name] = 8
        answer = case.call(base_url=f"http://{pod.data}", timeout=60)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, (answer.status_code, answer.text[:500], case.body)
        check(None, answer, case)
        if answer.status_code >= 400:
            told = json.loads(answer.content)
            assert told.get("error", {}).get("message") or told.get("code"), (told, case.body)

    run()
    print(path, kind, dict(statuses))
    if kind == "close":
        assert statuses[200] > examples // 2, statuses


def test_the_data_port_is_as_before(pod: ServeProcess, before: tuple[list[int], int]) -> None:
    is_as_before(pod, before)


@admin_port.parametrize()
@quick
def test_the_admin_port(
    case: schemathesis.Case, pod: ServeProcess, before: object, token: str
) -> None:
    """Every document comes from the owner and is newer, so that it is taken into force."""
    if isinstance(case.body, dict):
        owner, generation = case.body.get("owner"), case.body.get("generation")
        if isinstance(owner, str) and 0 < len(owner) < 254 and type(generation) is int:
            case.body |= {
                "owner": LOCAL_OWNER, "generation": next(serial) if generation >= 0 else -1,
            }  # fmt: skip
    if isinstance(case.query.get("timeout"), int | float) and 0.01 < case.query["timeout"] <= 60:
        case.query["timeout"] = 0.01
    case.call_and_validate(
        base_url=f"http://{pod.admin}", headers={"Authorization": f"Bearer {token}"},
        additional_checks=[no_leak([token])],
    )  # fmt: skip


def test_and_comes_back(pod: ServeProcess, before: tuple[list[int], int], token: str) -> None:
    document = {"owner": LOCAL_OWNER, "generation": next(serial)}
    url, bearer = f"http://{pod.admin}/admin/v1/desired", {"Authorization": f"Bearer {token}"}
    assert httpx.put(url, json=document, headers=bearer).status_code == 200
    pod.serving(BASE_VERSION, timeout_s=60)
    is_as_before(pod, before)


def test_what_is_in_flight_ends_within_the_drain(pod: ServeProcess) -> None:
    body = {"max_tokens": MAX_LEN - 60, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(chat, pod, body)
        while not pod.metric("rollout_unfinished "):
            time.sleep(0.01)
        assert pod.stop() == 0
        answer = asking.result(30)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == MAX_LEN - 60

"""What ``/metrics`` shows is what the page says, and the engine's own stands beside it."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import ProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from rollout_pod.metrics import PodMetrics
from rollout_pod.server.data_app import make_data_app
from tests.support.pods import Pod, ref, running_pod

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
PAGE = TEXT.partition("\n# Metrics of the operator\n")[0]
PATH = "/v1/rollout/generate"
BODY = {"request_id": "r", "prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}
TRACE = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=1"}


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with running_pod(tmp_path / "run") as pod:
        pod.want()
        await pod.serving("base")
        yield pod


@pytest.fixture
async def data(pod: Pod) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_data_app(pod.supervisor), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        yield client


async def values(data: httpx.AsyncClient) -> dict[str, float]:
    """By name and the value of the one label."""
    text = (await data.get("/metrics")).text
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_names_them_all_and_no_other() -> None:
    listed = re.findall(r"^\| `(rollout_\w+)` \| (\w+) \| (.*?) \|", PAGE, re.MULTILINE)
    exported = []
    for family in PodMetrics().registry.collect():
        if family.name.startswith("process_"):  # prometheus_client's own
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        assert family.documentation and not family.documentation.endswith(".")
        assert not re.search(r"_(ms|millis|minutes|kb|mb|count|sum|bucket)$", family.name)
        exported.append((name, family.type))
    assert [(name, kind) for name, kind, _ in listed] == exported


def test_labels_are_those_of_the_page() -> None:
    listed = re.findall(r"^\| `(rollout_\w+)` \| \w+ \| (.*?) \|", PAGE, re.MULTILINE)
    for collector in PodMetrics().registry._collector_to_names:
        if isinstance(collector, ProcessCollector):
            continue
        (row,) = [
            labels for name, labels in listed
            if name.removesuffix("_total") == collector._name
        ]  # fmt: skip
        assert tuple(re.findall(r"`(\w+)`", row)) == collector._labelnames, collector._name


async def test_the_engines_own_stand_beside(pod: Pod, data: httpx.AsyncClient) -> None:
    pod.engine.own_metrics = b"# TYPE vllm:x gauge\nvllm:x 5.0\n"
    seen = await values(data)
    assert (seen["vllm:x"], seen["rollout_gate_open"]) == (5, 1)


async def test_cancels_and_mixed_answers(pod: Pod, data: httpx.AsyncClient) -> None:
    pod.engine.step_s = 0.002
    long = BODY | {"sampling_params": {"max_tokens": 3000}}

    async def begin(**more: object) -> "asyncio.Task[httpx.Response]":
        task = asyncio.create_task(data.post(PATH, json=long | more))
        while not pod.engine.running:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        return task

    cut = await begin()
    pod.want(paused=True)
    partial = (await cut).json()
    await pod.until(lambda s: s.phase == "Paused")
    seen = await values(data)
    tokens = len(partial["token_ids"])
    assert tokens
    assert seen["rollout_gate_open"] == seen["rollout_unfinished"] == 0
    assert seen["rollout_cancels_total"] == seen["rollout_cancel_seconds_count"] == 1
    assert seen["rollout_cancel_aborted_requests_total"] == 1
    assert seen["rollout_cancel_returned_tokens_total"] == tokens
    assert seen["rollout_generated_tokens_total true"] == tokens
    assert seen["rollout_requests_total paused"] == 1

    pod.want(interruption={"mode": "keep", "timeout_s": 5})
    await pod.until(lambda s: s.phase == "Serving")
    kept = await begin(sampling_params={"max_tokens": 60})
    pod.want(ref("step-1"), interruption={"mode": "keep", "timeout_s": 5})
    versions = [span["version"] for span in (await kept).json()["weight_versions"]]
    assert versions == ["base", "step-1"]
    seen = await values(data)
    assert seen["rollout_mixed_version_answers_total"] == 1
    assert seen["rollout_weight_updates_total committed"] >= 1


async def test_refusals_by_reason(pod: Pod, data: httpx.AsyncClient) -> None:
    await data.post(PATH, json=BODY | {"bogus": 1})
    await data.post(PATH, content=b"{", headers={"Content-Type": "application/json"})
    await data.post(PATH, json=BODY | {"sampling_params": {"tempreture": 1}})
    await data.get("/nowhere")
    pod.want(paused=True)
    await pod.until(lambda s: s.phase == "Paused")
    await data.post(PATH, json=BODY)
    await data.post(PATH, json=BODY | {"on_pause": "wait", "timeout_s": 0.01})
    pod.supervisor.begin_drain()
    await data.post(PATH, json=BODY)
    seen = await values(data)
    name = "rollout_refused_requests_total "
    reasons = {key.removeprefix(name): n for key, n in seen.items() if key.startswith(name)}
    assert reasons == dict.fromkeys(
        [
            "invalid_field", "invalid_json", "invalid_sampling_params", "not_found", "paused",
            "gate_closed", "draining",
        ],
        1,
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_trace_context_reaches_the_engine(
    pod: Pod, data: httpx.AsyncClient, stream: bool
) -> None:
    answer = await data.post(PATH, json=BODY | {"stream": stream}, headers=TRACE | {"x": "y"})
    assert answer.status_code == 200
    assert pod.engine.requests[-1].trace_headers == TRACE
    await data.post(PATH, json=BODY)
    assert pod.engine.requests[-1].trace_headers == {}

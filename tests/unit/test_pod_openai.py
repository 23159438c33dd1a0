"""The OpenAI routes around a small server of the fake engine's, over ASGI."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from rollout_pod.admission import Admission, Draining, Finished
from rollout_pod.engine.base import EngineOutput, EngineRequest
from rollout_pod.engine.front_end import CALL, ROUTES
from rollout_pod.openai_call import GatedCall
from rollout_pod.protocol import CancelReason, FinishReason, Problem, WeightVersionSpan
from rollout_pod.server import openai_answer
from rollout_pod.server.data_app import make_data_app
from tests.support.fakes import fake_token
from tests.support.pods import Pod, ref, running_pod

PROMPT = [1, 2]
N = 40
PATH = "/v1/completions"


async def fake_server(scope: Any, receive: Any, send: Any) -> None:
    """What vLLM's does of it: answers tokens in JSON or by events, and every error as 500."""
    request = Request(scope, receive)
    if request.url.path == "/v1/models":
        models = {"object": "list", "data": [{"id": "tiny", "max_model_len": 7}]}
        response: Any = JSONResponse(models)
    elif request.url.path == "/detokenize":  # as FastAPI refuses a body by itself
        response = JSONResponse({"detail": "no text"}, status_code=400)
    elif json.loads(await request.body()).get("stream"):
        response = StreamingResponse(_events(), media_type="text/event-stream")
    else:
        try:
            tokens, reason = await _generate()
        except Exception as error:
            response = JSONResponse({"error": {"message": str(error)}}, status_code=500)
        else:
            choice = {"index": 0, "token_ids": tokens, "finish_reason": reason}
            response = JSONResponse({"choices": [choice]})
    await response(scope, receive, send)


async def _events() -> AsyncIterator[str]:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.create_task(_generate(queue.put_nowait))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    while (tokens := await queue.get()) is not None:
        yield _event(choices=[{"index": 0, "token_ids": tokens, "finish_reason": None}])
    error = task.exception()
    if error is not None:
        yield _event(error={"message": str(error)})
    else:
        yield _event(choices=[{"index": 0, "token_ids": [], "finish_reason": task.result()[1]}])
        yield _event(choices=[], usage={"completion_tokens": len(task.result()[0])})
    yield "data: [DONE]\n\n"


def _event(**document: object) -> str:
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n"


async def _generate(on_tokens: Callable[[list[int]], None] | None = None) -> tuple[list[int], str]:
    call = CALL.get()
    number = call.new_choices(1)
    tokens: list[int] = []
    spans: list[WeightVersionSpan] = []
    while True:
        prompt, left = [*PROMPT, *tokens], N - len(tokens)

        def make(engine_id: str, prompt: list[int] = prompt, left: int = left) -> EngineRequest:
            return EngineRequest(engine_id, prompt, params=left)

        try:
            passage = await call.pass_gate(make, asyncio.Event())
        except Exception as error:
            call.failed(error)
            raise
        start = len(tokens)
        tokens += passage.output.token_ids
        if on_tokens:
            on_tokens(list(passage.output.token_ids))
        spans += [
            span.model_copy(update={"start": start + span.start, "end": start + span.end})
            for span in passage.spans
        ]
        if not passage.goes_on:
            reason = str(passage.output.finish_reason)
            call.finished(number, spans, reason=reason, tokens=len(tokens))
            return tokens, reason


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with running_pod(tmp_path / "run") as pod:
        pod.engine.server = fake_server
        pod.engine.step_s = 0.005
        pod.want()
        await pod.serving("base")
        yield pod


@pytest.fixture
async def data(pod: Pod) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_data_app(pod.supervisor), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        yield client


async def running(pod: Pod) -> None:
    while pod.supervisor.gate.unfinished == 0:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.03)


async def paused(pod: Pod) -> None:
    await pod.until(lambda s: s.phase == "Paused")


async def pause_twice(pod: Pod) -> None:
    """For 0.1 s each."""
    for _ in range(2):
        pod.want(paused=True)
        await paused(pod)
        await asyncio.sleep(0.1)
        pod.want()
        await asyncio.sleep(0.02)


def whole(answer: httpx.Response, *, stream: bool) -> tuple[list[int], list[dict[str, Any]]]:
    """Tokens and spans of an answer that did not end by an error."""
    if stream:
        *chunks, _ = events(answer)
        tokens = [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]]
        return tokens, chunks[-1]["weight_versions"]
    document = answer.json()
    return document["choices"][0]["token_ids"], document["weight_versions"]


def check(tokens: list[int], spans: list[dict[str, Any]]) -> None:
    """Each token is of the version that its span names."""
    history, at = list(PROMPT), 0
    for span in spans:
        assert (span["start"], span["choice"]) == (at, 0)
        for token in tokens[at : span["end"]]:
            assert token == fake_token(span["version"], history)
            history.append(token)
        at = span["end"]
    assert at == len(tokens)


def problem(answer: httpx.Response, status: int) -> Problem:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    if status == 503:
        assert int(answer.headers["retry-after"]) > 0
    return Problem.model_validate_json(answer.content)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    told = [event for event in answer.text.split("\n\n") if event and not event.startswith(":")]
    lines = [event.removeprefix("data: ") for event in told]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_cut_by_a_pause_and_by_an_update(pod: Pod, data: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(data.post(PATH, json={}))
    await running(pod)
    pod.want(paused=True)
    await paused(pod)
    await asyncio.sleep(0.05)
    assert not asking.done() and pod.supervisor.gate.parked == 1
    pod.want()
    await running(pod)
    pod.want(ref("step-1", step=1))
    answer = await asking
    assert answer.status_code == 200
    body = answer.json()
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["token_ids"]) == N
    assert [(s["version"], s["step"]) for s in body["weight_versions"]][-1] == ("step-1", 1)
    assert len({s["version"] for s in body["weight_versions"]}) == 2
    check(body["choices"][0]["token_ids"], body["weight_versions"])
    metrics = (await data.get("/metrics")).text
    assert 'rollout_requests_total{result="length"} 1.0' in metrics
    assert "rollout_mixed_version_answers_total 1.0" in metrics


async def test_stream_cut_by_an_update(pod: Pod, data: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(data.post(PATH, json={"stream": True}))
    await running(pod)
    pod.want(ref("step-1"))
    *chunks, last, usage = events(await asking)
    assert len(chunks) >= 2 and not any("weight_versions" in chunk for chunk in chunks)
    tokens = [t for chunk in [*chunks, last] for t in chunk["choices"][0]["token_ids"]]
    assert len(tokens) == N
    assert [s["version"] for s in last["weight_versions"]] == ["base", "step-1"]
    assert usage["weight_versions"] == last["weight_versions"]
    check(tokens, last["weight_versions"])


async def test_no_rollout_can_have_its_id(pod: Pod, data: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(data.post(PATH, json={}))
    await running(pod)
    taken = pod.engine.requests[-1].engine_id.partition("#")[0]
    body = {"request_id": taken, "prompt_token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    refused = await data.post("/v1/rollout/generate", json=body)
    assert [error.field for error in problem(refused, 422).errors] == ["request_id"]
    assert (await asking).status_code == 200


async def test_partials_by_opt_in(pod: Pod, data: httpx.AsyncClient) -> None:
    headers = {"X-Rollout-On-Pause": "return"}
    asking = asyncio.create_task(data.post(PATH, json={}, headers=headers))
    await running(pod)
    pod.want(paused=True)
    choice = (await asking).json()["choices"][0]
    assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < N
    refused = (await data.post(PATH, json={}, headers=headers)).json()["choices"][0]
    assert (refused["finish_reason"], refused["token_ids"]) == ("abort", [])


@pytest.mark.parametrize("stream", [False, True])
async def test_paused_for_too_long(pod: Pod, data: httpx.AsyncClient, stream: bool) -> None:
    pod.want(paused=True)
    await paused(pod)
    headers = {"X-Rollout-Timeout-S": "0.1"}
    answer = await data.post(PATH, json={"stream": stream}, headers=headers)
    assert problem(answer, 503).code == "gate_closed"
    assert pod.supervisor.gate.parked == 0


async def test_the_deadline_counts_all_waits_and_no_generation(
    pod: Pod, data: httpx.AsyncClient
) -> None:
    headers = {"X-Rollout-Timeout-S": "0.15"}
    asking = asyncio.create_task(data.post(PATH, json={"stream": True}, headers=headers))
    await running(pod)
    await pause_twice(pod)
    first, *_, last = events(await asking)
    assert first["choices"][0]["token_ids"]
    assert last["error"] == {
        "message": "generation stayed paused until timeout_s was over",
        "type": "gate_closed",
        "code": 503,
    }


async def test_time_at_the_gate_counts_once_for_all_sequences(pod: Pod) -> None:
    """Four that wait through two pauses of 0.1 s have waited for 0.2 s, not for 0.8."""
    call = GatedCall(
        pod.supervisor.gate, returns_partials=False, timeout_s=0.4, on_answered=lambda *_: None
    )

    async def sequence() -> int:
        tokens: list[int] = []
        while True:
            prompt, left = [*PROMPT, *tokens], N - len(tokens)
            passage = await call.pass_gate(
                lambda engine_id: EngineRequest(engine_id, prompt, params=left),  # noqa: B023 # called at once
                asyncio.Event(),
            )
            tokens += passage.output.token_ids
            if not passage.goes_on:
                return len(tokens)

    sequences = [asyncio.create_task(sequence()) for _ in range(4)]
    await running(pod)
    await pause_twice(pod)
    assert await asyncio.gather(*sequences) == [N] * 4


@pytest.mark.parametrize("is_wanted", [False, True])
async def test_what_was_complete_before_a_drain_cut_it_is_answered(is_wanted: bool) -> None:
    output = EngineOutput((1,), (-0.5,), FinishReason.ABORT)
    cut = Finished(output, Admission(ref("v"), 1), CancelReason.DRAINING, [])

    async def generate(*_: object, **__: object) -> Finished:
        return cut

    gate: Any = SimpleNamespace(generate=generate)
    call = GatedCall(gate, returns_partials=False, timeout_s=1, on_answered=lambda *_: None)
    gone = asyncio.Event()
    if is_wanted:
        with pytest.raises(Draining):
            await call.pass_gate(lambda _: EngineRequest("e", PROMPT, params=1), gone)
    else:
        gone.set()  # by a stop string
        passage = await call.pass_gate(lambda _: EngineRequest("e", PROMPT, params=1), gone)
        assert (passage.output, passage.goes_on) == (output, False)


async def test_not_ready_and_draining(pod: Pod, data: httpx.AsyncClient) -> None:
    pod.supervisor.begin_drain()
    for path, method in ROUTES.items():
        assert problem(await data.request(method, path), 503).code == "draining"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_in_flight_ends_within_the_drain(
    pod: Pod, data: httpx.AsyncClient, stream: bool
) -> None:
    asking = asyncio.create_task(data.post(PATH, json={"stream": stream}))
    await running(pod)
    pod.supervisor.begin_drain()
    answer = await asking
    tokens, spans = whole(answer, stream=stream)
    assert len(tokens) == N
    check(tokens, spans)
    await asyncio.wait_for(pod.task, 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_outlasts_the_drain_is_told_so(
    pod: Pod, data: httpx.AsyncClient, stream: bool
) -> None:
    pod.supervisor.drain_timeout_s = 0.01
    asking = asyncio.create_task(data.post(PATH, json={"stream": stream}))
    await running(pod)
    pod.want(paused=True)
    await paused(pod)
    pod.want()  # by now the stream has begun
    await running(pod)
    by_choice = asyncio.create_task(
        data.post(PATH, json={}, headers={"X-Rollout-On-Pause": "return"})
    )
    while pod.supervisor.gate.unfinished < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    pod.supervisor.begin_drain()
    answer = await asking
    if stream:
        first, *_, last = events(answer)
        assert first["choices"][0]["token_ids"]
        assert (last["error"]["type"], last["error"]["code"]) == ("draining", 503)
    else:
        assert problem(answer, 503).code == "draining"
    choice = (await by_choice).json()["choices"][0]
    assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < N
    await asyncio.wait_for(pod.task, 5)
    assert pod.engine.running == 0


async def test_a_drain_answers_what_waits_at_the_gate(pod: Pod, data: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(data.post(PATH, json={}))
    await running(pod)
    pod.want(paused=True)
    while not pod.supervisor.gate.parked:
        await asyncio.sleep(0)
    pod.supervisor.begin_drain()
    assert problem(await asking, 503).code == "draining"


async def test_a_reader_that_takes_nothing_is_cut(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_answer, "SEND_TIMEOUT_S", 0.3)
    pod.engine.step_s = 0.05
    parts: list[bytes] = []

    async def send(message: Any) -> None:
        if message.get("body"):
            parts.append(message["body"])
            await asyncio.Event().wait()

    body = [{"type": "http.request", "body": b'{"stream": true}', "more_body": False}]

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "POST", "scheme": "http", "path": PATH, "raw_path": PATH.encode(),
        "query_string": b"", "headers": [], "client": None, "server": ("pod", 80),
    }  # fmt: skip
    async with asyncio.timeout(5):
        answering = asyncio.create_task(make_data_app(pod.supervisor)(scope, receive, send))
        await running(pod)
        pod.want(paused=True)
        await paused(pod)
        pod.want()  # its first tokens are on the way, and it goes on
        await running(pod)
        await answering
        assert len(parts) == 1
        registry, cut = pod.supervisor.metrics.registry, {"result": "abort"}
        while not registry.get_sample_value("rollout_requests_total", cut):
            await asyncio.sleep(0)
    assert pod.engine.running == pod.supervisor.gate.unfinished == 0


async def test_a_stream_that_waits_at_the_gate_says_that_it_goes_on(
    pod: Pod, data: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_answer, "HEARTBEAT_S", 0.03)
    asking = asyncio.create_task(data.post(PATH, json={"stream": True}))
    await running(pod)
    pod.want(paused=True)
    await paused(pod)
    await asyncio.sleep(0.3)
    pod.want()
    answer = await asking
    first, *beats, rest = answer.text.split(": ping\n\n")
    assert beats and not any(beats)
    tokens = [
        token for event in events(answer) for c in event["choices"] for token in c["token_ids"]
    ]
    assert len(tokens) == N
    assert '"token_ids":[' in first and rest.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("mode", ["abort", "keep"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_goes_on_after_an_update_that_failed_and_was_repaired(
    pod: Pod, data: httpx.AsyncClient, mode: str, stream: bool
) -> None:
    pod.agent.send_script["step-1"] = ["midway"]
    pod.want(interruption={"mode": mode})
    asking = asyncio.create_task(data.post(PATH, json={"stream": stream}))
    await running(pod)
    pod.want(ref("step-1"), interruption={"mode": mode})
    await pod.serving("step-1")
    assert not pod.agent.send_script["step-1"], "no update failed"
    answer = await asking
    tokens, spans = whole(answer, stream=stream)
    assert len(tokens) == N
    check(tokens, spans)
    assert [span["version"] for span in spans] == ["base", "step-1"]


async def test_an_answer_goes_on_after_a_sleep_that_lost_the_weights(
    pod: Pod, data: httpx.AsyncClient
) -> None:
    asking = asyncio.create_task(data.post(PATH, json={}))
    await running(pod)
    pod.want(ref("step-1"), paused=True, sleep={"level": 2})
    await pod.until(lambda s: s.phase == "Sleeping")
    assert problem(await data.post(PATH, json={}), 503).code == "not_ready"  # has not begun
    pod.want(ref("step-1"))
    choice = (await asking).json()
    assert len(choice["choices"][0]["token_ids"]) == N
    check(choice["choices"][0]["token_ids"], choice["weight_versions"])


async def test_an_answer_that_waits_ends_with_the_engine(pod: Pod, data: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(data.post(PATH, json={}))
    await running(pod)
    pod.want(paused=True)
    await paused(pod)
    pod.engine.kill("gone")
    assert problem(await asking, 503).code == "not_ready"


async def test_before_the_first_version(tmp_path: Path) -> None:
    async with running_pod(tmp_path / "run") as pod:
        transport = httpx.ASGITransport(make_data_app(pod.supervisor))
        async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
            assert problem(await client.get("/v1/models"), 503).code == "not_ready"


async def test_a_death_is_no_answer_of_the_servers(pod: Pod, data: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(data.post(PATH, json={}))
    await running(pod)
    pod.engine.kill("gone")
    assert problem(await asking, 503).code == "not_ready"


async def test_without_a_server(pod: Pod, data: httpx.AsyncClient) -> None:
    pod.engine.server = None
    told = problem(await data.post(PATH, json={}), 501)
    assert (told.code, told.detail) == ("not_supported", "the fake engine has no server")


async def test_models(pod: Pod, data: httpx.AsyncClient) -> None:
    answer = await data.get("/v1/models")
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.json()["data"] == [{"id": "tiny", "max_model_len": 7, "weight_version": "base"}]


async def test_every_error_of_the_server_is_in_openais_form(data: httpx.AsyncClient) -> None:
    answer = await data.post("/detokenize", content=b"\x80")
    assert answer.status_code == 400
    error = {"message": "no text", "type": "Bad Request", "param": None, "code": 400}
    assert answer.json() == {"error": error}
    assert int(answer.headers["content-length"]) == len(answer.content)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Rollout-On-Pause", "abort"),
        ("X-Rollout-Timeout-S", "soon"),
        ("X-Rollout-Timeout-S", "0"),
        ("X-Rollout-Timeout-S", "nan"),
        ("X-Rollout-Timeout-S", "1e9"),
    ],
)
async def test_headers(data: httpx.AsyncClient, name: str, value: str) -> None:
    told = problem(await data.post(PATH, json={}, headers={name: value}), 422)
    assert [e.field for e in told.errors] == [name]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings", "/v1/responses", "/v1/chat/completions/batch",
        "/pause", "/collective_rpc", "/docs", "/redoc", "/tokenizer_info", "/invocations", "/ping",
    ],
)  # fmt: skip
async def test_nothing_else(data: httpx.AsyncClient, path: str) -> None:
    assert problem(await data.get(path), 404).code == "not_found"
    assert problem(await data.post(path, json={}), 404).code == "not_found"
    assert problem(await data.get(PATH), 405).code == "method_not_allowed"

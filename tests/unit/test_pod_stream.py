"""Streams and single cancels on the fakes: what a reader received is what the engine gave."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from rollout_pod.admission import DuplicateRequest
from rollout_pod.protocol import GenerateRequest, GenerateResponse
from rollout_pod.server import streaming
from rollout_pod.server.data_app import make_data_app
from rollout_pod.server.streaming import Stream
from tests.support.fakes import fake_tokens
from tests.support.pods import Pod, ref, running_pod

BODY = {"request_id": "r", "prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 40}}
LONG = BODY | {"sampling_params": {"max_tokens": 3000}}


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with running_pod(tmp_path) as pod:
        pod.want(ref("step-1", step=1))
        await pod.serving("step-1")
        yield pod


@pytest.fixture
async def data(pod: Pod) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_data_app(pod.supervisor), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        yield client


def events(text: str) -> list[tuple[str, dict]]:
    found = []
    for block in text.replace("\r\n", "\n").strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def tokens_of(found: list[tuple[str, dict]]) -> list[int]:
    return [token for name, data in found if name == "delta" for token in data["token_ids"]]


async def running(pod: Pod, n: int = 1) -> None:
    while pod.engine.running < n:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_stream_is_the_answer_in_pieces(data: httpx.AsyncClient) -> None:
    whole = (await data.post("/v1/rollout/generate", json=BODY)).json()
    answer = await data.post("/v1/rollout/generate", json=BODY | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert [name for name, _ in found][-1] == "end"
    assert {name for name, _ in found[:-1]} == {"delta"}
    assert tokens_of(found) == whole["token_ids"] == fake_tokens("step-1", [1, 2], 40)
    assert all((d["version"], d["step"]) == ("step-1", 1) for name, d in found if name == "delta")
    # whoever loses the pod before the event "end" must not ask for more
    told = [data.get("finish_reason") for name, data in found if name == "delta"]
    assert told == [None] * (len(told) - 1) + ["length"]
    end = found[-1][1]
    assert end.pop("num_tokens") == 40
    assert end == {k: v for k, v in whole.items() if k in end}


async def test_tokens_that_come_together_go_together_and_an_end_waits_for_nobody(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "COALESCE_S", 3600.0)
    stream = Stream()
    request = GenerateRequest.model_validate(BODY)
    task: asyncio.Task[GenerateResponse] = asyncio.create_task(
        pod.generation.generate(
            request, gone=stream.gone, on_admit=stream.on_admit, on_delta=stream.on_delta
        )
    )
    await stream.begin(task)
    found = [(e.event, json.loads(e.data)) async for e in stream.events(task)]
    assert [name for name, _ in found] == ["delta", "delta", "end"], "the first, the rest, the end"
    assert len(found[0][1]["token_ids"]) < 40
    assert tokens_of(found) == fake_tokens("step-1", [1, 2], 40)


async def test_a_cut_stream_ends_too(data: httpx.AsyncClient, pod: Pod) -> None:
    task = asyncio.create_task(data.post("/v1/rollout/generate", json=LONG | {"stream": True}))
    await running(pod)
    pod.want(ref("step-1", step=1), paused=True)
    found = events((await task).text)
    name, end = found[-1]
    assert (name, end["is_cancel"], end["cancel_reason"]) == ("end", True, "paused")
    assert 0 < end["num_tokens"] == len(tokens_of(found)) < 3000
    refused = events((await data.post("/v1/rollout/generate", json=BODY | {"stream": True})).text)
    assert [(n, d["cancel_reason"]) for n, d in refused] == [("end", "refused")]


async def test_what_fails_before_the_first_token_is_a_plain_error(
    data: httpx.AsyncClient, pod: Pod
) -> None:
    task = asyncio.create_task(data.post("/v1/rollout/generate", json=LONG))
    await running(pod)
    answer = await data.post("/v1/rollout/generate", json=BODY | {"stream": True})
    assert (answer.status_code, answer.json()["code"]) == (409, "duplicate_request")
    assert (await task).status_code == 200
    bad = BODY | {"stream": True, "sampling_params": {"bogus": 1}}
    answer = await data.post("/v1/rollout/generate", json=bad)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_sampling_params")


async def test_an_engine_that_dies_ends_the_stream_with_an_error(
    data: httpx.AsyncClient, pod: Pod
) -> None:
    task = asyncio.create_task(data.post("/v1/rollout/generate", json=LONG | {"stream": True}))
    await running(pod)
    pod.engine.kill("gone")
    found = events((await task).text)
    assert found[-1][0] == "error"
    assert (found[-1][1]["status"], found[-1][1]["code"]) == (503, "not_ready")
    assert tokens_of(found), "what came before is kept"


async def test_a_parked_reader_that_goes_leaves_nothing_behind(pod: Pod) -> None:
    pod.want(ref("step-1", step=1), paused=True)
    await pod.until(lambda s: s.phase == "Paused")
    request = GenerateRequest.model_validate(LONG | {"on_pause": "wait", "stream": True})
    left = asyncio.Event()

    def generate(stream: Stream):
        return pod.generation.generate(
            request, gone=stream.gone, on_admit=stream.on_admit, on_delta=stream.on_delta
        )

    responding = asyncio.create_task(streaming.Streams().respond(generate, left.wait))
    async with asyncio.timeout(5):
        while not pod.supervisor.gate.parked:
            await asyncio.sleep(0)
        left.set()
        while pod.supervisor.gate.parked:
            await asyncio.sleep(0)
    await asyncio.gather(responding, return_exceptions=True)
    pod.want(ref("step-1", step=1))
    await pod.serving("step-1")
    assert pod.engine.running == pod.supervisor.gate.unfinished == 0


async def test_a_reader_that_goes_leaves_nothing_behind(pod: Pod) -> None:
    stream = Stream()
    request = GenerateRequest.model_validate(LONG)
    task: asyncio.Task[GenerateResponse] = asyncio.create_task(
        pod.generation.generate(
            request, gone=stream.gone, on_admit=stream.on_admit, on_delta=stream.on_delta
        )
    )
    await stream.begin(task)
    reader = stream.events(task)
    first = await anext(reader)
    assert first.event == "delta"
    await reader.aclose()  # type: ignore[attr-defined] # an async generator
    answer = await asyncio.wait_for(task, 5)
    assert answer.cancel_reason == "cancelled"
    assert pod.engine.running == pod.supervisor.gate.unfinished == 0


async def test_one_request_is_cancelled_and_both_callers_have_the_partial(
    data: httpx.AsyncClient, pod: Pod
) -> None:
    other = asyncio.create_task(data.post("/v1/rollout/generate", json=LONG | {"request_id": "o"}))
    task = asyncio.create_task(
        data.post("/v1/rollout/generate", json=LONG | {"request_id": "group/3"})
    )
    await running(pod, 2)
    cancelled = await data.delete("/v1/rollout/requests/group/3")
    assert cancelled.status_code == 200
    mine = (await task).json()
    assert cancelled.json() == mine
    assert (mine["is_cancel"], mine["cancel_reason"]) == (True, "cancelled")
    assert 0 < len(mine["token_ids"]) < 3000
    assert (await data.delete("/v1/rollout/requests/r")).status_code == 404
    assert (await other).json()["finish_reason"] == "length", "another request was cut"
    assert pod.supervisor.gate.parked == 0


async def test_a_parked_request_is_cancelled(data: httpx.AsyncClient, pod: Pod) -> None:
    pod.want(ref("step-1"), paused=True)
    await pod.until(lambda s: s.phase == "Paused")
    task = asyncio.create_task(data.post("/v1/rollout/generate", json=BODY | {"on_pause": "wait"}))
    while not pod.supervisor.gate.parked:
        await asyncio.sleep(0)
    cancelled = await data.delete("/v1/rollout/requests/r")
    assert cancelled.json() == (await task).json()
    assert cancelled.json()["cancel_reason"] == "cancelled"
    assert pod.supervisor.gate.parked == 0


async def test_an_id_is_taken_until_its_parked_caller_has_left(pod: Pod) -> None:
    """Whoever comes between the cut and its answer would be told of, and take away, another's."""
    pod.want(ref("step-1"), paused=True)
    await pod.until(lambda s: s.phase == "Paused")
    request = GenerateRequest.model_validate(BODY | {"on_pause": "wait"})
    first = asyncio.create_task(pod.generation.generate(request))
    while not pod.supervisor.gate.parked:
        await asyncio.sleep(0)
    second: list[asyncio.Task[GenerateResponse]] = []
    asyncio.get_running_loop().call_soon(
        lambda: second.append(asyncio.create_task(pod.generation.generate(request)))
    )
    cut = await pod.generation.cancel(request.request_id)
    assert cut == await first
    with pytest.raises(DuplicateRequest):
        await second[0]
    again = asyncio.create_task(pod.generation.generate(request))
    pod.want(ref("step-1"))
    assert (await again).finish_reason == "length"


@pytest.mark.parametrize("cut", [False, True])
async def test_an_id_is_used_again_while_the_one_before_is_answered(pod: Pod, cut: bool) -> None:
    """The gate has freed it; the earlier caller's watch still ends."""
    ends = asyncio.Event()

    async def watch() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await ends.wait()
            raise

    generate = pod.generation.generate
    first = asyncio.create_task(generate(GenerateRequest.model_validate(BODY), gone=watch))
    await running(pod)
    while pod.supervisor.gate.unfinished:
        await asyncio.sleep(0)
    assert not first.done()
    second = asyncio.create_task(generate(GenerateRequest.model_validate(LONG)))
    await running(pod)
    ends.set()
    assert (await first).finish_reason == "length"
    if cut:
        partial = await pod.generation.cancel("r")
        assert partial is not None, "the later one is not to be found any more"
        assert partial == await second
        assert partial.cancel_reason == "cancelled"
    else:
        assert len((await second).token_ids) == 3000
    assert await pod.generation.cancel("r") is None


async def test_a_parked_caller_that_goes_is_counted_as_cancelled(pod: Pod) -> None:
    pod.want(ref("step-1"), paused=True)
    await pod.until(lambda s: s.phase == "Paused")
    left = asyncio.Event()
    request = GenerateRequest.model_validate(BODY | {"on_pause": "wait"})
    asking = asyncio.create_task(pod.generation.generate(request, gone=left.wait))
    while not pod.supervisor.gate.parked:
        await asyncio.sleep(0)
    left.set()
    assert (await asking).cancel_reason == "cancelled"


async def call(pod: Pod, send) -> None:
    """The app itself, with a socket that the test plays."""
    asked = [{"type": "http.request", "body": json.dumps(LONG | {"stream": True}).encode()}]

    async def receive():
        return asked.pop() if asked else await asyncio.Event().wait()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/rollout/generate", "raw_path": b"/v1/rollout/generate", "query_string": b"",
        "root_path": "", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await make_data_app(pod.supervisor)(scope, receive, send)


async def test_a_reader_that_takes_nothing_is_cut(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SEND_TIMEOUT_S", 0.1)
    sent = []

    async def send(message) -> None:
        sent.append(message)
        if len(sent) > 2:  # its buffers are full
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        await call(pod, send)
        while pod.supervisor.gate.unfinished:
            await asyncio.sleep(0.01)
    assert sent[0]["type"] == "http.response.start"
    assert b"event: delta" in sent[1]["body"], "it has what it took"
    assert pod.engine.running == 0


async def test_heartbeats_while_no_token_comes(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "HEARTBEAT_S", 0.02)
    pod.engine.step_s = 60.0
    beats = asyncio.Event()

    async def send(message) -> None:
        if b": ping" in message.get("body", b""):
            beats.set()

    calling = asyncio.create_task(call(pod, send))
    async with asyncio.timeout(10):
        await beats.wait()
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)

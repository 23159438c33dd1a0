"""What a rollout request may ask for beside tokens: checked and fetched before the gate."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_pod.admission import GateStayedClosed
from rollout_pod.generation import Generation, make_budget
from rollout_pod.preparing import Preparing
from rollout_pod.protocol import CancelReason, GenerateRequest, Problem
from rollout_pod.server.data_app import make_data_app
from tests.support.fakes import fake_tokens
from tests.support.pods import Pod, running_pod

URL = "/v1/rollout/generate"
BODY: dict[str, Any] = {
    "request_id": "r",
    "prompt_token_ids": [1, 2],
    "sampling_params": {"max_tokens": 3},
}
IMAGE = BODY | {"multi_modal_data": {"image": ["data:,"]}}
EXPANDED = [1, 2, *[7] * 9]


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


async def fetching(pod: Pod, count: int = 1) -> None:
    while sum(call.startswith("prepare") for call in pod.engine.calls) < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lora": "nobody"}, "lora"),
        ({"lora": ""}, "lora"),
        ({"lora": 1}, "lora"),
        ({"multi_modal_data": []}, "multi_modal_data"),
        ({"multi_modal_data": {"audio": ["data:,"]}}, "multi_modal_data.audio"),
        ({"multi_modal_data": {"image": "data:,"}}, "multi_modal_data.image"),
        ({"multi_modal_data": {"image": [""]}}, "multi_modal_data.image.0"),
        ({"multi_modal_data": {"image": [None]}}, "multi_modal_data.image.0"),
        ({"multi_modal_data": {"video": ["data:,"] * 1025}}, "multi_modal_data.video"),
        ({"return_routed_experts": "often"}, "return_routed_experts"),
        (
            {
                "generated_token_ids": [5],
                "sampling_params": {"structured_outputs": {"regex": "a"}},
            },
            "sampling_params.structured_outputs",
        ),
    ],
)
async def test_a_refusal_names_the_field(
    data: httpx.AsyncClient, pod: Pod, changes: dict[str, Any], field: str
) -> None:
    answer = await data.post(URL, json=BODY | changes)
    told = Problem.model_validate_json(answer.content)
    assert answer.status_code == told.status == 422
    assert [error.field for error in told.errors] == [field]
    assert not pod.engine.requests


async def test_it_is_handed_over_as_it_was_prepared(data: httpx.AsyncClient, pod: Pod) -> None:
    body = IMAGE | {
        "generated_token_ids": [8, 9],
        "lora": "known",
        "sampling_params": {"max_tokens": 5, "seed": 2**63 - 1},
        "session_id": "s",
    }
    answer = (await data.post(URL, json=body)).json()
    assert len(answer["token_ids"]) == 3, "what was generated counts against max_tokens"
    (request,) = pod.engine.requests
    assert request.prompt_token_ids == [1, 2, 8, 9], "as the caller sent it"
    assert (request.num_generated, request.session_id) == (2, "s")
    assert request.prepared is not None
    assert (request.prepared.prompt, request.prepared.lora) == (EXPANDED, "known")
    assert pod.engine.calls[-1] == "prepare 2 known {'image': ['data:,']} False"


@pytest.mark.parametrize(
    ("seed", "shifted"),
    [
        (0, 2),
        (2**63 - 1, 1),
        (-5, 2**63 - 3),
        (-(2**63), 2),
        # random each time, and what the engine refuses
        (-1, -1),
        (2**63, 2**63),
        (-(2**63) - 1, -(2**63) - 1),
        (True, True),
        (None, None),
        ("7", "7"),
    ],
)
def test_what_goes_on_throws_other_dice(seed: Any, shifted: Any) -> None:
    request = GenerateRequest.model_validate(BODY | {"sampling_params": {"seed": seed}})
    assert make_budget(request, max_model_len=99).params["seed"] == seed
    request = request.model_copy(update={"generated_token_ids": [2, 3]})
    assert make_budget(request, max_model_len=99).params["seed"] == shifted


async def test_plain_requests_are_not_prepared(data: httpx.AsyncClient, pod: Pod) -> None:
    empty = {"multi_modal_data": {}, "lora": None, "return_routed_experts": False}
    answer = await data.post(URL, json=BODY | empty)
    assert answer.json()["token_ids"] == fake_tokens("base", [1, 2], 3)
    assert not any(call.startswith("prepare") for call in pod.engine.calls)
    assert pod.engine.requests[0].prepared is None


async def test_the_room_is_what_the_expanded_prompt_leaves(
    data: httpx.AsyncClient, pod: Pod
) -> None:
    def room(tokens: int) -> None:
        info = pod.supervisor.board.state.info
        assert info is not None
        info = info.model_copy(update={"max_model_len": tokens})
        pod.supervisor.board.change(info=info)

    body = IMAGE | {"sampling_params": {}}
    room(len(EXPANDED) + 2)
    assert len((await data.post(URL, json=body)).json()["token_ids"]) == 2
    generated = body | {"generated_token_ids": [5, 6]}
    assert (await data.post(URL, json=generated)).json()["finish_reason"] == "length"
    room(len(EXPANDED))
    answer = await data.post(URL, json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "prompt_too_long")


async def test_what_is_being_fetched_delays_no_pause(data: httpx.AsyncClient, pod: Pod) -> None:
    pod.engine.media_gate = asyncio.Event()
    waits = asyncio.create_task(data.post(URL, json=IMAGE | {"on_pause": "wait"}))
    returns = asyncio.create_task(data.post(URL, json=IMAGE | {"request_id": "q"}))
    await fetching(pod, 2)
    pod.want(paused=True)
    await pod.until(lambda s: s.phase == "Paused")
    answer = await data.post(URL, json=IMAGE | {"request_id": "late"})
    assert answer.json()["cancel_reason"] == "refused"
    assert sum(call.startswith("prepare") for call in pod.engine.calls) == 2, "nothing is fetched"
    pod.engine.media_gate.set()
    assert (await returns).json()["cancel_reason"] == "refused"
    assert not pod.engine.requests
    pod.want()
    assert len((await waits).json()["token_ids"]) == 3


async def test_two_of_one_id_while_one_is_fetched(data: httpx.AsyncClient, pod: Pod) -> None:
    pod.engine.media_gate = asyncio.Event()
    first = asyncio.create_task(data.post(URL, json=IMAGE))
    await fetching(pod, 1)
    assert (await data.post(URL, json=IMAGE)).status_code == 409
    pod.engine.media_gate.set()
    assert (await first).status_code == 200
    assert len(pod.engine.requests) == 1


async def test_what_is_being_fetched_can_be_cut(data: httpx.AsyncClient, pod: Pod) -> None:
    pod.engine.media_gate = asyncio.Event()
    asked = asyncio.create_task(data.post(URL, json=IMAGE))
    await fetching(pod, 1)
    cut = await data.delete(f"/v1/rollout/requests/{IMAGE['request_id']}")
    assert (cut.status_code, cut.json()["cancel_reason"]) == (200, "cancelled")
    async with asyncio.timeout(5):  # the host of the image never answers
        assert (await asked).json() == cut.json()
    assert not pod.engine.requests
    pod.engine.media_gate.set()
    assert (await data.post(URL, json=IMAGE)).json()["cancel_reason"] is None, "the next one runs"


async def test_nothing_is_fetched_for_a_caller_who_has_gone(pod: Pod) -> None:
    pod.engine.media_gate = asyncio.Event()
    generation = Generation(pod.engine, pod.supervisor.gate, max_model_len=lambda: 100)
    request, left = GenerateRequest.model_validate(IMAGE), asyncio.Event()

    async def gone() -> None:
        await left.wait()

    asked = asyncio.create_task(generation.generate(request, gone=gone))
    await fetching(pod, 1)
    left.set()
    async with asyncio.timeout(5):
        assert (await asked).cancel_reason is CancelReason.CANCELLED
    again = asyncio.create_task(generation.generate(request))
    await fetching(pod, 2)
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    pod.engine.media_gate.set()
    assert (await generation.generate(request)).cancel_reason is None, "its id is free"


async def test_what_was_fetched_for_long_waits_the_less(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.engine.media_gate = asyncio.Event()
    gate = pod.supervisor.gate
    generation = Generation(pod.engine, gate, max_model_len=lambda: 100)
    pass_gate, left = gate.generate, []

    async def noted(*args: Any, timeout_s: float, **more: Any) -> Any:
        left.append(timeout_s)
        return await pass_gate(*args, timeout_s=timeout_s, **more)

    monkeypatch.setattr(gate, "generate", noted)
    request = GenerateRequest.model_validate(IMAGE | {"on_pause": "wait", "timeout_s": 0.2})
    asked = asyncio.create_task(generation.generate(request))
    await fetching(pod, 1)
    pod.want(paused=True)
    await pod.until(lambda s: s.phase == "Paused")
    await asyncio.sleep(0.25)
    pod.engine.media_gate.set()
    with pytest.raises(GateStayedClosed):
        await asked
    assert left == [0.0]


async def test_what_compiles_can_be_cut(
    data: httpx.AsyncClient, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on = threading.Event(), threading.Event()

    def compile_slowly(raw: Any, *, max_tokens: int) -> int:
        compiling.set()
        assert go_on.wait(10)
        return max_tokens

    monkeypatch.setattr(pod.engine, "sampling_params", compile_slowly)
    body = BODY | {"sampling_params": {"max_tokens": 3, "structured_outputs": {"regex": "a+"}}}
    asked = asyncio.create_task(data.post(URL, json=body))
    while not compiling.is_set():
        await asyncio.sleep(0.001)
    assert (await data.post(URL, json=body)).json()["code"] == "duplicate_request"
    cut = await data.delete(f"/v1/rollout/requests/{body['request_id']}")
    go_on.set()
    assert (cut.status_code, cut.json()["cancel_reason"]) == (200, "cancelled")
    assert (await asked).json() == cut.json()
    assert not pod.engine.requests


@pytest.mark.parametrize(
    ("params", "generated", "least"),
    [
        ({"max_tokens": 1000, "min_tokens": 500}, 0, 97),  # the model has room for no more
        ({"min_tokens": 500}, 0, 97),
        ({"max_tokens": 1000, "min_tokens": 500}, 1, 96),
        ({"max_tokens": 50, "min_tokens": 60}, 0, 60),  # a mistake: for the engine to refuse
        ({"max_tokens": 50, "min_tokens": 40}, 0, 40),
        ({"max_tokens": 50, "min_tokens": 40}, 30, 10),
    ],
)
def test_the_least_is_no_more_than_there_is_room_for(
    params: dict[str, Any], generated: int, least: int
) -> None:
    request = GenerateRequest.model_validate(
        BODY | {"sampling_params": params, "generated_token_ids": [1] * generated}
    )
    assert make_budget(request, max_model_len=99).params["min_tokens"] == least


async def test_a_spent_budget_forgives_no_wrong_name(data: httpx.AsyncClient) -> None:
    spent = BODY | {"generated_token_ids": [1] * 9}
    wrong = spent | {"sampling_params": {"max_tokens": 3, "bogus": 1}}
    assert (await data.post(URL, json=wrong)).status_code == 422
    right = spent | {"sampling_params": {"max_tokens": 3}}
    assert (await data.post(URL, json=right)).json()["finish_reason"] == "length"


async def test_what_comes_besides_tokens(data: httpx.AsyncClient) -> None:
    told = {
        "prompt_log_probs": [None, [{"token_id": 2, "log_prob": -0.25, "rank": 1}]],
        "routed_experts": {"shape": [1, 1, 2], "dtype": "uint8", "data": "BQY="},
    }
    answer = (await data.post(URL, json=BODY | {"return_routed_experts": True})).json()
    assert {name: answer[name] for name in told} == told
    streamed = await data.post(URL, json=BODY | {"return_routed_experts": True, "stream": True})
    *deltas, end = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.text.splitlines()
        if line.startswith("data: ")
    ]
    assert {name: end[name] for name in told} == told
    assert all(not set(told) & set(delta) for delta in deltas)
    plain = (await data.post(URL, json=BODY)).json()
    assert plain["prompt_log_probs"] is plain["routed_experts"] is None


@pytest.mark.parametrize("turns", range(1, 8))
async def test_what_is_cut_in_the_moment_in_which_it_is_ready_is_cut(turns: int) -> None:
    """As long as it can be found it can be cut: whoever did was told so."""

    async def work() -> str:
        return "ready"

    preparing = Preparing(GenerateRequest.model_validate(BODY))
    task = asyncio.create_task(preparing.finished(work(), None))
    for _ in range(turns):
        await asyncio.sleep(0)
    was_ready = task.done()
    preparing.cut.set()
    assert await task == ("ready" if was_ready else None)

"""``RolloutClient.generate`` against scripted pods (no network)."""

import asyncio
import json

import httpx
import pytest

from rollout_client import (
    DeadlineExceeded,
    EngineFailed,
    ProtocolError,
    RequestRefused,
    RolloutClient,
)
from rollout_pod.protocol import Problem

PROMPT = [5, 6, 7]
WHOLE = list(range(100, 120))


class Pod:
    """A pod that continues WHOLE; each step of its script shapes one answer."""

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.asked: list[dict] = []
        self.hosts: list[str] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append(body)
        self.hosts.append(request.url.host)
        step = self.script.pop(0) if self.script else tokens(None)
        result = step(body)
        return await result if asyncio.iscoroutine(result) else result


def tokens(count: int | None, *, version="base", cut=False, reason="paused", **changes):
    """Answer with ``count`` more tokens, or all that the budget leaves."""

    def step(body: dict) -> httpx.Response:
        at, budget = len(body["generated_token_ids"]), body["sampling_params"]["max_tokens"]
        new = WHOLE[at : budget if count is None else at + count]
        document = {
            "token_ids": new,
            "log_probs": [-t / 100 for t in new],
            "is_cancel": cut,
            "request_id": body["request_id"],
            "finish_reason": "abort" if cut else "length",
            "stop_reason": None,
            "cancel_reason": reason if cut else None,
            "weight_versions": [{"version": version, "step": None, "start": 0, "end": len(new)}],
            "attempt": body["attempt"],
            "generation": 1,
            "num_cached_tokens": 0,
        }
        return httpx.Response(200, json=document | changes)

    return step


def problem(status: int, code: str, *, headers=None):
    def step(body: dict) -> httpx.Response:
        document = Problem(title="no", status=status, code=code, detail="a detail")
        return httpx.Response(status, content=document.model_dump_json(), headers=headers)

    return step


def lost(body: dict) -> httpx.Response:
    raise httpx.ReadError("connection reset")


async def never(body: dict) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def client(pod: Pod, endpoints="http://pod", **settings) -> RolloutClient:
    return RolloutClient(endpoints, transport=httpx.MockTransport(pod), **settings)


async def run(pod: Pod, *, max_tokens=20, deadline_s=20.0, settings=None, **args):
    async with client(pod, **(settings or {})) as api:
        return await api.generate(PROMPT, {"max_tokens": max_tokens}, deadline_s=deadline_s, **args)


async def test_goes_on_from_the_partial_over_a_pause_and_an_update():
    partials = []
    pod = Pod(tokens(8, cut=True), tokens(5, version="base", cut=True), tokens(None, version="s1"))
    rollout = await run(pod, on_partial=partials.append, request_id="r1", session_id="s")
    assert list(rollout.token_ids) == WHOLE
    assert list(rollout.log_probs) == [-t / 100 for t in WHOLE]
    assert [(s.version, s.start, s.end) for s in rollout.weight_versions] == [
        ("base", 0, 13),
        ("s1", 13, 20),
    ]
    assert rollout.attempts == 3
    assert [len(p.token_ids) for p in partials] == [8, 13]
    assert [a["generated_token_ids"] for a in pod.asked] == [[], WHOLE[:8], WHOLE[:13]]
    assert [a["attempt"] for a in pod.asked] == [1, 2, 3]
    assert {a["request_id"] for a in pod.asked} == {"r1"}
    # The budget is the whole rollout's in every attempt; the pod subtracts what is held.
    assert {a["sampling_params"]["max_tokens"] for a in pod.asked} == {20}
    assert {a["on_pause"] for a in pod.asked} == {"wait"}


async def test_cut_on_the_last_token_asks_nobody_again():
    pod = Pod(tokens(20, cut=True))
    rollout = await run(pod)
    assert (list(rollout.token_ids), rollout.finish_reason) == (WHOLE, "length")
    assert len(pod.asked) == 1


async def test_cut_before_the_first_token_tells_the_caller_and_goes_on():
    partials = []
    rollout = await run(Pod(tokens(0, cut=True)), on_partial=partials.append)
    assert [p.token_ids for p in partials] == [()]
    assert list(rollout.token_ids) == WHOLE


@pytest.mark.parametrize(
    "failure",
    [
        lost,
        problem(503, "gate_closed", headers={"retry-after": "0"}),
        problem(503, "draining"),
        problem(503, "not_ready"),
        problem(500, "engine_error"),
        tokens(3, finish_reason="error"),
        lambda body: httpx.Response(502, text="bad gateway"),
        lambda body: httpx.Response(429, headers={"retry-after": "soon"}),
    ],
)
async def test_a_passing_failure_loses_nothing(failure):
    pod = Pod(tokens(4, cut=True), failure)
    rollout = await run(pod)
    assert list(rollout.token_ids) == WHOLE
    assert len(rollout.log_probs) == 20
    assert rollout.attempts == 3
    assert pod.asked[2]["generated_token_ids"] == WHOLE[:4]


async def test_retry_after_is_obeyed():
    loop = asyncio.get_running_loop()
    started = loop.time()
    await run(Pod(problem(503, "gate_closed", headers={"retry-after": "0.7"})))
    assert loop.time() - started >= 0.7


async def test_a_duplicate_is_waited_out_only_after_a_lost_connection():
    rollout = await run(Pod(lost, problem(409, "duplicate_request")))
    assert list(rollout.token_ids) == WHOLE
    with pytest.raises(RequestRefused, match="duplicate_request") as refused:
        await run(Pod(problem(409, "duplicate_request")))
    assert refused.value.status == 409


async def test_a_refusal_is_typed_and_carries_the_partial():
    with pytest.raises(RequestRefused, match="a detail") as refused:
        await run(Pod(tokens(4, cut=True), problem(422, "invalid_field")))
    assert list(refused.value.partial.token_ids) == WHOLE[:4]
    assert refused.value.problem is not None
    assert refused.value.problem.code == "invalid_field"


async def test_the_deadline_carries_the_partial_and_the_last_failure():
    with pytest.raises(DeadlineExceeded) as late:
        await run(Pod(tokens(4, cut=True), never), deadline_s=0.3)
    assert list(late.value.partial.token_ids) == WHOLE[:4]
    with pytest.raises(DeadlineExceeded, match="draining: a detail"):
        await run(Pod(*[problem(503, "draining")] * 50), deadline_s=0.3)


async def test_a_timeout_of_the_callers_own_is_not_taken_for_the_deadline():
    def impatient(partial):
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await run(Pod(tokens(4, cut=True)), on_partial=impatient)


async def test_engine_errors_in_a_row_end_it_and_progress_starts_the_count_again():
    dead = problem(500, "engine_error", headers={"retry-after": "0"})
    with pytest.raises(EngineFailed) as failed:
        await run(Pod(tokens(4, cut=True), dead, dead), settings={"engine_failures": 2})
    assert list(failed.value.partial.token_ids) == WHOLE[:4]
    pod = Pod(dead, tokens(4, cut=True), dead)
    rollout = await run(pod, settings={"engine_failures": 2})
    assert list(rollout.token_ids) == WHOLE


@pytest.mark.parametrize(
    "answer",
    [
        lambda body: httpx.Response(200, text="<html>"),
        tokens(None, log_probs=[0.0]),
        lambda body: tokens(21)(body | {"sampling_params": {"max_tokens": 99}}),
    ],
    ids=["not a document", "lengths differ", "over budget"],
)
async def test_an_answer_that_is_none_is_typed(answer):
    with pytest.raises(ProtocolError):
        await run(Pod(answer), max_tokens=19)


async def test_bad_arguments_are_told_before_anything_is_sent():
    pod = Pod()
    async with client(pod) as api:
        with pytest.raises(ValueError, match="prompt_token_ids"):
            await api.generate([], {"max_tokens": 1})
    assert pod.asked == []
    with pytest.raises(ValueError, match="endpoints"):
        RolloutClient([])


async def test_a_session_stays_with_one_endpoint_and_leaves_a_lost_one():
    hosts = [f"http://pod-{i}" for i in range(4)]
    seen = set()
    for session in range(16):
        pod = Pod(tokens(4, cut=True), lost)
        await run(pod, session_id=str(session), settings={"endpoints": hosts})
        assert pod.hosts[0] == pod.hosts[1] != pod.hosts[2]
        again = Pod()
        await run(again, session_id=str(session), settings={"endpoints": hosts[::-1]})
        assert again.hosts == pod.hosts[:1]
        seen.add(pod.hosts[0])
    assert len(seen) > 1


async def test_max_concurrency_bounds_what_is_on_the_wire():
    now = most = 0

    async def slow(body: dict) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return tokens(None)(body)

    async with client(Pod(*[slow] * 9), max_concurrency=3) as api:
        await asyncio.gather(*(api.generate(PROMPT, {"max_tokens": 4}) for _ in range(9)))
    assert most == 3


async def test_the_callers_params_are_not_changed():
    params = {"max_tokens": 20, "stop_token_ids": [1]}
    async with client(Pod(tokens(4, cut=True))) as api:
        await api.generate(PROMPT, params)
    assert params == {"max_tokens": 20, "stop_token_ids": [1]}


async def test_every_attempt_asks_for_the_same():
    pod = Pod(tokens(4, cut=True), tokens(None))
    data = {"image": ["https://host/image.png"]}
    await run(pod, lora="one", multi_modal_data=data)
    assert [body["lora"] for body in pod.asked] == ["one", "one"]
    assert [body["multi_modal_data"]["image"] for body in pod.asked] == [data["image"]] * 2
    assert [body["prompt_token_ids"] for body in pod.asked] == [PROMPT] * 2


async def test_a_grammar_begins_anew():
    pod = Pod(tokens(4, cut=True), tokens(None))
    partials = []
    async with client(pod) as api:
        params = {"max_tokens": 20, "structured_outputs": {"regex": "a*"}}
        rollout = await api.generate(PROMPT, params, on_partial=partials.append)
    assert [body["generated_token_ids"] for body in pod.asked] == [[], []]
    assert [partial.token_ids for partial in partials] == [tuple(WHOLE[:4])]
    assert rollout.token_ids == tuple(WHOLE)
    assert len(rollout.log_probs) == rollout.weight_versions[-1].end == 20
    assert rollout.attempts == 2

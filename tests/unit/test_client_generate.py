"""``RolloutClient`` against scripted replicas (no network)."""

import asyncio
import json
import pickle
import subprocess
import sys

import httpx
import pytest

from rollout_client import (
    DeadlineExceeded,
    EngineFailed,
    GroupFailed,
    Policy,
    ProtocolError,
    RequestRefused,
    RetriesExhausted,
    Rollout,
    RolloutCancelled,
    RolloutClient,
    RolloutError,
    SyncRolloutClient,
)
from tests.support.fake_fleet import Act, FakeFleet, FakeReplica
from tests.support.fakes import fake_tokens

PROMPT = [5, 6, 7]
WHOLE = fake_tokens("base", PROMPT, 20)
LOST = Act(how="lost", tokens=0)
NEVER = Act(how="status", code="draining")


def status(code: int, name: str = "draining", **headers: str) -> Act:
    return Act(how="status", status=code, code=name, headers=tuple(headers.items()))


def one(*script: Act) -> FakeFleet:
    return FakeFleet(FakeReplica(script=list(script)))


async def run(pods: FakeFleet, *, n: int = 20, settings: dict | None = None, **more) -> Rollout:
    async with RolloutClient(pods.urls, transport=pods, **(settings or {})) as api:
        return await api.generate(PROMPT, {"max_tokens": n}, **more)


async def test_it_goes_on_until_the_rollout_is_whole():
    partials: list[Rollout] = []
    pods = one(Act(tokens=8), Act(tokens=5, becomes="s1"))
    rollout = await run(pods, on_partial=partials.append, request_id="r1", session_id="s")
    rest = fake_tokens("s1", [*PROMPT, *WHOLE[:13]], 7)
    assert list(rollout.token_ids) == [*WHOLE[:13], *rest]
    assert [(s.version, s.start, s.end) for s in rollout.weight_versions] == [
        ("base", 0, 13),
        ("s1", 13, 20),
    ]
    assert rollout.attempts == 3
    assert [len(p.token_ids) for p in partials] == [8, 13]
    assert [a["generated_token_ids"] for a in pods.asked] == [[], WHOLE[:8], WHOLE[:13]]
    assert [a["attempt"] for a in pods.asked] == [1, 2, 3]
    assert {a["request_id"] for a in pods.asked} == {"r1"}
    assert {a["session_id"] for a in pods.asked} == {"s"}
    # The budget is the whole rollout's in every attempt; the pod subtracts what is held.
    assert {a["sampling_params"]["max_tokens"] for a in pods.asked} == {20}
    assert {a["on_pause"] for a in pods.asked} == {"wait"}
    assert {a["stream"] for a in pods.asked} == {True}


async def test_cut_on_the_last_token_asks_nobody_again():
    pods = one(Act(tokens=20, how="lost", tells=False))
    rollout = await run(pods)
    assert (list(rollout.token_ids), rollout.finish_reason) == (WHOLE, "length")
    assert len(pods.asked) == 1


async def test_cut_before_the_first_token_tells_the_caller_and_goes_on():
    partials: list[Rollout] = []
    rollout = await run(one(Act(tokens=0)), on_partial=partials.append)
    assert [p.token_ids for p in partials] == [()]
    assert list(rollout.token_ids) == WHOLE


async def test_retry_after_is_obeyed_by_every_rollout_of_the_client():
    loop = asyncio.get_running_loop()
    started = loop.time()
    pods = one(status(503, "gate_closed", **{"retry-after": "0.7"}))
    async with RolloutClient(pods.urls, transport=pods) as api:
        first = asyncio.ensure_future(api.generate(PROMPT, {"max_tokens": 2}))
        while not pods.asked:
            await asyncio.sleep(0)
        await asyncio.gather(first, api.generate(PROMPT, {"max_tokens": 2}))
    assert loop.time() - started >= 0.7
    assert len(pods.asked) == 3


async def test_another_replica_is_asked_at_once_where_one_says_later():
    closed = [status(503, "gate_closed", **{"retry-after": "50"}) for _ in range(3)]
    pods = FakeFleet(FakeReplica(script=closed), FakeReplica())
    async with RolloutClient(pods.urls, transport=pods) as api:
        for session in range(8):
            rollout = await api.generate(
                PROMPT, {"max_tokens": 20}, session_id=str(session), deadline_s=20
            )
            assert list(rollout.token_ids) == WHOLE
    assert pods.hosts.count(0) <= 1
    assert {a["timeout_s"] for a in pods.asked} == {5.0}, "not held long where there are others"


async def test_a_duplicate_is_waited_out_only_after_a_lost_connection():
    rollout = await run(one(LOST, status(409, "duplicate_request")))
    assert list(rollout.token_ids) == WHOLE
    with pytest.raises(RequestRefused, match="duplicate_request") as refused:
        await run(one(status(409, "duplicate_request")))
    assert refused.value.status == 409


async def test_a_refusal_is_typed_and_carries_the_partial():
    with pytest.raises(RequestRefused, match="a detail") as refused:
        await run(one(Act(tokens=4), status(422, "invalid_field")))
    assert list(refused.value.partial.token_ids) == WHOLE[:4]
    assert refused.value.problem is not None
    assert refused.value.problem.code == "invalid_field"


async def test_cut_by_its_id_is_typed_and_carries_the_partial():
    with pytest.raises(RolloutCancelled) as cancelled:
        await run(one(Act(tokens=4, reason="cancelled")))
    assert list(cancelled.value.partial.token_ids) == WHOLE[:4]


class Hanging(FakeFleet):
    """Sends so many tokens, and then nothing."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        stream = answer.stream

        async def slow():
            async for chunk in stream:
                yield chunk
            await asyncio.Event().wait()

        return httpx.Response(200, headers=answer.headers, content=slow())


async def test_at_the_deadline_the_running_attempts_tokens_are_in_the_partial():
    pods = Hanging(FakeReplica(script=[Act(how="eof", tokens=4)]))
    with pytest.raises(DeadlineExceeded, match=r"not finished after 0\.3 s") as late:
        await run(pods, deadline_s=0.3)
    partial = late.value.partial
    assert list(partial.token_ids) == WHOLE[:4]
    assert [(s.start, s.end) for s in partial.weight_versions] == [(0, 4)]
    assert partial.attempts == 1


async def test_the_deadline_says_what_failed_last():
    with pytest.raises(DeadlineExceeded, match="draining: a detail") as late:
        await run(one(Act(tokens=4), *[NEVER] * 500), deadline_s=0.3)
    assert list(late.value.partial.token_ids) == WHOLE[:4]


async def test_a_gate_that_stays_closed_ends_at_the_deadline_and_not_before():
    closed = [status(503, "gate_closed", **{"retry-after": "0"}) for _ in range(500)]
    with pytest.raises(DeadlineExceeded, match="gate_closed"):
        await run(one(*closed), deadline_s=1.0, settings={"policy": Policy(failures=2)})


async def test_too_many_failures_in_a_row_end_it():
    with pytest.raises(RetriesExhausted, match="3 attempts in a row brought no token") as failed:
        await run(one(Act(tokens=4), *[LOST] * 9), settings={"policy": Policy(failures=3)})
    assert list(failed.value.partial.token_ids) == WHOLE[:4]


async def test_a_timeout_of_the_callers_own_is_not_taken_for_the_deadline():
    def impatient(partial):
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await run(one(Act(tokens=4)), on_partial=impatient)


async def test_engine_errors_in_a_row_end_it_and_progress_starts_the_count_again():
    dead = status(500, "engine_error", **{"retry-after": "0"})
    settings = {"policy": Policy(engine_failures=2)}
    with pytest.raises(EngineFailed) as failed:
        await run(one(Act(tokens=4), dead, dead), settings=settings)
    assert list(failed.value.partial.token_ids) == WHOLE[:4]
    rollout = await run(one(dead, Act(tokens=4), dead), settings=settings)
    assert list(rollout.token_ids) == WHOLE


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"token_ids": [1]}),
        httpx.Response(
            200,
            headers={"content-type": "text/event-stream"},
            text='event: delta\ndata: {"token_ids": [1, 2]}\n\n',
        ),
        httpx.Response(
            200,
            headers={"content-type": "text/event-stream"},
            text='event: delta\ndata: {"token_ids": [1,2,3], "log_probs": [0,0,0], '
            '"version": "v", "step": 1}\n\n',
        ),
    ],
    ids=["a page", "json", "no delta", "over budget"],
)
async def test_an_answer_that_is_none_is_typed(answer):
    transport = httpx.MockTransport(lambda request: answer)
    async with RolloutClient("http://pod", transport=transport) as api:
        with pytest.raises(ProtocolError, match="http://pod/v1/rollout/generate"):
            await api.generate(PROMPT, {"max_tokens": 2})


async def test_bad_arguments_are_told_before_anything_is_sent():
    pods = one()
    async with RolloutClient(pods.urls, transport=pods) as api:
        with pytest.raises(ValueError, match="prompt_ids: empty"):
            await api.generate([], {"max_tokens": 1})
        with pytest.raises(ValueError, match="request_id"):
            await api.generate(PROMPT, {"max_tokens": 1}, request_id="with space")
        with pytest.raises(ValueError, match="colour"):
            await api.generate(PROMPT, {"max_tokens": 1}, fields={"colour": 1})
        with pytest.raises(ValueError, match="n: must be at least 1"):
            await api.generate_group(PROMPT, {"max_tokens": 1}, 0)
        with pytest.raises(ValueError, match="request_ids: 1 for 2 prompts"):
            await api.generate_batch([PROMPT] * 2, {"max_tokens": 1}, request_ids=["a"])
    assert pods.asked == []
    with pytest.raises(ValueError, match="endpoints"):
        RolloutClient([])
    with pytest.raises(ValueError, match="no URL such as"):
        RolloutClient("qwen:8000")


async def test_further_fields_are_passed_on():
    pods = one()
    await run(pods, fields={"priority": 3, "cache_salt": "x"})
    assert (pods.asked[0]["priority"], pods.asked[0]["cache_salt"]) == (3, "x")


async def test_a_session_stays_with_one_replica_and_leaves_a_lost_one():
    seen = set()
    for session in range(16):
        pods = FakeFleet(*(FakeReplica(script=[Act(tokens=4), LOST]) for _ in range(4)))
        await run(pods, session_id=str(session))
        assert pods.hosts[0] == pods.hosts[1] != pods.hosts[2]
        again = FakeFleet(*(FakeReplica() for _ in range(4)))
        async with RolloutClient(again.urls[::-1], transport=again) as api:
            for _ in range(2):
                await api.generate(PROMPT, {"max_tokens": 2}, session_id=str(session))
        assert again.hosts == pods.hosts[:1] * 2
        seen.add(pods.hosts[0])
    assert len(seen) > 1


async def test_sessions_go_where_the_fewest_requests_are():
    gate = asyncio.Event()
    pods = FakeFleet(*(FakeReplica() for _ in range(3)), hook=lambda index: gate.wait())
    async with RolloutClient(pods.urls, transport=pods) as api:
        tasks = [asyncio.ensure_future(api.generate(PROMPT, {"max_tokens": 2})) for _ in range(9)]
        while len(pods.hosts) < 9:
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)
    assert sorted(pods.hosts) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


async def test_a_rollout_waits_for_a_replica_that_is_new_enough():
    pods = FakeFleet(FakeReplica(step=3), FakeReplica(step=4, ready=False))
    async with RolloutClient(pods.urls, transport=pods) as api:
        with pytest.raises(DeadlineExceeded, match="holds step 4 or later"):
            await api.generate(PROMPT, {"max_tokens": 2}, min_step=4, deadline_s=0.3)
        assert pods.asked == []
        waiting = asyncio.ensure_future(api.generate(PROMPT, {"max_tokens": 2}, min_step=4))
        pods.replicas[1].ready = True
        rollout = await waiting
    assert pods.hosts == [1]
    assert rollout.weight_versions[0].step == 4


async def test_max_concurrency_bounds_what_is_on_the_wire():
    now = most = 0

    async def slow(index: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    pods = FakeFleet(FakeReplica(), hook=slow)
    async with RolloutClient(pods.urls, transport=pods, max_concurrency=3) as api:
        await asyncio.gather(*(api.generate(PROMPT, {"max_tokens": 4}) for _ in range(9)))
    assert most == 3


async def test_the_callers_params_are_not_changed():
    params = {"max_tokens": 20, "stop_token_ids": [1]}
    pods = one(Act(tokens=4))
    async with RolloutClient(pods.urls, transport=pods) as api:
        await api.generate(PROMPT, params)
    assert params == {"max_tokens": 20, "stop_token_ids": [1]}


async def test_a_grammar_begins_anew():
    pods = one(Act(tokens=4, reason="paused"))
    partials = []
    async with RolloutClient(pods.urls, transport=pods) as api:
        params = {"max_tokens": 20, "structured_outputs": {"regex": "a*"}}
        rollout = await api.generate(PROMPT, params, on_partial=partials.append)
    assert [asked["generated_token_ids"] for asked in pods.asked] == [[], []]
    assert [list(partial.token_ids) for partial in partials] == [WHOLE[:4]]
    assert list(rollout.token_ids) == WHOLE
    assert len(rollout.log_probs) == rollout.weight_versions[-1].end == 20
    assert rollout.attempts == 2


@pytest.mark.parametrize("how", ["lost", "error"])
async def test_a_grammar_on_a_broken_replica_is_given_up(how):
    pods = one(*[Act(how=how, tokens=2)] * 50)
    params = {"max_tokens": 20, "structured_outputs": {"regex": "a*"}}
    policy = Policy(failures=3, engine_failures=3)
    async with RolloutClient(pods.urls, transport=pods, policy=policy) as api:
        with pytest.raises(RolloutError):
            await api.generate(PROMPT, params)
    assert len(pods.asked) <= 4


async def test_every_attempt_asks_for_the_same():
    pods = one(Act(tokens=4, reason="paused"))
    data = {"image": ["https://host/image.png"]}
    async with RolloutClient(pods.urls, transport=pods) as api:
        fields = {"lora": "one", "multi_modal_data": data}
        await api.generate(PROMPT, {"max_tokens": 20}, fields=fields)
    assert [asked["lora"] for asked in pods.asked] == ["one", "one"]
    assert [asked["multi_modal_data"]["image"] for asked in pods.asked] == [data["image"]] * 2
    assert [asked["prompt_token_ids"] for asked in pods.asked] == [PROMPT] * 2


async def test_a_group_is_one_prompt_on_one_replica():
    pods = FakeFleet(*(FakeReplica() for _ in range(3)))
    async with RolloutClient(pods.urls, transport=pods) as api:
        group = await api.generate_group(PROMPT, {"max_tokens": 20, "seed": 7}, 4, "g")
    assert [r.request_id for r in group] == ["g-0", "g-1", "g-2", "g-3"]
    assert len(set(pods.hosts)) == 1
    assert sorted(a["sampling_params"]["seed"] for a in pods.asked) == [7, 8, 9, 10]
    assert {a["session_id"] for a in pods.asked} == {"g"}


async def test_a_group_that_fails_in_part_hides_nothing():
    pods = one(Act(tokens=20), Act(tokens=4, reason="cancelled"))
    async with RolloutClient(pods.urls, transport=pods, max_concurrency=1) as api:
        with pytest.raises(GroupFailed, match="1 of 2 rollouts of group g failed") as failed:
            await api.generate_group(PROMPT, {"max_tokens": 20}, 2, "g")
    whole, cut = failed.value.results
    assert isinstance(whole, Rollout)
    assert isinstance(cut, RolloutError)
    assert (len(whole.token_ids), len(cut.partial.token_ids)) == (20, 4)


async def test_a_batch_keeps_its_order_and_shows_a_bar(capsys):
    pods = one(Act(tokens=4, reason="cancelled"))
    async with RolloutClient(pods.urls, transport=pods, max_concurrency=1) as api:
        prompts = [[n + 1] for n in range(5)]
        results = await api.generate_batch(
            prompts, [{"max_tokens": n + 5} for n in range(5)], progress=True
        )
    assert isinstance(results[0], RolloutCancelled)
    for n, result in enumerate(results[1:], start=1):
        assert list(result.token_ids) == fake_tokens("base", prompts[n], n + 5)
    shown = capsys.readouterr()
    assert not shown.out
    assert "5/5" in shown.err
    assert "1 failed" in shown.err


def test_the_sync_client_does_the_same():
    pods = one(Act(tokens=8), LOST)
    with SyncRolloutClient(pods.urls, transport=pods) as api:
        assert list(api.generate(PROMPT, {"max_tokens": 20}).token_ids) == WHOLE
        assert len(api.generate_group(PROMPT, {"max_tokens": 3}, 2)) == 2
        assert len(api.generate_batch([PROMPT], {"max_tokens": 3})) == 1
    api.close()
    with pytest.raises(RuntimeError, match="closed"):
        api.generate(PROMPT, {"max_tokens": 20})
    with pytest.raises(ValueError, match="endpoints"):
        SyncRolloutClient([])


def test_the_trainers_side_is_there_when_asked_for():
    import rollout_client
    from rollout_client import trainer

    assert rollout_client.ServerAdapter is trainer.ServerAdapter
    assert rollout_client.SyncServerAdapter is trainer.SyncServerAdapter
    with pytest.raises(AttributeError, match="Nothing"):
        _ = rollout_client.Nothing


def test_the_client_is_light():
    code = "import rollout_client, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    heavy = {"torch", "numpy", "transformers", "vllm", "kubernetes", "fastapi", "zmq"}
    assert not loaded & heavy


async def test_a_caller_that_gives_up_gets_what_there_is():
    wants_it = False
    pods = one(Act(tokens=8), Act(tokens=5))

    def on_partial(partial: Rollout) -> None:
        nonlocal wants_it
        wants_it = len(partial.token_ids) > 8

    with pytest.raises(RolloutCancelled, match="given up") as given_up:
        await run(pods, on_partial=on_partial, give_up=lambda: wants_it)
    assert list(given_up.value.partial.token_ids) == WHOLE[:13]
    assert given_up.value.partial.finish_reason is None
    assert len(pods.asked) == 2


async def test_giving_up_loses_no_rollout_that_is_whole():
    pods = one(Act(tokens=20))
    rollout = await run(pods, give_up=lambda: True)
    assert (list(rollout.token_ids), rollout.finish_reason) == (WHOLE, "length")


async def test_errors_keep_their_partial_when_they_are_pickled():
    pods = one(Act(tokens=8, how="lost"), status(422, "invalid_field"))
    with pytest.raises(RequestRefused) as refused:
        await run(pods)
    other = pickle.loads(pickle.dumps(refused.value))
    assert (type(other), str(other)) == (RequestRefused, str(refused.value))
    assert (other.partial, other.status) == (refused.value.partial, 422)
    assert other.problem == refused.value.problem
    group = GroupFailed("1 of 2", results=[other, refused.value.partial])
    again = pickle.loads(pickle.dumps(group))
    assert isinstance(again.results[0], RequestRefused)
    assert again.results[0].partial == again.results[1]

"""Thousands of bad days: each rollout is an uninterrupted greedy run, token for token."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tenacity import wait_none

from rollout_client import Policy, Rollout, RolloutClient, client, fleet, planning
from tests.support.fake_fleet import Act, FakeFleet, FakeReplica, check_rollout

PROMPT = [5, 6, 7]
EOS = 3_000  # of 50,000: a rollout of forty tokens often ends by itself

COUNTS = st.integers(0, 9)
VERSIONS = st.sampled_from(["base", "s1", "s2"])
CUTS = st.builds(
    Act,
    how=st.just("end"),
    tokens=COUNTS,
    reason=st.sampled_from(["paused", "updating", "draining", "refused"]),
    size=st.integers(1, 4),
    becomes=st.none() | VERSIONS,
)
BREAKS = st.builds(
    Act,
    how=st.sampled_from(["lost", "broken", "silent", "eof", "error", "refused"]),
    tokens=COUNTS,
    size=st.integers(1, 4),
    becomes=st.none() | VERSIONS,
)
LAST = st.builds(Act, how=st.just("no_end"), size=st.integers(1, 4))
"""All tokens come; the event that says so does not."""
STATUS = st.builds(
    Act,
    how=st.just("status"),
    status=st.just(503),
    code=st.sampled_from(["draining", "not_ready", "gate_closed"]),
    headers=st.just((("retry-after", "0"),)),
    becomes=st.none() | VERSIONS,
)
PROXY = st.builds(Act, how=st.just("status"), status=st.sampled_from([502, 504, 429, 408, 500]))
SCRIPTS = st.lists(CUTS | BREAKS | STATUS | PROXY | LAST, max_size=8)


@pytest.fixture(autouse=True, scope="module")
def _no_waiting():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_BACKOFF", wait_none())
        patch.setattr(client, "_NO_REPLICA_S", 0.0)
        patch.setattr(planning, "REST_S", 0.0)
        patch.setattr(fleet, "FRESH_S", 0.0)
        yield


def check(prompt: list[int], rollout: Rollout, budget: int) -> None:
    check_rollout(prompt, rollout, budget, eos_below=EOS)
    assert list(rollout.log_probs) == [-t / 100 for t in rollout.token_ids]


@settings(max_examples=700, deadline=None)
@given(scripts=st.lists(SCRIPTS, min_size=1, max_size=3), budget=st.integers(1, 40))
def test_whatever_happens_in_between_each_rollout_is_whole(scripts: list[list[Act]], budget: int):
    pods = FakeFleet(*(FakeReplica(script=list(s)) for s in scripts), eos_below=EOS)
    prompts = {"a": PROMPT, "b": [1], "c": [9, 9]}

    async def run() -> list[Rollout]:
        policy = Policy(engine_failures=99)
        async with RolloutClient(pods.urls, transport=pods, policy=policy) as api:
            return await asyncio.gather(
                *(
                    api.generate(prompt, {"max_tokens": budget}, name, deadline_s=30)
                    for name, prompt in prompts.items()
                )
            )

    for rollout in asyncio.run(run()):
        check(prompts[rollout.request_id], rollout, budget)
        asked = [body for body in pods.asked if body["request_id"] == rollout.request_id]
        assert rollout.attempts == len(asked)
        for body in asked:
            # each attempt went on from what the client held, with the budget of the whole
            held = body["generated_token_ids"]
            assert held == list(rollout.token_ids[: len(held)])
            assert len(held) < budget
            assert body["sampling_params"] == {"max_tokens": budget}


@settings(max_examples=200, deadline=None)
@given(
    scripts=st.lists(SCRIPTS, min_size=2, max_size=3),
    steps=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    min_step=st.integers(1, 3),
)
def test_replicas_below_the_step_are_never_asked(
    scripts: list[list[Act]], steps: list[int], min_step: int
):
    steps[0] = max(steps[0], min_step)  # one will do
    pods = FakeFleet(
        *(
            FakeReplica(script=list(s), step=n)
            for s, n in zip(scripts, steps[: len(scripts)], strict=True)
        ),
        eos_below=EOS,
    )

    async def run() -> Rollout:
        policy = Policy(engine_failures=99)
        async with RolloutClient(pods.urls, transport=pods, policy=policy) as api:
            return await api.generate(PROMPT, {"max_tokens": 9}, min_step=min_step, deadline_s=30)

    check(PROMPT, asyncio.run(run()), 9)
    assert all(steps[host] >= min_step for host in pods.hosts)

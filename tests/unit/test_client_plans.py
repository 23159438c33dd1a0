"""What follows from an attempt, which replica is next, and what is a prompt: tables."""

from collections import UserDict
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client import Policy, normalize_token_ids
from rollout_client.planning import (
    REST_S,
    Again,
    Counts,
    Cut,
    Done,
    Ended,
    EngineTrouble,
    GiveUp,
    Lost,
    Nonsense,
    Outcome,
    Refused,
    Stop,
    Unavailable,
    judge,
)
from rollout_client.routing import NoReplica, ReplicaView, choose
from rollout_pod.protocol import CancelReason, Problem, ProblemCode

POLICY = Policy(engine_failures=3, failures=5)
NONE = Counts()
ONE = Counts(failures=1)
LOST = Counts(failures=1, is_lost=True)
DUPLICATE = Refused(
    why="w",
    status=409,
    problem=Problem(title="t", status=409, code=ProblemCode.DUPLICATE_REQUEST, detail="d"),
)


def again(counts: Counts = NONE, why: str = "w", *, backoff: bool = True, **more: float) -> Again:
    return Again(counts=counts, why=why, backoff=backoff, **more)


CASES: list[tuple[str, Outcome, int, Counts, Done | Stop | Again]] = [
    # name, outcome, tokens gained, counts before, what follows
    ("the end", Ended(), 3, ONE, Done()),
    (
        "a pause with tokens: asked again at once",
        Cut(reason=CancelReason.PAUSED),
        2,
        ONE,
        again(NONE, "cut: paused", backoff=False),
    ),
    (
        "a pause before the first token is no failure",
        Cut(reason=CancelReason.UPDATING),
        0,
        ONE,
        again(ONE, "cut: updating"),
    ),
    (
        "a draining pod is left",
        Cut(reason=CancelReason.DRAINING),
        2,
        NONE,
        again(NONE, "cut: draining", backoff=False, rest_s=REST_S),
    ),
    (
        "cut by its id",
        Cut(reason=CancelReason.CANCELLED),
        2,
        NONE,
        Stop(kind=GiveUp.CANCELLED, why="cut by its id"),
    ),
    ("a lost connection", Lost(why="w"), 0, NONE, again(LOST, rest_s=REST_S)),
    (
        "a lost connection after tokens starts the count again",
        Lost(why="w"),
        1,
        Counts(failures=4, engine_failures=2),
        again(LOST, backoff=False, rest_s=REST_S),
    ),
    (
        "the fifth failure in a row",
        Lost(why="w"),
        0,
        Counts(failures=4),
        Stop(kind=GiveUp.RETRIES, why="5 attempts in a row brought no token: w"),
    ),
    (
        "a gate that stays closed is no failure, however often",
        Unavailable(why="w", code=ProblemCode.GATE_CLOSED, retry_after_s=2),
        0,
        Counts(failures=4),
        again(Counts(failures=4), rest_s=REST_S, asked_s=2),
    ),
    (
        "not ready",
        Unavailable(why="w", code=ProblemCode.NOT_READY),
        0,
        NONE,
        again(ONE, rest_s=REST_S),
    ),
    (
        "a proxy's absurd Retry-After",
        Unavailable(why="w", retry_after_s=86400),
        0,
        NONE,
        again(ONE, rest_s=REST_S, asked_s=60),
    ),
    (
        "the engine failed",
        EngineTrouble(why="w", retry_after_s=1),
        0,
        NONE,
        again(Counts(failures=1, engine_failures=1), rest_s=REST_S, asked_s=1),
    ),
    (
        "the engine failed three times in a row",
        EngineTrouble(why="w"),
        0,
        Counts(failures=2, engine_failures=2),
        Stop(kind=GiveUp.ENGINE, why="w (3 times in a row)"),
    ),
    ("a refusal", Refused(why="w", status=422), 0, LOST, Stop(kind=GiveUp.REFUSED, why="w")),
    ("our own attempt is alive", DUPLICATE, 0, LOST, again(replace(LOST, failures=2))),
    ("somebody else's is", DUPLICATE, 0, ONE, Stop(kind=GiveUp.REFUSED, why="w")),
    ("nonsense", Nonsense(why="w"), 0, NONE, Stop(kind=GiveUp.PROTOCOL, why="w")),
]


@pytest.mark.parametrize(("outcome", "gained", "counts", "then"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_what_follows(outcome, gained, counts, then):
    assert judge(outcome, gained=gained, counts=counts, policy=POLICY) == then


@pytest.mark.parametrize("field", ["failures", "engine_failures"])
def test_a_policy_that_allows_no_attempt_is_refused(field):
    with pytest.raises(ValueError, match=field):
        Policy(**{field: 0})


NOW = 100.0


def view(name: str, **traits) -> ReplicaView:
    return ReplicaView(url=name, **traits)


ROUTES = [
    # name, replicas, sticky, avoided, min_step, chosen
    ("the least in flight", [view("a", in_flight=2), view("b", in_flight=1)], None, (), None, "b"),
    ("the session's", [view("a", in_flight=9), view("b")], "a", (), None, "a"),
    ("not the session's: not ready", [view("a", is_ready=False), view("b")], "a", (), None, "b"),
    ("not the session's: rests", [view("a", rests_until=NOW + 1), view("b")], "a", (), None, "b"),
    ("not the session's: failed it", [view("a"), view("b")], "a", ("a",), None, "b"),
    ("one that failed it, if no other", [view("a"), view("b", is_ready=False)], "a", ("a",), None, "a"),
    ("rested again", [view("a", rests_until=NOW), view("b")], "a", (), None, "a"),
    ("the only one, though it rests", [view("a", rests_until=NOW + 9)], None, ("a",), None, "a"),
    ("who rests the shortest", [view("a", rests_until=NOW + 9), view("b", rests_until=NOW + 1)], "a", (), None, "b"),
    ("new enough", [view("a", step=3), view("b", step=4, in_flight=5)], "a", (), 4, "b"),
    ("no step is too old", [view("a"), view("b", step=7, in_flight=5)], None, (), 4, "b"),
    ("who asked to wait is not asked", [view("a", asked_until=NOW + 5), view("b", in_flight=9)], "a", ("b",), None, "b"),
]  # fmt: skip


@pytest.mark.parametrize(("replicas", "sticky", "avoid", "min_step", "url"), [r[1:] for r in ROUTES],
                         ids=[r[0] for r in ROUTES])  # fmt: skip
def test_which_replica(replicas, sticky, avoid, min_step, url):
    for order in (replicas, replicas[::-1]):
        found = choose(order, key="k", sticky=sticky, avoid=avoid, min_step=min_step, now=NOW)
        assert isinstance(found, ReplicaView)
        assert found.url == url


@pytest.mark.parametrize(
    ("replicas", "min_step", "said", "wait_s"),
    [
        ([], None, "there is no replica", None),
        ([view("a", is_ready=False)] * 2, None, "none of 2 replicas is ready", None),
        (
            [view("a", step=3), view("b", step=2), view("c", is_ready=False, step=9)],
            4,
            "none of 2 ready replicas holds step 4 or later (the newest holds step 3)",
            None,
        ),
        (
            [view("a")],
            0,
            "none of 1 ready replicas holds step 0 or later (none tells its step)",
            None,
        ),
        (
            [view("a", asked_until=NOW + 5), view("b", asked_until=NOW + 3)],
            None,
            "all replicas asked to wait",
            3.0,
        ),
    ],
)
def test_why_none(replicas, min_step, said, wait_s):
    found = choose(replicas, key="k", sticky="a", avoid=(), min_step=min_step, now=NOW)
    assert found == NoReplica(why=said, wait_s=wait_s)


@given(st.permutations(["a", "b", "c", "d"]), st.text(max_size=8))
def test_idle_equals_are_the_same_for_every_client(order, key):
    def pick(urls):
        return choose(
            [view(u) for u in urls], key=key, sticky=None, avoid=(), min_step=None, now=NOW
        )

    assert pick(order) == pick(sorted(order))


def test_sessions_spread():
    urls = [view(u) for u in "abcd"]
    picks = {
        choose(urls, key=str(k), sticky=None, avoid=(), min_step=None, now=NOW).url
        for k in range(64)
    }
    assert picks == {"a", "b", "c", "d"}


class Array:
    """As numpy's and torch's: known by what it has."""

    def __init__(self, values):
        self.values = values

    @property
    def shape(self):
        inner = self.values[0] if isinstance(self.values, list) else None
        return (len(self.values), len(inner)) if isinstance(inner, list) else (len(self.values),)

    def tolist(self):
        return self.values

    def __iter__(self):
        return iter([Array(v) if isinstance(v, list) else v for v in self.values])


class Scalar:
    """A number of numpy or a tensor of no dimension."""

    shape = ()

    def __index__(self):
        return 2


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        [1, Scalar()],
        [[1, 2]],
        [(1, 2)],
        [Array([1, 2])],
        Array([1, 2]),
        Array([[1, 2]]),
        {"input_ids": [1, 2], "attention_mask": [1, 1]},
        UserDict({"input_ids": Array([[1, 2]])}),
        SimpleNamespace(input_ids=[[1, 2]]),
    ],
)
def test_a_prompt(prompt):
    check_prompt(prompt)


def test_a_prompt_of_the_libraries_themselves():
    import numpy as np
    import torch
    from transformers import BatchEncoding

    check_prompt(np.array([1, 2]))
    check_prompt([np.int64(1), np.int32(2)])
    check_prompt(torch.tensor([[1, 2]]))
    check_prompt([torch.tensor(1), torch.tensor(2)])
    check_prompt([torch.tensor([1]), np.array([[2]])])
    check_prompt(BatchEncoding({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}))
    check_prompt(BatchEncoding({"input_ids": torch.tensor([[1, 2]])}))


def check_prompt(prompt):
    found = normalize_token_ids(prompt)
    assert found == [1, 2]
    assert all(type(token) is int for token in found)
    assert found is not prompt


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("text", "text; give token ids"),
        ([], "empty"),
        ({"input_ids": []}, "empty"),
        ([[]], "empty"),
        ([[1], [2]], "2 prompts"),
        (Array([[1], [2]]), "2 prompts"),
        ({"ids": [1]}, "without input_ids"),
        (7, "int is no list"),
        (None, "NoneType is no list"),
        ([1, "2"], r"prompt_ids.1: '2'"),
        ([1, True], r"prompt_ids.1: True"),
        ([1.5], r"prompt_ids.0: 1.5"),
        ([1, [2]], r"prompt_ids.1: \[2\]"),
    ],
)
def test_no_prompt(prompt, said):
    with pytest.raises(ValueError, match=said):
        normalize_token_ids(prompt)

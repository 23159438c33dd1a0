"""What the trainer's adapter asks for, and when it is so: tables and properties."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.trainer import Late, ReplicaErrors, ReplicaResult
from rollout_client.trainer.fanout import judged
from rollout_client.trainer.wishes import (
    Hold,
    Open,
    Pause,
    Release,
    TakeBack,
    Wish,
    changed,
    judge,
    overruled,
    version_of,
)
from rollout_client.verdict import Failed, Failure, Reached, Waiting
from rollout_pod.protocol import (
    DesiredDocument,
    SleepSpec,
    SleepTag,
    StateDocument,
    WeightsRef,
    WeightsSource,
)

TAGS = st.sets(st.sampled_from(SleepTag), min_size=1)
SLEEPS = st.builds(SleepSpec, level=st.sampled_from((1, 2)), tags=TAGS.map(tuple))
PUSH = WeightsSource.model_validate({"push": {}})
REFS = st.sampled_from(
    [None, WeightsRef(version="v1", step=1, source=PUSH), WeightsRef(version="v2", source=PUSH)]
)
DOCUMENTS = st.builds(
    DesiredDocument,
    owner=st.just("local"),
    generation=st.integers(0, 9),
    paused=st.booleans(),
    weights=REFS,
    sleep=st.none() | SLEEPS,
)
WISHES: st.SearchStrategy[Wish] = st.one_of(
    st.just(Pause()),
    st.just(Open()),
    st.builds(Release, SLEEPS),
    st.builds(TakeBack, TAGS.map(frozenset)),
    st.just(Hold("base")),
    st.builds(Hold, st.sampled_from(("v1", "v2")), st.none() | st.just(1), st.just(PUSH)),
)


@given(WISHES, DOCUMENTS)
def test_a_wish_is_a_state(wish: Wish, document: DesiredDocument) -> None:
    """Asked twice it changes nothing more; what it has changed does not overrule it."""
    once = changed(wish, document)
    assert changed(wish, once) == once
    assert overruled(wish, once) is None
    assert (once.owner, once.generation) == (document.owner, document.generation)
    assert (overruled(wish, document) is None) == (once == document)


@given(WISHES, WISHES, DOCUMENTS)
def test_wishes_of_other_fields_do_not_meet(one: Wish, two: Wish, document) -> None:
    fields = {Pause: "paused", Open: "paused", Release: "sleep", TakeBack: "sleep", Hold: "weights"}
    both = changed(two, changed(one, document))
    if fields[type(one)] != fields[type(two)]:
        assert both == changed(one, changed(two, document))
        assert overruled(one, both) is None
    else:
        told = overruled(one, both)
        assert told is None or f"before the pod was {one}" in told


@given(TAGS, DOCUMENTS)
def test_waking_a_part_leaves_the_rest_asleep(tags: set[SleepTag], document) -> None:
    left = changed(TakeBack(frozenset(tags)), document).sleep
    before = set(document.sleep.tags) if document.sleep else set()
    assert (set(left.tags) if left else set()) == before - tags
    assert left is None or left.level == document.sleep.level


def state(**more: object) -> StateDocument:
    given = {
        "revision": 1, "boot_id": "b", "phase": "Serving", "weight_version": "base",
        "desired_version": "base", "owner": "local", "generation": 1, "gate": "open",
        "ready": True, "unfinished": 0, **more,
    }  # fmt: skip
    return StateDocument.model_validate(given)


BOTH = SleepSpec(level=2)
ASLEEP = {"level": 2, "tags": ["weights", "kv_cache"], "released": True}
V1 = Hold("v1", 1, PUSH)
RANKS = [{"rank": 0, "host": "h", "weight_version": "v1"}]

CASES = [
    ("paused", Pause(), {"phase": "Paused", "gate": "closed"}, Reached),
    ("still returning partials", Pause(), {"phase": "Pausing", "gate": "closed"}, Waiting),
    ("serving", Pause(), {}, Waiting),
    ("updating", Pause(), {"phase": "Updating", "gate": "closed"}, Waiting),
    ("poisoned: nothing is generated", Pause(), {"phase": "Poisoned", "gate": "closed"}, Reached),
    ("starting", Pause(), {"phase": "Loading", "gate": "closed"}, Waiting),
    ("open", Open(), {}, Reached),
    ("not open", Open(), {"phase": "Paused", "gate": "closed"}, Waiting),
    ("asleep", Release(BOTH), {"phase": "Sleeping", "sleep": ASLEEP, "resident": []}, Reached),
    ("not deep enough", Release(BOTH), {"sleep": {**ASLEEP, "level": 1}}, Waiting),
    ("deeper", Release(SleepSpec(level=1)), {"sleep": ASLEEP}, Reached),
    ("not all", Release(BOTH), {"sleep": {**ASLEEP, "tags": ["kv_cache"]}}, Waiting),
    ("too much", Release(SleepSpec(tags=("kv_cache",))), {"sleep": ASLEEP}, Waiting),
    ("not yet", Release(BOTH), {}, Waiting),
    ("cannot", Release(BOTH), {"sleep": {**ASLEEP, "tags": [], "message": "no"}}, Failure.STALLED),
    ("resident", TakeBack(frozenset({SleepTag.WEIGHTS})), {"resident": ["weights"]}, Reached),
    ("not resident", TakeBack(frozenset({SleepTag.WEIGHTS})), {"resident": ["kv_cache"]}, Waiting),
    ("held", V1, {"weight_version": "v1", "weight_step": 1, "ranks": RANKS}, Reached),
    ("of another step", V1, {"weight_version": "v1", "weight_step": 0, "ranks": RANKS}, Waiting),
    ("not by every rank", V1, {"weight_version": "v1", "weight_step": 1,
                               "ranks": [*RANKS, {**RANKS[0], "weight_version": None}]}, Waiting),
    ("awaited", V1, {"update": {"target": "v1", "phase": "AwaitingPush"}}, Waiting),
    ("no such folder", V1, {"update": {"target": "v1", "phase": "Waiting", "message": "no"}},
     Failure.WEIGHTS_UNAVAILABLE),
    ("another's trouble", V1, {"update": {"target": "v0", "phase": "Waiting", "message": "no"}},
     Waiting),
    ("rejected", V1, {"rejected": {"version": "v1", "source": {"push": {}}}},
     Failure.UPDATE_FAILED),
    ("the engine is dead", V1, {"phase": "Failed", "last_error": "signal 9"}, Waiting),
]  # fmt: skip


@pytest.mark.parametrize(("wish", "seen", "then"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_verdict(wish: Wish, seen: dict, then: type | Failure) -> None:
    found = judge(wish, state(**seen))
    if isinstance(then, Failure):
        assert isinstance(found, Failed)
        assert found.kind is then
    else:
        assert isinstance(found, then)


def test_errors_can_be_carried_between_processes() -> None:
    good = ReplicaResult(target="a", seconds=1.0, weight_version="v")
    with pytest.raises(ReplicaErrors) as told:
        judged([good, ReplicaResult(target="b", seconds=2.0, error=Late("slow", target="b"))])
    there = pickle.loads(pickle.dumps(told.value))
    assert str(there) == str(told.value)
    assert there.results["a"] == good
    (error,) = there.exceptions
    assert (type(error), str(error), error.target) == (Late, "slow", "b")
    assert error.results["b"].error is error
    alone = pickle.loads(pickle.dumps(Late("x", target="y")))
    assert (alone.target, alone.results) == ("y", {})


def test_the_name_of_a_version() -> None:
    assert version_of(None, 7, None, pushes=True) == Hold("step-7", 7, PUSH)
    assert version_of("v", 7, None, pushes=False) == Hold("v", 7)
    assert version_of("base", None, None, pushes=False) == Hold("base")

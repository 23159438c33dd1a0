"""How what arrives extends a rollout."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.rollout import Draft, InvalidAnswer
from rollout_pod.protocol import FinishReason, GenerateDelta, GenerateEnd, WeightVersionSpan


def span(version: str, start: int, end: int, step: int | None = None) -> WeightVersionSpan:
    return WeightVersionSpan(version=version, step=step, start=start, end=end)


def delta(tokens: int, version: str = "base", step: int | None = None, **changes) -> GenerateDelta:
    document = {
        "token_ids": list(range(tokens)),
        "log_probs": [-float(i) for i in range(tokens)],
        "version": version,
        "step": step,
    }
    return GenerateDelta.model_validate(document | changes)


def end(tokens: int, *, cut: bool = False, **changes) -> GenerateEnd:
    document = {
        "request_id": "r",
        "num_tokens": tokens,
        "is_cancel": cut,
        "finish_reason": "abort" if cut else "length",
        "stop_reason": None,
        "cancel_reason": "paused" if cut else None,
        "weight_versions": [],
        "attempt": 1,
        "generation": 1,
        "num_cached_tokens": 0,
    }
    return GenerateEnd.model_validate(document | changes)


def test_a_cut_leaves_it_unfinished_and_the_rest_finishes_it():
    draft = Draft("r", budget=5)
    draft.append(delta(3))
    draft.end(end(3, cut=True), received=3)
    assert (draft.rollout().token_ids, draft.rollout().finish_reason) == ((0, 1, 2), None)
    draft.append(delta(2))
    draft.end(end(2, finish_reason="stop", stop_reason=7), received=2)
    whole = draft.rollout()
    assert whole.token_ids == (0, 1, 2, 0, 1)
    assert whole.log_probs == (0.0, -1.0, -2.0, 0.0, -1.0)
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, 7)
    assert whole.weight_versions == (span("base", 0, 5),)
    assert whole.top_log_probs is None


def test_the_last_tokens_finish_it_before_the_last_event():
    draft = Draft("r", budget=None)
    draft.append(delta(2, finish_reason="stop", stop_reason=1))
    assert (draft.finish_reason, draft.rollout().stop_reason) == (FinishReason.STOP, 1)


def test_the_engines_error_finishes_nothing():
    draft = Draft("r", budget=None)
    draft.append(delta(2))
    draft.end(end(2, finish_reason="error"), received=2)
    assert draft.finish_reason is None


def test_the_most_likely_tokens_are_kept_where_they_are_asked_for():
    tops = [[{"token_id": 1, "log_prob": -0.5, "rank": 1}]]
    draft = Draft("r", budget=None)
    draft.append(delta(1, top_log_probs=tops))
    draft.append(delta(1, top_log_probs=tops))
    (first, second) = draft.rollout().top_log_probs or ()
    assert first == second
    assert first[0].token_id == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (delta(2, log_probs=[0.0]), "2 token_ids came with 1 log_probs"),
        (delta(2, top_log_probs=[[]]), "2 token_ids came with 1 top_log_probs"),
        (delta(4), "exceed max_tokens 3"),
    ],
)
def test_what_contradicts_itself_is_not_taken_and_changes_nothing(wrong, said):
    draft = Draft("r", budget=3)
    draft.append(delta(0))
    before = draft.rollout()
    with pytest.raises(InvalidAnswer, match=said):
        draft.append(wrong)
    assert draft.rollout() == before


def test_tokens_after_the_end_and_tokens_that_never_came_are_not_taken():
    draft = Draft("r", budget=9)
    draft.append(delta(1))
    with pytest.raises(InvalidAnswer, match="1 tokens came of 2"):
        draft.end(end(2), received=1)
    draft.end(end(1), received=1)
    with pytest.raises(InvalidAnswer, match="after the last one"):
        draft.append(delta(1))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 1]), st.integers(0, 4))))
def test_spans_always_cover_the_whole_and_neighbours_differ(pieces):
    draft, labels = Draft("r", budget=None), []
    for version, step, count in pieces:
        draft.append(delta(count, version, step))
        labels += [(version, step)] * count
    rollout = draft.rollout()
    spans = rollout.weight_versions
    told = [(s.version, s.step) for s in spans for _ in range(s.start, s.end)]
    assert told == labels
    assert len(rollout.token_ids) == len(rollout.log_probs) == len(labels)
    pairs = pairwise(spans)
    assert all((a.version, a.step) != (b.version, b.step) and a.end == b.start for a, b in pairs)

"""How one answer extends a rollout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.rollout import InvalidAnswer, Rollout, extend
from rollout_pod.protocol import FinishReason, GenerateResponse, WeightVersionSpan


def span(version: str, start: int, end: int, step: int | None = None) -> WeightVersionSpan:
    return WeightVersionSpan(version=version, step=step, start=start, end=end)


def answer(tokens: int, *, spans=None, cut=False, **changes) -> GenerateResponse:
    document = {
        "token_ids": list(range(tokens)),
        "log_probs": [-float(i) for i in range(tokens)],
        "is_cancel": cut,
        "request_id": "r",
        "finish_reason": "abort" if cut else "length",
        "stop_reason": None,
        "cancel_reason": "paused" if cut else None,
        "weight_versions": spans if spans is not None else [span("base", 0, tokens)],
        "attempt": 1,
        "generation": 1,
        "num_cached_tokens": 0,
    }
    return GenerateResponse.model_validate(document | changes)


def test_a_cut_leaves_it_unfinished_and_the_rest_finishes_it():
    cut = extend(Rollout(request_id="r"), answer(3, cut=True), budget=5)
    assert (cut.token_ids, cut.finish_reason) == ((0, 1, 2), None)
    whole = extend(cut, answer(2, finish_reason="stop", stop_reason=7), budget=5)
    assert whole.token_ids == (0, 1, 2, 0, 1)
    assert whole.log_probs == (0.0, -1.0, -2.0, 0.0, -1.0)
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, 7)
    assert whole.weight_versions == (span("base", 0, 5),)


def test_spans_move_by_what_is_held_and_join_only_equals():
    held = extend(
        Rollout(request_id="r"),
        answer(4, cut=True, spans=[span("a", 0, 1), span("b", 1, 4, step=1)]),
        budget=None,
    )
    new = extend(
        held, answer(3, spans=[span("b", 0, 1, step=1), span("b", 1, 3, step=2)]), budget=None
    )
    assert new.weight_versions == (
        span("a", 0, 1),
        span("b", 1, 5, step=1),
        span("b", 5, 7, step=2),
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (answer(2, log_probs=[0.0]), "2 token_ids came with 1 log_probs"),
        (answer(2, spans=[span("a", 0, 1)]), "cover 1 of 2"),
        (answer(2, spans=[span("a", 1, 2)]), "token 0"),
        (answer(2, spans=[span("a", 0, 2), span("b", 1, 2)]), "token 2"),
        (answer(2, spans=[]), "cover 0 of 2"),
        (answer(4), "exceed max_tokens 3"),
    ],
)
def test_an_answer_that_contradicts_itself_is_not_taken(wrong, said):
    with pytest.raises(InvalidAnswer, match=said):
        extend(Rollout(request_id="r"), wrong, budget=3)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4))), max_size=6))
def test_spans_always_cover_the_whole_and_neighbours_differ(attempts):
    rollout, versions = Rollout(request_id="r"), []
    for attempt in attempts:
        spans, at = [], 0
        for version, length in attempt:
            spans.append(span(version, at, at + length))
            versions += [version] * length
            at += length
        rollout = extend(rollout, answer(at, spans=spans, cut=True), budget=None)
    told = [s.version for s in rollout.weight_versions for _ in range(s.start, s.end)]
    assert told == versions
    assert len(rollout.token_ids) == len(rollout.log_probs) == len(versions)
    pairs = zip(rollout.weight_versions, rollout.weight_versions[1:], strict=False)
    assert all(a.version != b.version and a.end == b.start for a, b in pairs)

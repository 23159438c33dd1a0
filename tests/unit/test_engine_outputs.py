"""What is made of vLLM's outputs: whole, or cut where a log-prob is no number."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_pod.engine.base import EngineInternalError, EngineOutput, ExpertIds, TopLogProb
from rollout_pod.engine.openai.native import Native
from rollout_pod.engine.outputs import NON_FINITE, Transcript, is_refusal

NAN, INF = float("nan"), float("inf")


@dataclass
class Entry:
    logprob: float
    rank: int


class Flat(list):
    """Like vLLM's ``FlatLogprobs``: a sequence of dicts, and all values in a row."""

    @property
    def start_indices(self):
        return [sum(map(len, self[:i])) for i in range(len(self))]

    @property
    def logprobs(self):
        return [entry.logprob for position in self for entry in position.values()]


def output(log_probs, *, first=0, finished=True, reason="length", others=()):
    """Tokens ``first``, ``first + 1``, ...; each the likeliest, before ``others``."""
    positions = [
        {first + i: Entry(value, 1)} | {100 + k: Entry(v, 2 + k) for k, v in enumerate(others)}
        for i, value in enumerate(log_probs)
    ]
    choice = SimpleNamespace(
        token_ids=[first + i for i in range(len(log_probs))],
        logprobs=Flat(positions),
        finish_reason=reason if finished else None,
        stop_reason=None,
    )
    return SimpleNamespace(outputs=[choice], finished=finished, num_cached_tokens=3)


def test_a_whole_output():
    transcript = Transcript(top=0)
    transcript.add(output([-0.5, -0.0]))
    assert not transcript.is_cut
    assert transcript.output() == EngineOutput((0, 1), (-0.5, -0.0), "length", None, 3)


@pytest.mark.parametrize("reason", ["stop", "length", "repetition", "abort", "error"])
def test_the_last_delta_says_how_it_ended_by_itself(reason):
    transcript = Transcript(top=0)
    assert transcript.add(output([-0.5], finished=False)).finish_reason is None
    ended = transcript.add(output([-0.5], first=1, reason=reason)).finish_reason
    assert ended == (None if reason in ("abort", "error") else reason)
    transcript = Transcript(top=0)
    assert transcript.add(output([-0.5, NAN], reason=reason)).finish_reason is None


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_output_ends_before_a_log_prob_that_is_no_number(value, at):
    log_probs = [-0.5] * 3
    log_probs[at] = value
    transcript = Transcript(top=1)
    delta = transcript.add(output(log_probs))
    assert transcript.is_cut
    made = transcript.output()
    assert made.token_ids == delta.token_ids == tuple(range(at))
    assert made.log_probs == delta.log_probs == (-0.5,) * at
    assert len(made.top_log_probs) == at
    assert (made.finish_reason, made.stop_reason) == ("error", NON_FINITE)


def test_a_stream_ends_there_whatever_comes_after():
    transcript = Transcript(top=0)
    assert transcript.add(output([-1.0], finished=False)).token_ids == (0,)
    assert transcript.add(output([-1.0, NAN, -1.0], first=1, finished=False)).token_ids == (1,)
    assert transcript.add(output([-1.0], first=4, finished=False)).token_ids == ()
    assert transcript.add(output([], reason="abort")).token_ids == ()
    made = transcript.output()
    assert (made.token_ids, made.log_probs) == ((0, 1), (-1.0, -1.0))
    assert (made.finish_reason, made.stop_reason) == ("error", NON_FINITE)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_openai_output_ends_there_too(value, at):
    log_probs = [-0.5] * 3
    log_probs[at] = value
    given = []
    native = Native({}, None, {}, given.append)
    transcript = Transcript(read=native.read)
    assert transcript.add(output(log_probs)).token_ids == tuple(range(at))
    assert transcript.is_cut
    transcript.add(output([-0.5], first=3))
    (choice,) = given[0].outputs
    assert len(given) == 1 and len(choice.logprobs) == at
    assert choice.token_ids == list(range(at))
    assert (choice.finish_reason, choice.stop_reason) == ("error", NON_FINITE)
    assert transcript.output().finish_reason == "error"


def test_an_openai_output_without_log_probs_is_whole():
    whole = output([-0.5, NAN])
    whole.outputs[0].logprobs = None
    given = []
    transcript = Transcript(read=Native({}, None, {}, given.append).read)
    assert transcript.add(whole).token_ids == (0, 1)
    assert given == [whole] and not transcript.is_cut


def test_masked_tokens_are_not_among_the_likeliest():
    transcript = Transcript(top=3)
    transcript.add(output([-0.1], others=[-2.0, -INF]))
    assert transcript.output().top_log_probs == (
        (TopLogProb(0, -0.1, 1), TopLogProb(100, -2.0, 2)),
    )


def test_what_an_engine_may_not_do():
    short = output([-1.0, -1.0])
    short.outputs[0].logprobs.pop()
    with pytest.raises(EngineInternalError, match="2 tokens and 1 log-probs"):
        Transcript(top=0).add(short)
    for outputs in ([], [output([-1.0], finished=False)]):
        transcript = Transcript(top=0)
        for each in outputs:
            transcript.add(each)
        with pytest.raises(EngineInternalError, match="without a final output"):
            transcript.output()


def test_a_refusal_is_no_fault():
    from vllm.exceptions import VLLMValidationError

    wrapped = RuntimeError()
    wrapped.__cause__ = ValueError("too long")
    assert is_refusal(VLLMValidationError("no"))
    assert is_refusal(wrapped)
    assert not is_refusal(RuntimeError("bug"))


def told_of_prompt(positions, *, count=3, top=1):
    transcript = Transcript(prompt=count, prompt_top=top)
    made = output([-1.0])
    made.prompt_logprobs, made.prompt_token_ids = positions, [7, 8, 9, 10]
    transcript.add(made)
    made.prompt_logprobs = []  # vLLM tells them once
    transcript.add(made)
    return transcript.output().prompt_log_probs


def test_log_probs_of_a_prompt():
    likely = {8: Entry(-3.0, 40), 1: Entry(-0.5, 1)}
    positions = [None, likely, {9: Entry(-0.2, 1)}, {10: Entry(-9.0, 1)}]
    assert told_of_prompt(positions) == (
        None,
        (TopLogProb(8, -3.0, 40), TopLogProb(1, -0.5, 1)),
        (TopLogProb(9, -0.2, 1),),
    )
    assert told_of_prompt(positions[:2]) is None, "it was cut in the prompt"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_log_prob_of_a_prompt_that_is_no_number(value):
    positions = [None, {8: Entry(value, 1)}, {9: Entry(-0.2, 2), 1: Entry(value, 1)}]
    assert told_of_prompt(positions) == (None, None, (TopLogProb(9, -0.2, 2),))


def test_routed_experts():
    array = np.arange(12, dtype=">i2").reshape(2, 3, 2)
    made = output([-1.0])
    made.outputs[0].routed_experts = array
    transcript = Transcript(experts=True)
    transcript.add(made)
    told = transcript.output().routed_experts
    assert told == ExpertIds((2, 3, 2), "int16", array.astype("<i2").tobytes())
    made.outputs[0].routed_experts = None  # nothing was computed
    assert transcript.output().routed_experts is None
    assert Transcript().add(made).token_ids == (0,)


@pytest.mark.parametrize("finished", [False, True])  # by its length, at the same moment
def test_what_the_pod_stops_at(finished):
    class Stops:
        def take(self, token_ids, *, is_stop):
            return (1, "end") if 5 in token_ids else (len(token_ids), None)

    transcript = Transcript(top=1, stops=Stops())
    assert transcript.add(output([-1.0], first=4, finished=False)).token_ids == (4,)
    last = transcript.add(output([-1.0, -1.0], first=5, finished=finished))
    assert last.token_ids == (5,)
    assert (last.finish_reason, last.stop_reason) == ("stop", "end")
    assert transcript.ends_early
    assert not transcript.is_cut
    if not finished:
        assert transcript.add(output([-1.0], first=7, reason="abort")).token_ids == ()
    made = transcript.output()
    assert (made.token_ids, len(made.top_log_probs)) == ((4, 5), 2)
    assert (made.finish_reason, made.stop_reason) == ("stop", "end")

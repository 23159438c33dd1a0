"""What is made of vLLM's outputs: whole, or cut where a log-prob is no number."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from rollout_pod.engine.base import EngineInternalError, EngineOutput, TopLogProb
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

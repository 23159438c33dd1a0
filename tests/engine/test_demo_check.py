"""The demo's proof can fail: one wrong token, one wrong log-prob, or another version's weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import tiny_models
from examples.demo.check import compare, returned_tokens
from rollout_client import Rollout
from rollout_pod.protocol import WeightVersionSpan

PROMPT = (5, 6, 7)
CUT, END = 6, 12


def span(version: str, start: int, end: int) -> WeightVersionSpan:
    return WeightVersionSpan(version=version, step=None, start=start, end=end)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, version in enumerate(("a", "b")):
        tiny_models.make(folder / version, seed=seed)
    return {version: folder / version for version in ("a", "b")}


@pytest.fixture(scope="module")
def rollout(checkpoints) -> Rollout:
    """Greedy, by stepping token for token; the first half under a, the second under b."""
    ids, log_probs = list(PROMPT), []
    for version, until in (("a", CUT), ("b", END)):
        model = AutoModelForCausalLM.from_pretrained(checkpoints[version], dtype=torch.float32)
        while len(log_probs) < until:
            with torch.inference_mode():
                scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], dim=-1)
            ids.append(int(scores.argmax()))
            log_probs.append(float(scores.max()))
    return Rollout(
        request_id="r",
        token_ids=tuple(ids[len(PROMPT) :]),
        log_probs=tuple(log_probs),
        weight_versions=(span("a", 0, CUT), span("b", CUT, END)),
    )


def test_a_rollout_of_two_versions_is_right(rollout, checkpoints):
    proof = compare([(PROMPT, rollout)], checkpoints)
    assert (proof.tokens, proof.greedy, proof.ties, proof.wrong) == (END, END, 0, 0)
    assert proof.holds


def test_a_wrong_token_shows(rollout, checkpoints):
    tokens = list(rollout.token_ids)
    tokens[-1] ^= 1
    proof = compare([(PROMPT, replace(rollout, token_ids=tuple(tokens)))], checkpoints)
    assert proof.wrong == 1
    assert not proof.holds


def test_a_wrong_log_prob_shows(rollout, checkpoints):
    log_probs = (*rollout.log_probs[:-1], rollout.log_probs[-1] - 0.01)
    proof = compare([(PROMPT, replace(rollout, log_probs=log_probs))], checkpoints)
    assert not proof.wrong
    assert not proof.holds


def test_a_span_that_names_the_wrong_version_shows(rollout, checkpoints):
    mislabelled = replace(rollout, weight_versions=(span("a", 0, END),))
    assert compare([(PROMPT, mislabelled)], checkpoints).wrong > 0


def test_a_token_that_was_lost_before_the_end_shows(rollout, checkpoints):
    shorter = replace(
        rollout,
        token_ids=rollout.token_ids[:2] + rollout.token_ids[3:],
        log_probs=rollout.log_probs[:2] + rollout.log_probs[3:],
        weight_versions=(span("a", 0, CUT - 1), span("b", CUT - 1, END - 1)),
    )
    assert compare([(PROMPT, shorter)], checkpoints).wrong > 0


def test_nothing_compared_proves_nothing(checkpoints):
    assert not compare([], checkpoints).holds


def test_the_pods_own_count_is_read_from_its_metrics():
    from rollout_pod.metrics import PodMetrics

    metrics = PodMetrics()
    metrics.answered("length", tokens=7)
    metrics.answered("abort", tokens=5, cut=True)
    assert returned_tokens(metrics.text().decode()) == 12

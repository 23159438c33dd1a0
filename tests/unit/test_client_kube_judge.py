"""Whether a replica has become what was asked: tables over its newest object."""

from dataclasses import replace
from typing import Any

import pytest

from rollout_client.kube.judge import Ask, Goal, judge, progress
from rollout_client.verdict import Failed, Failure, Reached, Verdict, Waiting

G = 5


def condition(kind: str, status: str, reason: str = "R", message: str = "", at: int = G) -> dict:
    return {
        "type": kind, "status": status, "reason": reason, "message": message,
        "observedGeneration": at,
    }  # fmt: skip


def body(*conditions: dict, generation: int = G, observed: int = G, held: str = "base", uid: str = "u", phase: str = "Serving", **spec: Any) -> dict:  # fmt: skip
    return {
        "metadata": {"uid": uid, "generation": generation},
        "spec": {"model": "m", **spec},
        "status": {
            "observedGeneration": observed,
            "phase": phase,
            "weightVersion": held,
            "conditions": list(conditions),
        },
    }


def ask(goal: Goal, **fields: Any) -> Ask:
    return Ask(name="qwen", uid="u", generation=G, goal=goal, fields=fields)


PAUSE, RESUME = ask(Goal.PAUSED, paused=True), ask(Goal.RESUMED, paused=False)
TO_S7, TO_BASE = ask(Goal.WEIGHTS, weightVersion="s7"), ask(Goal.WEIGHTS, weightVersion=None)
SLEEP = {"level": 2, "tags": ["weights", "kv_cache"]}
TO_SLEEP, TO_WAKE = ask(Goal.ASLEEP, sleep=SLEEP), ask(Goal.AWAKE, sleep=None)
READY, DELETE = ask(Goal.READY), ask(Goal.GONE)
PAUSED = condition("Paused", "True")
OPEN = condition("Paused", "False", "NotPaused")
HELD = condition("WeightsReady", "True", "Committed")
REJECTED = condition("Stalled", "True", "UpdateFailed", "wrong shape; mend it")
INVALID = condition("Stalled", "True", "InvalidTemplate", "no such field")
MISSING = condition("Ready", "False", "WeightsUnavailable", "/ckpt/s7: no such folder")

CASES: list[tuple[str, Ask, dict | None, type[Verdict] | Failure]] = [
    ("paused", PAUSE, body(PAUSED, paused=True), Reached),
    ("pausing", PAUSE, body(OPEN, paused=True), Waiting),
    ("paused, said of an older generation", PAUSE, body(PAUSED, observed=G - 1, paused=True), Waiting),
    ("a condition of an older generation", PAUSE, body(condition("Paused", "True", at=G - 1), paused=True), Waiting),
    ("paused, and another field changed since", PAUSE, body(PAUSED, generation=G + 2, paused=True, weightVersion="x"), Reached),
    ("somebody resumed it", PAUSE, body(PAUSED, generation=G + 1, paused=False), Failure.SUPERSEDED),
    ("somebody removed the field", PAUSE, body(PAUSED, generation=G + 1), Failure.SUPERSEDED),
    ("paused though a version was rejected", PAUSE, body(PAUSED, REJECTED, paused=True), Reached),
    ("pausing though a version was rejected", PAUSE, body(OPEN, REJECTED, paused=True), Waiting),
    ("cannot pause", PAUSE, body(OPEN, INVALID, paused=True), Failure.STALLED),
    ("resumed", RESUME, body(OPEN), Reached),
    ("resuming", RESUME, body(PAUSED), Waiting),
    ("to be paused again", RESUME, body(OPEN, paused=True), Failure.SUPERSEDED),
    ("held", TO_S7, body(HELD, held="s7", weightVersion="s7"), Reached),
    ("the older version's condition", TO_S7, body(HELD, held="s6", weightVersion="s7"), Waiting),
    ("held, said of an older generation", TO_S7, body(HELD, held="s7", observed=4, weightVersion="s7"), Waiting),
    ("on its way", TO_S7, body(condition("WeightsReady", "False"), weightVersion="s7"), Waiting),
    ("another version", TO_S7, body(HELD, held="s7", weightVersion="s8"), Failure.SUPERSEDED),
    ("rejected", TO_S7, body(REJECTED, weightVersion="s7"), Failure.UPDATE_FAILED),
    ("rejected before our write", TO_S7, body({**REJECTED, "observedGeneration": 4}, weightVersion="s7"), Waiting),
    ("cannot be had", TO_S7, body(MISSING, weightVersion="s7"), Failure.WEIGHTS_UNAVAILABLE),
    ("invalid", TO_S7, body(INVALID, weightVersion="s7"), Failure.STALLED),
    ("base again", TO_BASE, body(HELD), Reached),
    ("not base any more", TO_BASE, body(HELD, weightVersion="s8"), Failure.SUPERSEDED),
    ("asleep", TO_SLEEP, body(condition("Ready", "True", "Sleeping"), phase="Sleeping", sleep=SLEEP), Reached),
    ("asleep, another version waits", TO_SLEEP, body(condition("Ready", "False", "WaitingForWake"), sleep=SLEEP), Reached),
    ("falling asleep", TO_SLEEP, body(condition("Ready", "False", "FallingAsleep"), sleep=SLEEP), Waiting),
    ("asleep as an older generation wanted", TO_SLEEP, body(condition("Ready", "True", "Sleeping", at=G - 1), sleep=SLEEP), Waiting),
    ("cannot sleep", TO_SLEEP, body(condition("Stalled", "True", "SleepUnsupported"), sleep=SLEEP), Failure.STALLED),
    ("somebody woke it", TO_SLEEP, body(condition("Ready", "True", "Serving")), Failure.SUPERSEDED),
    ("awake", TO_WAKE, body(condition("Ready", "True", "Serving")), Reached),
    ("awake, and nothing to serve", TO_WAKE, body(condition("Ready", "False", "LoadingWeights"), phase="Stale"), Reached),
    ("awake, and updating", TO_WAKE, body(condition("Ready", "False", "Updating"), phase="Updating"), Reached),
    ("waking", TO_WAKE, body(condition("Ready", "False", "Waking"), phase="Sleeping"), Waiting),
    ("the pod has yet to be told", TO_WAKE, body(condition("Ready", "False", "Updating"), phase="Sleeping"), Waiting),
    ("restarted instead of waking", TO_WAKE, body(condition("Ready", "False", "EngineRestarting"), phase="Loading"), Waiting),
    ("to sleep again", TO_WAKE, body(condition("Ready", "True", "Sleeping"), sleep=SLEEP), Failure.SUPERSEDED),
    ("ready", READY, body(condition("Ready", "True")), Reached),
    ("starting", READY, body(condition("Ready", "False", "PodStarting")), Waiting),
    ("deleted while waiting", TO_S7, None, Failure.GONE),
    ("deleted and made anew", TO_S7, body(HELD, held="s7", weightVersion="s7", uid="v"), Failure.GONE),
    ("being deleted", DELETE, body(HELD), Waiting),
    ("deleted", DELETE, None, Reached),
    ("deleted, and another has its name", DELETE, body(HELD, uid="v"), Reached),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "seen", "then"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_verdict(wanted, seen, then):
    found = judge(wanted, seen)
    if isinstance(then, Failure):
        assert isinstance(found, Failed)
        assert found.kind is then
        assert "qwen" in found.message or "another writer" in found.message
    else:
        assert isinstance(found, then)


def test_a_version_that_was_reached_and_replaced_unseen_was_reached():
    old = {"version": "s7", "phase": "Committed", "startedAt": "1"}
    new = {"version": "s7", "phase": "Committed", "startedAt": "2"}
    seen = body(HELD, held="s8", weightVersion="s8", generation=G + 1)
    for history, then in (
        ([old], Failed),
        ([new, old], Reached),
        ([{**new, "phase": "Rejected"}, old], Failed),
        ([{**new, "version": "s6"}, old], Failed),
    ):
        seen["status"]["history"] = history
        wanted = replace(TO_S7, history=(old,))
        assert isinstance(judge(wanted, seen), then), history


def test_a_failure_says_what_to_do():
    found = judge(TO_S7, body(REJECTED, weightVersion="s7"))
    assert found == Failed(
        kind=Failure.UPDATE_FAILED, message="qwen: UpdateFailed: wrong shape; mend it"
    )
    found = judge(TO_S7, body(HELD, weightVersion="s8", generation=6))
    assert isinstance(found, Failed)
    assert found.message == (
        "another writer set spec.weightVersion to 's8' before 's7' was reached (generation 6, ours "
        "was 5); the last writer wins"
    )


def test_progress_is_one_line():
    status = body(MISSING)["status"] | {"weightUpdate": {"target": "s7", "phase": "Waiting"}}
    assert progress(status) == "Serving; holds base; waiting s7; /ckpt/s7: no such folder"
    assert progress({}) == "Pending"

"""What ``kubectl rr`` decides and shows, without a cluster."""

from typing import Any

import pytest

from rollout_client.kubectl.plan import CannotUndo, Target, history_rows, status_rows, undo_target


def entry(version: str, phase: str = "Committed", step: int | None = None, **more: Any) -> dict:
    source = {} if version == "base" else {"source": {"path": f"/ckpt/{version}"}}
    return {"version": version, "phase": phase, **source} | ({} if step is None else {"step": step}) | more  # fmt: skip


def body(now: str | None, *history: dict, path: str = "/ckpt/{version}", **status: Any) -> dict:
    spec: dict[str, Any] = {"weights": {"source": {"path": path}}}
    if now:
        spec["weightVersion"] = now
    return {
        "metadata": {"name": "qwen", "generation": 2},
        "spec": spec,
        "status": {"history": list(history), **status},
    }


@pytest.mark.parametrize(
    ("what", "version", "step"),
    [
        (body("c", entry("c"), entry("b", step=2), entry("a")), "b", 2),
        (body("b", entry("b"), entry("c"), entry("b")), "c", None),
        (body("bad", entry("bad", "Rejected"), entry("b"), entry("a")), "b", None),
        (body("new", entry("b"), entry("a")), "b", None),
        (body("b", entry("b"), entry("bad", "Rejected"), entry("a")), "a", None),
        (body("b", entry("b"), entry("base")), "base", None),
        (body(None, entry("base"), entry("b")), "b", None),
    ],
)
def test_undo_goes_to_what_was_committed_before(what, version, step):
    assert undo_target(what) == Target(version=version, step=step)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            body("a", entry("a")),
            "knows no version before a; name a version: kubectl rr update qwen",
        ),
        (body(None), "knows no version before base"),
        (
            body("b", entry("b"), entry("a"), path="/other/{version}"),
            "a came from /ckpt/a, but spec.weights.source now means /other/a",
        ),
    ],
)
def test_undo_says_why_it_cannot(what, said):
    with pytest.raises(CannotUndo) as refused:
        undo_target(what)
    assert said in str(refused.value)


def test_rows():
    ready = {"type": "Ready", "status": "False", "reason": "R", "message": "no node fits"}
    what = body("b", conditions=[ready], phase="Pending", observedGeneration=2)
    assert status_rows([what]) == [("qwen", "False", "Pending", "", "b", "no", "no node fits")]
    what["status"]["observedGeneration"] = 1
    assert status_rows([what])[0][1:2] == ("Unknown",)
    line = entry(
        "b", step=3, startedAt="2026-01-01T00:00:00Z", finishedAt="2026-01-01T00:01:05Z",
        pausedSeconds=0.25, by="trainer",
    )  # fmt: skip
    assert history_rows(body("b", line, entry("a"))) == [
        ("b", "3", "Committed", "2026-01-01T00:01:05Z", "65 s", "0.25 s", "trainer"),
        ("a", "", "Committed", "", "", "", "unknown"),
    ]
    assert history_rows({"metadata": {"name": "n"}}) == []

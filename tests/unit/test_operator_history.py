"""``status.history``: one line for each update that came to an end, and who asked for it."""

from dataclasses import replace
from typing import Any

from rollout_operator.api.status import MAX_HISTORY, ReplicaStatus
from rollout_operator.plan.plan import make_plan
from rollout_operator.plan.status import render_status
from rollout_pod.protocol import StateDocument, UpdatePhase, UpdateSeconds, UpdateState, WeightsRef
from tests.support.operator_objects import DEFAULTS, NOW, pod, replica, seen, state

SOURCE = {"source": {"path": "/ckpt/{version}"}}


def update(phase: UpdatePhase, target: str, at: float = NOW, **traits: Any) -> UpdateState:
    over = phase in (UpdatePhase.COMMITTED, UpdatePhase.REJECTED)
    return UpdateState(
        target=target, phase=phase, started_at=at, finished_at=at + 5 if over else None,
        seconds=UpdateSeconds(paused=0.25), **traits,
    )  # fmt: skip


def said(
    phase: UpdatePhase, target: str, at: float = NOW, held: str | None = None
) -> StateDocument:
    held = held or (target if phase is UpdatePhase.COMMITTED else "base")
    return state(held, desired_version=target, update=update(phase, target, at))


class Story:
    """A replica whose status is carried from pass to pass, as the API server does."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}

    def see(self, version: str | None, what: StateDocument | None, by: str = "") -> ReplicaStatus:
        spec = {"weights": SOURCE} | ({"weightVersion": version} if version else {})
        wanted = replace(replica(status=self.status, **spec), asked_by=by)
        found = seen(pod(), what)
        rendered = render_status(
            wanted, found, make_plan(wanted, found, NOW, defaults=DEFAULTS), NOW
        )
        self.status = rendered.dump()
        return rendered


def test_an_update_is_one_line_when_it_is_over_and_stays_one():
    story = Story()
    assert story.see("step-1", said(UpdatePhase.PREFETCHING, "step-1"), "trainer").history == ()
    done = story.see("step-1", said(UpdatePhase.COMMITTED, "step-1"), "trainer")
    (line,) = done.dump()["history"]
    assert line == {
        "version": "step-1",
        "source": {"path": "/ckpt/step-1"},
        "phase": "Committed",
        "startedAt": "2027-01-15T08:00:00Z",
        "finishedAt": "2027-01-15T08:00:05Z",
        "pausedSeconds": 0.25,
        "by": "trainer",
    }
    again = story.see("step-1", said(UpdatePhase.COMMITTED, "step-1"), "somebody else")
    assert again == done
    # a pod that says nothing, or does not know the update any more, adds nothing
    assert story.see("step-1", state("step-1"), "x").history == done.history
    assert (
        len(story.see("step-1", said(UpdatePhase.COMMITTED, "step-1", NOW + 60), "y").history) == 2
    )


def test_who_asked_is_known_from_the_beginning_not_from_the_end():
    story = Story()
    story.see("step-1", said(UpdatePhase.PREFETCHING, "step-1"), "trainer")
    # another writer asks for another version while the first one is being committed
    story.see("step-2", said(UpdatePhase.COMMITTED, "step-1"), "kubectl-rr")
    done = story.see("step-2", said(UpdatePhase.COMMITTED, "step-2", NOW + 9), "kubectl-rr")
    assert [(u.version, u.by) for u in done.history] == [
        ("step-2", "kubectl-rr"),
        ("step-1", "trainer"),
    ]


def test_an_update_that_was_never_seen_on_its_way_names_nobody_but_its_own_asker():
    story = Story()
    done = story.see("step-2", said(UpdatePhase.COMMITTED, "step-1"), "kubectl-rr")
    assert done.history[0].by is None


def test_a_rejected_version_is_told_with_its_source_and_a_base_without():
    story = Story()
    refused = WeightsRef.model_validate({"version": "bad", "source": {"path": "/ckpt/bad"}})
    what = said(UpdatePhase.REJECTED, "bad").model_copy(update={"rejected": refused})
    line = story.see("bad", what, "me").history[0]
    assert (line.phase, line.source.path if line.source else "", line.by) == (
        "Rejected",
        "/ckpt/bad",
        "me",
    )
    line = story.see(None, said(UpdatePhase.COMMITTED, "base", NOW + 9)).history[0]
    assert (line.version, line.source, line.by) == ("base", None, None)


def test_failures_and_superseded_updates_are_no_lines_and_ten_are_kept():
    story = Story()
    for phase in (UpdatePhase.FAILED, UpdatePhase.WAITING, UpdatePhase.SUPERSEDED):
        assert story.see("s", said(phase, "s", held="base")).history == ()
    for n in range(14):
        story.see(f"step-{n}", said(UpdatePhase.COMMITTED, f"step-{n}", NOW + n))
    kept = ReplicaStatus.parse(story.status).history
    assert [u.version for u in kept] == [f"step-{n}" for n in range(13, 13 - MAX_HISTORY, -1)]

"""Ends of pods and engines: what is counted, when the next one starts, when it is over for good."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_operator.api.conditions import ConditionType, Reason
from rollout_operator.api.spec import RestartPolicy, RolloutSpec
from rollout_operator.api.status import Restarts
from rollout_operator.api.times import rfc3339, unix
from rollout_operator.plan.actions import Action, CreatePod, DeletePod
from rollout_operator.plan.ends import OVERDUE_S, depends_on_node, end_of
from rollout_operator.plan.observed import (
    NodeState,
    Ownership,
    PodSeen,
    Report,
    Seen,
    node_state,
    pod_seen,
)
from rollout_operator.plan.plan import make_plan
from rollout_operator.plan.restarts import next_start, steady_in
from rollout_pod.protocol import GateState, PodPhase, SleepState, SleepTag
from tests.support.operator_objects import (
    DEFAULTS,
    NOW,
    UID,
    container,
    pod,
    replica,
    seen,
    state,
)
from tests.support.plan_world import PlanWorld

SPEC = RolloutSpec(model="m")
QUICK = {
    "backoffSeconds": 10,
    "backoffLimitSeconds": 60,
    "resetAfterSeconds": 100,
    "maxRestarts": 2,
}


def going(**traits: Any) -> PodSeen:
    return pod(deleting=True, delete_by=NOW + 45, **traits)


def over(**traits: Any) -> PodSeen:
    return pod(**{"phase": "Failed", "ready": False, **traits})


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (pod(), None),
        (going(), None),  # a person's wish is no failure
        (going(phase="Succeeded"), None),  # nor that it comes true
        (going(phase="Failed"), None),
        (over(), (Reason.POD_FAILED, True)),
        (over(phase="Succeeded"), (Reason.POD_FAILED, True)),
        (over(reason="UnexpectedAdmissionError"), (Reason.POD_FAILED, True)),
        # by kubelet, since a node runs out of memory or disk: perhaps by this very pod
        (over(reason="Evicted", disruption="TerminationByKubelet"), (Reason.EVICTED, True)),
        (over(reason="Evicted"), (Reason.EVICTED, True)),
        # by the eviction API: kubectl drain, a descheduler
        (going(disruption="EvictionByEvictionAPI"), (Reason.EVICTED, False)),
        # and has drained
        (going(phase="Succeeded", disruption="EvictionByEvictionAPI"), (Reason.EVICTED, False)),
        (going(phase="Succeeded", disruption="PreemptionByScheduler"), (Reason.PREEMPTED, False)),
        (over(disruption="EvictionByEvictionAPI"), (Reason.EVICTED, False)),
        (going(disruption="DeletionByTaintManager"), (Reason.EVICTED, False)),
        (going(disruption="PreemptionByScheduler"), (Reason.PREEMPTED, False)),
        (over(disruption="DeletionByPodGC"), (Reason.NODE_LOST, False)),
        (over(disruption="TerminationByKubelet"), (Reason.NODE_SHUTDOWN, False)),
        (over(reason="Terminated"), (Reason.NODE_SHUTDOWN, False)),
        (over(disruption="SomethingNew"), (Reason.POD_FAILED, True)),
    ],
)
def test_why_a_pod_ends(what: PodSeen, expected: tuple[Reason, bool] | None):
    end = end_of(SPEC, seen(what), NOW)
    assert (end and (end.reason, end.failure)) == expected


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (None, None),
        (NodeState.READY, None),
        (NodeState.UNKNOWN, None),
        (NodeState.NOT_READY, Reason.NODE_LOST),
        (NodeState.ABSENT, Reason.NODE_LOST),
    ],
)
def test_only_a_lost_node_makes_a_pod_that_lingers_a_lost_one(
    node: NodeState | None, reason: Reason | None
):
    end = end_of(SPEC, seen(going(), node=node), NOW)
    assert (end and end.reason) == reason


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, NodeState.ABSENT),
        ({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, NodeState.READY),
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, NodeState.NOT_READY),
        ({}, NodeState.NOT_READY),
    ],
)
def test_what_a_node_says(raw: Any, expected: NodeState):
    assert node_state(raw) is expected


def test_what_a_pod_says_of_its_end():
    raw = {
        "metadata": {"name": "qwen-0", "uid": "u", "deletionTimestamp": "2027-01-15T08:00:00Z"},
        "status": {
            "phase": "Failed",
            "reason": "Evicted",
            "message": "The node was low on resource: memory.",
            "conditions": [
                {"type": "DisruptionTarget", "status": "True", "reason": "R", "message": "M"}
            ],
        },
    }
    found = pod_seen(raw, name="qwen", uid=UID)
    assert (found.reason, found.disruption, found.disruption_message) == ("Evicted", "R", "M")
    assert found.delete_by == NOW
    raw["status"]["conditions"][0]["status"] = "False"
    assert pod_seen(raw, name="qwen", uid=UID).disruption == ""


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"waiting": {"reason": "ContainerCreating"}}, (False, 0, 0)),
        ({"running": {"startedAt": "2027-01-15T08:00:00Z"}}, (True, NOW, 0)),
        (
            {
                "terminated": {
                    "exitCode": 1,
                    "startedAt": "2027-01-15T08:00:00Z",
                    "finishedAt": "2027-01-15T08:00:09Z",
                }
            },
            (True, NOW, NOW + 9),
        ),
    ],
)
def test_when_a_container_ran(state: Any, expected: tuple[bool, float, float]):
    raw = {
        "metadata": {"name": "qwen-0", "uid": "u"},
        "status": {"containerStatuses": [{"name": "engine", "state": state}]},
    }
    engine = pod_seen(raw, name="qwen", uid=UID).engine
    assert engine is not None
    assert (engine.ran, engine.started_at, engine.ended_at) == expected


# -- one replica's life, with a clock; the operator remembers nothing but the status


@dataclass
class World(PlanWorld):
    """Does what plans say, and what kubelet would."""

    what: Seen = field(default_factory=lambda: seen())
    made: list[tuple[float, str]] = field(default_factory=list)
    removed: list[tuple[float, Reason, bool]] = field(default_factory=list)

    @property
    def seen(self) -> Seen:
        return self.what

    def _do(self, action: Action) -> None:
        if isinstance(action, CreatePod):
            assert self.what.pod is None, "the old pod is still there"
            self.made.append((self.now, action.hash))
            fresh = pod(self.replica, uid=f"pod-{len(self.made)}", ready=False, created=self.now)
            self.what = seen(fresh, state(None, phase=PodPhase.LOADING, generation=self.generation))
        elif isinstance(action, DeletePod):
            assert self.what.pod is not None and self.what.pod.uid == action.uid
            self.removed.append((self.now, action.reason, action.force))
            self.what = seen()

    # what happens to it

    def serve(self) -> None:
        assert self.what.pod is not None
        engine = replace(self.what.pod.engine or container(), running=True, waiting="")
        up = replace(self.what.pod, ready=True, engine=engine)
        self.what = seen(up, state(generation=self.generation))
        self.settle()

    def fail(self, **traits: Any) -> None:
        assert self.what.pod is not None
        self.what = seen(replace(self.what.pod, ready=False, phase="Failed", **traits))
        self.settle()

    def kill_engine(self, **traits: Any) -> None:
        """The engine exits and kubelet starts it again."""
        assert self.what.pod is not None
        before = self.what.pod.engine or container()
        dead = replace(before, running=False, exit_code=1, exit_reason="Error", **traits)
        dead = replace(dead, started=False, started_at=0.0)
        self.what = seen(replace(self.what.pod, ready=False, engine=dead))
        self.settle()
        again = replace(dead, running=True, restarts=dead.restarts + 1)
        self.what = (
            seen(replace(self.what.pod, ready=False, engine=again)) if self.what.pod else seen()
        )
        self.settle()

    def counts(self) -> dict[str, int]:
        return {entry.reason: entry.count for entry in self.restarts.by_reason}


def served(**policy: Any) -> World:
    world = World(spec={"restartPolicy": {**QUICK, **policy}})
    world.settle()
    world.serve()
    assert world.reason() == ("True", Reason.SERVING)
    return world


def test_a_pod_that_failed_is_replaced_after_growing_pauses():
    world = served(maxRestarts=9)
    starts = []
    for _ in range(5):
        failed = world.now
        world.fail()
        assert world.reason() == ("False", Reason.POD_FAILED)
        world.run(200)
        starts.append(world.made[-1][0] - failed)
    assert starts == [10, 20, 40, 60, 60]
    assert [reason for _, reason, _ in world.removed] == [Reason.POD_FAILED] * 5


def test_a_failure_stands_in_the_status_before_the_pod_goes():
    world = served(backoffSeconds=0, backoffLimitSeconds=0)
    assert world.what.pod is not None
    world.what = seen(replace(world.what.pod, ready=False, phase="Failed"))
    world.pass_once()
    assert world.restarts.total == 1 and world.removed == []
    world.settle()
    assert len(world.removed) == 1 and world.restarts.total == 1


def test_it_gives_up_and_a_hashed_field_brings_it_back():
    world = served()
    for _ in range(3):
        world.fail(failure="no GPU")
        world.run(99)
        if world.what.pod and not world.what.pod.over:
            world.serve()
    assert len(world.made) == 3  # the first one and two restarts
    assert world.reason(ConditionType.STALLED) == ("True", Reason.CRASH_LOOP)
    message = world.replica.status.condition(ConditionType.STALLED).message  # type: ignore[union-attr]
    assert "no GPU" in message and "maxRestarts" in message
    world.run(10_000)
    assert len(world.made) == 3
    # a field that reaches running pods changes nothing
    world.spec |= {"paused": True}
    world.generation += 1
    world.run(1000)
    assert world.reason(ConditionType.STALLED) == ("True", Reason.CRASH_LOOP)
    world.spec |= {"model": "mended", "paused": False}
    world.generation += 1
    world.run(1)
    assert len(world.made) == 4
    world.serve()
    assert world.reason() == ("True", Reason.SERVING)
    assert world.restarts.consecutive == 0 and world.restarts.total == 3


def test_more_restarts_allowed_bring_it_back_too():
    world = served(maxRestarts=0)
    world.fail()
    world.run(1000)
    assert world.reason(ConditionType.STALLED) == ("True", Reason.CRASH_LOOP)
    world.spec["restartPolicy"] |= {"maxRestarts": 1}
    world.generation += 1
    world.run(1)
    assert len(world.made) == 2


def test_failures_are_forgotten_after_a_while_of_availability():
    world = served()
    for _ in range(6):
        world.fail()
        world.run(50)
        world.serve()
        assert world.restarts.consecutive == 1
        world.run(QUICK["resetAfterSeconds"] + 1)
        assert world.restarts.consecutive == 0
    assert world.counts() == {"PodFailed": 6}
    # written once, and then nothing asks to be woken
    assert world.settle() is None


@pytest.mark.parametrize(
    ("available", "engine", "left"),
    [
        # since when, and since when the engine runs: it may have been loading for 50 s of that
        (("True", Reason.SERVING, 30), 40, 70),
        (("True", Reason.SERVING, 30), 500, -350),
        (("True", Reason.SERVING, 120), None, -20),
        # sleep goes on where availability ended
        (("False", Reason.SLEEPING, 5), 140, 10),
        (("False", Reason.SLEEPING, 900), 20, 130),
        (("False", Reason.SLEEPING, 900), None, None),
        (("False", Reason.NOT_SERVING, 900), 900, None),
    ],
)
def test_when_failures_are_forgotten(
    available: tuple[str, Reason, float], engine: float | None, left: float | None
):
    truth, reason, since = available
    condition = {
        "type": "Available",
        "status": truth,
        "reason": reason,
        "lastTransitionTime": rfc3339(NOW - since),
    }
    wanted = replica(status={"conditions": [condition]}, restartPolicy=QUICK, loadTimeoutSeconds=50)
    ended = container(running=False, exit_code=1, started_at=NOW - 900)
    runs = ended if engine is None else container(started_at=NOW - engine)
    assert steady_in(wanted, seen(pod(engine=runs)), NOW) == left


def test_a_nodes_clock_that_is_behind_forgets_no_failure():
    world = served()
    world.kill_engine()
    assert world.what.pod is not None
    engine = container(restarts=1, started_at=world.now - 10_000)
    world.what = replace(world.what, pod=replace(world.what.pod, engine=engine))
    world.serve()
    assert world.restarts.consecutive == 1


def test_failures_are_forgotten_although_it_sleeps_now_and_then():
    world = served(maxRestarts=1)
    world.spec["loadTimeoutSeconds"] = 50
    world.what = seen()
    world.settle()
    for _ in range(6):
        world.kill_engine()
        assert world.restarts.consecutive == 1
        for _ in range(3):
            wake(world)
            world.run(30)
            put_to_sleep(world)
            world.run(30)
        assert world.restarts.consecutive == 0
    assert world.removed == [] and world.counts() == {"EngineFailed": 6}


@pytest.mark.parametrize("heard", [True, False])
def test_what_sleeps_is_not_given_up_although_it_failed_often(heard: bool):
    world = served(resetAfterSeconds=10_000)
    for _ in range(2):
        world.kill_engine()
        wake(world)
    put_to_sleep(world)
    world.spec["restartPolicy"] |= {"maxRestarts": 0}
    world.generation += 1
    # an operator that has just started has asked nobody yet
    world.what = replace(world.what, report=world.what.report if heard else None)
    world.pass_once()
    assert world.what.pod is not None and world.removed == []
    put_to_sleep(world)
    world.run(100)
    assert world.reason() == ("True", Reason.SLEEPING) and world.removed == []
    # on its way up it is not ready either
    del world.spec["sleep"]
    world.generation += 1
    world.settle()
    wake(world)
    assert world.reason() == ("True", Reason.SERVING) and world.removed == []
    put_to_sleep(world)
    world.kill_engine()
    assert [reason for _, reason, _ in world.removed] == [Reason.CRASH_LOOP]


def put_to_sleep(world: World) -> None:
    """Ask for it, and have kubelet call the pod not ready."""
    assert world.what.pod is not None
    world.spec["sleep"] = {"level": 1}
    slept = SleepState(level=1, tags=tuple(SleepTag), released=True)
    said = state(
        generation=world.generation,
        phase=PodPhase.SLEEPING,
        gate=GateState.CLOSED,
        ready=False,
        sleep=slept,
    )
    world.what = seen(replace(world.what.pod, ready=False), said)
    world.settle()


def wake(world: World) -> None:
    assert world.what.pod is not None and world.what.pod.engine is not None
    world.spec.pop("sleep", None)
    since = world.what.pod.engine.started_at or world.now
    up = replace(world.what.pod.engine, running=True, started=True, started_at=since)
    world.what = replace(world.what, pod=replace(world.what.pod, engine=up))
    world.serve()


def test_an_engine_that_kubelet_starts_again_and_again_is_given_up_and_frees_its_gpu():
    world = served()
    for exits in (1, 2):
        world.kill_engine()
        assert world.restarts.consecutive == exits
        assert world.what.pod is not None
    world.kill_engine()
    assert world.what.pod is None
    assert [reason for _, reason, _ in world.removed] == [Reason.CRASH_LOOP]
    assert world.reason(ConditionType.STALLED) == ("True", Reason.CRASH_LOOP)
    assert world.counts() == {"EngineFailed": 3}
    world.run(10_000)
    assert len(world.made) == 1


def test_what_serves_is_not_given_up_although_it_failed_often():
    world = served(maxRestarts=0)
    assert world.what.pod is not None
    exits = container(restarts=1, exit_code=1)
    world.what = seen(replace(world.what.pod, engine=exits), state())
    world.run(10)
    assert world.restarts.consecutive == 1
    assert world.removed == [] and world.reason() == ("True", Reason.SERVING)


def test_the_past_of_a_pod_that_another_operator_looked_after_is_not_held_against_it():
    world = served()
    assert world.what.pod is not None
    old = replace(world.what.pod, ready=False, engine=container(restarts=50, exit_code=1))
    world.what = seen(old, state(None, phase=PodPhase.LOADING))
    world.settle()
    assert world.removed == [] and world.restarts.consecutive == 0
    world.kill_engine()
    assert world.restarts.consecutive == 1


def test_an_engine_out_of_memory_says_so_until_it_is_up():
    world = served()
    assert world.what.pod is not None
    dead = container(running=False, exit_code=137, exit_reason="OOMKilled")
    world.what = seen(replace(world.what.pod, ready=False, engine=dead))
    world.settle()
    assert world.reason() == ("False", Reason.OOM_KILLED)
    assert world.reason(ConditionType.STALLED)[0] == "False"
    loading = replace(dead, running=True, restarts=1)
    starting = replace(world.what.pod, engine=loading)
    world.what = seen(starting, state(None, phase=PodPhase.LOADING))
    world.settle()
    assert world.reason() == ("False", Reason.OOM_KILLED)
    # at the second time kubelet waits: somebody has to act
    looping = replace(loading, running=False, waiting="CrashLoopBackOff")
    world.what = seen(replace(starting, engine=looping))
    world.settle()
    assert world.reason(ConditionType.STALLED) == ("True", Reason.OOM_KILLED)
    assert world.counts() == {"OOMKilled": 2}
    message = world.replica.status.condition(ConditionType.READY).message  # type: ignore[union-attr]
    assert "limits.memory" in message
    world.serve()
    assert world.reason() == ("True", Reason.SERVING)


@pytest.mark.parametrize(
    ("disruption", "reason"),
    [
        ("EvictionByEvictionAPI", Reason.EVICTED),
        ("DeletionByTaintManager", Reason.EVICTED),
        ("PreemptionByScheduler", Reason.PREEMPTED),
    ],
)
def test_a_disruption_is_counted_once_and_never_a_failure(disruption: str, reason: Reason):
    world = served(maxRestarts=0)
    for times in (1, 2, 3):
        assert world.what.pod is not None
        ends = replace(
            world.what.pod,
            deleting=True,
            delete_by=world.now + 45,
            disruption=disruption,
            disruption_message="cordoned",
        )
        world.what = seen(ends, state(phase=PodPhase.DRAINING))
        world.run(30)
        assert world.reason() == ("False", reason)
        assert world.counts() == {reason: times}
        world.what = seen()
        world.settle()
        world.serve()
    assert world.restarts.consecutive == 0
    assert len(world.made) == 4


def test_a_pod_that_is_over_at_once_by_no_fault_of_its_own_does_not_spin():
    world = served()
    for _ in range(5):
        world.fail(reason="NodeShutdown")
        world.run(10)
    starts = [at for at, _ in world.made]
    assert all(later - earlier >= 10 for earlier, later in pairwise(starts[1:]))
    assert world.restarts.consecutive == 0


def test_a_pod_on_a_lost_node_is_given_up_when_its_end_is_overdue():
    world = served()
    assert world.what.pod is not None
    world.what = seen(replace(world.what.pod, deleting=True, delete_by=world.now + 45))
    world.run(45 + OVERDUE_S - 1)
    assert world.removed == [] and world.reason() == ("False", Reason.POD_REPLACING)
    world.what = replace(world.what, node=NodeState.READY)
    world.run(100)
    assert world.removed == []
    world.what = replace(world.what, node=NodeState.UNKNOWN)
    world.run(100)
    assert world.removed == []
    world.what = replace(world.what, node=NodeState.NOT_READY)
    world.run(1)
    assert [(reason, force) for _, reason, force in world.removed] == [(Reason.NODE_LOST, True)]
    assert world.counts() == {"NodeLost": 1}
    assert len(world.made) == 2


@pytest.mark.parametrize(
    ("what", "late", "expected"),
    [
        (pod(), 1000, False),
        (going(), 0, False),
        (going(), 45 + OVERDUE_S, True),
        (going(node=""), 1000, False),  # it never had one
        (going(disruption="DeletionByTaintManager"), 0, True),
        (pod(disruption="DeletionByTaintManager"), 0, False),
        (going(disruption="EvictionByEvictionAPI"), 0, False),
    ],
)
def test_whose_node_is_asked_for(what: PodSeen, late: float, expected: bool):
    assert depends_on_node(what, NOW + late) is expected


def test_a_pod_that_the_taint_of_a_lost_node_ends_says_so_and_waits_its_time():
    world = served()
    assert world.what.pod is not None
    ends = replace(
        world.what.pod,
        ready=False,
        deleting=True,
        delete_by=world.now + 16,
        disruption="DeletionByTaintManager",
        disruption_message="deleting due to NoExecute taint",
    )
    given_up = world.now + 16 + OVERDUE_S
    world.what = seen(ends, node=NodeState.NOT_READY)
    world.settle()
    assert world.reason() == ("False", Reason.NODE_LOST)
    ready = world.replica.status.condition(ConditionType.READY)
    assert ready is not None
    assert f"its node {ends.node} is lost" in ready.message and rfc3339(given_up) in ready.message
    world.run(16 + OVERDUE_S - 1)
    assert world.removed == []
    world.run(1)
    assert world.removed == [(given_up, Reason.NODE_LOST, True)]
    assert world.counts() == {"NodeLost": 1} and world.restarts.consecutive == 0


def test_a_node_that_comes_back_in_time_ends_its_pod_itself():
    world = served()
    assert world.what.pod is not None
    ends = replace(
        world.what.pod, deleting=True, delete_by=world.now + 16, disruption="DeletionByTaintManager"
    )
    world.what = seen(ends, node=NodeState.NOT_READY)
    world.run(30)
    world.what = seen(ends, node=NodeState.READY)
    world.run(1000)
    assert world.removed == [], "that is kubelet's to do"
    world.what = seen()
    world.settle()
    world.serve()
    assert world.counts() == {"NodeLost": 1} and len(world.made) == 2


def test_a_fenced_pod_is_counted_and_goes_while_it_is_still_listened_to():
    world = served()
    assert world.what.pod is not None
    world.what = seen(world.what.pod, report=Report(state=state(), fenced=True))
    plan = make_plan(world.replica, world.what, world.now, defaults=DEFAULTS)
    assert plan.actions == () and plan.document is not None
    world.settle()
    assert [reason for _, reason, _ in world.removed] == [Reason.FENCED]
    assert world.counts() == {"Fenced": 1} and world.restarts.consecutive == 0


def test_somebody_elses_pod_is_not_counted():
    made = make_plan(replica(), seen(over(owner=Ownership.FOREIGN)), NOW, defaults=DEFAULTS)
    assert made.restarts is None


@pytest.mark.parametrize("failures", [1, 2, 10, 1000])
def test_pauses_are_bounded(failures: int):
    policy = RestartPolicy()
    found = next_start(policy, Restarts(consecutive=failures, last_at=rfc3339(NOW)))
    assert NOW + policy.backoff_seconds <= found <= NOW + policy.backoff_limit_seconds
    assert unix(rfc3339(NOW)) == NOW


happenings = st.lists(
    st.sampled_from(["fail", "kill", "serve", "evict", "wait", "respec", "late"]), max_size=25
)


@settings(deadline=None)
@given(what=happenings)
def test_whatever_happens_it_never_starts_early_nor_twice_and_counts_each_end_once(what: list[str]):
    world = World(spec={"restartPolicy": QUICK})
    world.settle()
    ends = 0
    for happening in what:
        before = world.what.pod
        alive = before is not None and not before.over and not before.deleting
        match happening:
            case "fail" if alive:
                world.fail()
                ends += 1
            case "kill" if alive:
                world.kill_engine()
                ends += 1
            case "serve" if alive:
                world.serve()
            case "evict" if alive and before is not None:
                world.what = seen(
                    replace(
                        before,
                        deleting=True,
                        delete_by=world.now,
                        disruption="EvictionByEvictionAPI",
                    )
                )
                world.settle()
                ends += 1
                world.what = seen()
                world.settle()
            case "wait":
                world.run(15)
            case "late":
                # an operator that was away: the clock went on
                world.now += 500
                world.settle()
            case "respec":
                world.spec = {**world.spec, "model": f"m-{world.generation}"}
                world.generation += 1
                world.settle()
        found = world.replica.status.restarts
        assert (found.total if found else 0) == ends
        assert found is None or sum(e.count for e in found.by_reason) == ends
    # and at rest it stays
    made = len(world.made)
    world.run(5000)
    stalled = world.replica.status.condition(ConditionType.STALLED)
    gave_up = stalled is not None and stalled.reason == Reason.CRASH_LOOP
    assert gave_up or (world.what.pod is not None and not world.what.pod.over)
    assert len(world.made) <= made + 1

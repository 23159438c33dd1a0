"""What the status says, case by case."""

from dataclasses import replace
from typing import Any

import pytest

from rollout_operator.api.conditions import Reason
from rollout_operator.api.replica import Replica
from rollout_operator.api.status import ReplicaStatus
from rollout_operator.apply.events import transitions
from rollout_operator.plan.observed import Report, Seen
from rollout_operator.plan.plan import make_plan
from rollout_operator.plan.status import render_failure, render_status
from rollout_pod.protocol import (
    GateState,
    PodPhase,
    RankState,
    SleepState,
    SleepTag,
    UpdatePhase,
    UpdateSeconds,
    UpdateState,
    WeightsRef,
)
from tests.support.operator_objects import (
    DEFAULTS,
    NOW,
    container,
    pod,
    replica,
    seen,
    state,
)

SOURCE = {"source": {"path": "/ckpt/{version}"}}
KINDS = ("Ready", "Reconciling", "Stalled", "Available", "Paused", "WeightsReady")


def render(wanted: Replica, what: Seen, now: float = NOW) -> ReplicaStatus:
    return render_status(wanted, what, make_plan(wanted, what, now, defaults=DEFAULTS), now)


def facts(status: ReplicaStatus) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in status.conditions}


def update(phase: UpdatePhase, target: str = "step-1", **traits: Any) -> UpdateState:
    return UpdateState(target=target, phase=phase, **traits)


def asks(version: str = "step-1", **spec: Any) -> Replica:
    return replica(weightVersion=version, weights=SOURCE, **spec)


PAUSED = {"phase": PodPhase.PAUSED, "gate": GateState.CLOSED}
DEAD = container(running=False, waiting="CrashLoopBackOff", exit_code=1, exit_message="no model")
SERVED = {
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Serving"},
        {"type": "Available", "status": "True", "reason": "Serving"},
    ]
}
DIED = container(exit_code=1, exit_reason="Error", restarts=1)
OUT_OF_MEMORY = container(exit_code=137, exit_reason="OOMKilled", restarts=1)

FULL = {"level": 1}
ONLY_KV = {"tags": ["kv_cache"]}


def sleeping(level: int, *tags: str, version: str | None = "base", **traits: Any) -> Seen:
    """A pod in phase Sleeping; not ready with its weights asleep."""
    slept = SleepState(
        level=level, tags=tuple(map(SleepTag, tags)), released=True, bytes=3 << 30,
        **traits.pop("slept", {}),
    )  # fmt: skip
    ready = "weights" not in tags
    said = state(version, **{
        "phase": PodPhase.SLEEPING, "gate": GateState.CLOSED, "ready": ready,
        "desired_version": "base", "sleep": slept, **traits,
    })  # fmt: skip
    return seen(pod(ready=ready), said)


CASES: list[tuple[str, Replica, Seen, tuple[str, Reason, str, str]]] = [
    # name, replica, seen, (Ready, reason, Stalled, Available)
    ("serving", replica(), seen(pod(), state()), ("True", Reason.SERVING, "False", "True")),
    (
        "paused",
        replica(paused=True),
        seen(pod(), state(**PAUSED)),
        ("True", Reason.PAUSED, "False", "True"),
    ),
    (
        "asleep",
        replica(sleep=FULL),
        sleeping(1, "weights", "kv_cache"),
        ("True", Reason.SLEEPING, "False", "False"),
    ),
    (
        "only the cache is asleep",
        replica(sleep=ONLY_KV),
        sleeping(1, "kv_cache"),
        ("True", Reason.SLEEPING, "False", "True"),
    ),
    (
        "only the cache is asleep, and kubelet has yet to see that it is ready",
        replica(sleep=ONLY_KV),
        replace(sleeping(1, "kv_cache"), pod=pod(ready=False)),
        ("False", Reason.READINESS_PENDING, "False", "False"),
    ),
    (
        "asleep with its weights dropped",
        replica(sleep={"level": 2}),
        sleeping(2, "weights", "kv_cache", version=None),
        ("True", Reason.SLEEPING, "False", "False"),
    ),
    (
        "asleep deeper than asked",
        replica(sleep=FULL),
        sleeping(2, "weights", "kv_cache", version=None),
        ("True", Reason.SLEEPING, "False", "False"),
    ),
    (
        "asleep not deep enough",
        replica(sleep={"level": 2}),
        sleeping(1, "weights", "kv_cache"),
        ("False", Reason.FALLING_ASLEEP, "False", "False"),
    ),
    (
        "asleep with another version asked for",
        asks(sleep=FULL),
        sleeping(1, "weights", "kv_cache", desired_version="step-1"),
        ("False", Reason.WAITING_FOR_WAKE, "False", "False"),
    ),
    (
        "updated while the cache is asleep",
        asks(sleep=ONLY_KV),
        sleeping(1, "kv_cache", desired_version="step-1"),
        ("False", Reason.UPDATING, "False", "True"),
    ),
    (
        "falling asleep",
        replica(sleep=FULL),
        seen(pod(), state(phase=PodPhase.PAUSING, gate=GateState.CLOSED)),
        ("False", Reason.FALLING_ASLEEP, "False", "True"),
    ),
    (
        "waking",
        replica(),
        sleeping(1, "weights", "kv_cache"),
        ("False", Reason.WAKING, "False", "False"),
    ),
    (
        "waking one tag",
        replica(sleep=ONLY_KV),
        sleeping(1, "weights", "kv_cache"),
        ("False", Reason.FALLING_ASLEEP, "False", "False"),
    ),
    (
        "an engine that cannot sleep",
        replica(sleep=FULL),
        seen(pod(), state(sleep=SleepState(level=1, tags=(), released=False, message="no"))),
        ("False", Reason.SLEEP_UNSUPPORTED, "True", "True"),
    ),
    (
        "pausing",
        replica(paused=True),
        seen(pod(), state()),
        ("False", Reason.PAUSING, "False", "True"),
    ),
    (
        "resuming",
        replica(),
        seen(pod(), state(**PAUSED)),
        ("False", Reason.RESUMING, "False", "True"),
    ),
    (
        "an older generation",
        replica(generation=4),
        seen(pod(), state()),
        ("False", Reason.UPDATING, "False", "True"),
    ),
    (
        "prefetching",
        asks(),
        seen(pod(), state(desired_version="step-1", update=update(UpdatePhase.PREFETCHING))),
        ("False", Reason.UPDATING, "False", "True"),
    ),
    (
        "the new version",
        asks(),
        seen(pod(), state("step-1", update=update(UpdatePhase.COMMITTED))),
        ("True", Reason.SERVING, "False", "True"),
    ),
    (
        "a missing version",
        asks(),
        seen(
            pod(),
            state(desired_version="step-1", update=update(UpdatePhase.WAITING, message="none")),
        ),
        ("False", Reason.WEIGHTS_UNAVAILABLE, "False", "True"),
    ),
    (
        "a failed transfer",
        asks(),
        seen(
            pod(ready=False),
            state(
                None,
                desired_version="step-1",
                phase=PodPhase.POISONED,
                update=update(UpdatePhase.FAILED, message="agent died"),
            ),
        ),
        ("False", Reason.WEIGHTS_UNAVAILABLE, "False", "False"),
    ),
    (
        "a rejected version",
        asks(),
        seen(
            pod(),
            state(
                desired_version="step-1",
                update=update(UpdatePhase.REJECTED, message="wrong shape"),
                rejected=WeightsRef.model_validate(
                    {"version": "step-1", "source": {"path": "/ckpt/step-1"}}
                ),
            ),
        ),
        ("False", Reason.UPDATE_FAILED, "True", "True"),
    ),
    (
        "poisoned",
        replica(),
        seen(pod(ready=False), state(None, phase=PodPhase.POISONED, last_error="x")),
        ("False", Reason.POISONED, "False", "False"),
    ),
    (
        "loading weights",
        replica(),
        seen(pod(ready=False), state(None, phase=PodPhase.STALE)),
        ("False", Reason.LOADING_WEIGHTS, "False", "False"),
    ),
    (
        "kubelet is behind",
        replica(),
        seen(pod(ready=False), state()),
        ("False", Reason.READINESS_PENDING, "False", "False"),
    ),
    (
        "the engine starts",
        replica(),
        seen(pod(ready=False), state(None, phase=PodPhase.LOADING)),
        ("False", Reason.ENGINE_STARTING, "False", "False"),
    ),
    (
        "the admin port is not up yet",
        replica(),
        seen(pod(ready=False), report=Report(error="refused", failing_for=1)),
        ("False", Reason.ENGINE_STARTING, "False", "False"),
    ),
    (
        "the engine has just died, and kubelet has not said so",
        replica(),
        seen(pod(ready=False), report=Report(state=state(), error="refused", failing_for=1)),
        ("False", Reason.ENGINE_STARTING, "False", "False"),
    ),
    (
        "out of reach for everybody",
        replica(),
        seen(pod(ready=False), report=Report(state=state(), error="timeout", failing_for=30)),
        ("False", Reason.POD_UNREACHABLE, "False", "False"),
    ),
    (
        "unschedulable",
        replica(),
        seen(pod(ready=False, ip="", unschedulable="0/3 nodes", phase="Pending")),
        ("False", Reason.UNSCHEDULABLE, "False", "False"),
    ),
    (
        "a claim that does not exist",
        replica(),
        seen(
            pod(
                ready=False,
                ip="",
                phase="Pending",
                unschedulable='0/1 nodes are available: persistentvolumeclaim "ckpt" not found.',
            )
        ),
        ("False", Reason.VOLUME_UNAVAILABLE, "False", "False"),
    ),
    (
        "a claim that no volume serves",
        replica(),
        seen(
            pod(
                ready=False,
                ip="",
                phase="Pending",
                unschedulable="pod has unbound immediate PersistentVolumeClaims.",
            )
        ),
        ("False", Reason.VOLUME_UNAVAILABLE, "False", "False"),
    ),
    (
        "no image",
        replica(),
        seen(
            pod(
                ready=False,
                weights=container(running=False, waiting="ImagePullBackOff", waiting_message="404"),
            )
        ),
        ("False", Reason.IMAGE_PULL_FAILED, "False", "False"),
    ),
    (
        "a missing ConfigMap",
        replica(),
        seen(
            pod(ready=False, engine=container(running=False, waiting="CreateContainerConfigError"))
        ),
        ("False", Reason.POD_CONFIG_ERROR, "False", "False"),
    ),
    (
        "the agent crashes",
        replica(),
        seen(pod(ready=False, weights=replace(DEAD, exit_message="bad flag"))),
        ("False", Reason.WEIGHTS_AGENT_FAILED, "False", "False"),
    ),
    (
        "the engine never starts",
        replica(),
        seen(pod(ready=False, engine=DEAD)),
        ("False", Reason.ENGINE_FAILED, "True", "False"),
    ),
    (
        "the engine that served is started again",
        replica(status=SERVED),
        seen(pod(ready=False, engine=DIED)),
        ("False", Reason.ENGINE_RESTARTING, "False", "False"),
    ),
    (
        "the engine that served was killed for its memory",
        replica(status=SERVED),
        seen(pod(ready=False, engine=OUT_OF_MEMORY)),
        ("False", Reason.OOM_KILLED, "False", "False"),
    ),
    (
        "an engine that never fits into its memory",
        replica(),
        seen(pod(ready=False, engine=OUT_OF_MEMORY)),
        ("False", Reason.OOM_KILLED, "True", "False"),
    ),
    (
        "it is up again",
        replica(status=SERVED),
        seen(pod(engine=DIED), state()),
        ("True", Reason.SERVING, "False", "True"),
    ),
    (
        "it keeps on dying",
        replica(status=SERVED),
        seen(pod(ready=False, engine=DEAD)),
        ("False", Reason.ENGINE_FAILED, "True", "False"),
    ),
    (
        "the engine is dead and says so",
        replica(status=SERVED),
        seen(pod(ready=False), state(None, phase=PodPhase.FAILED, last_error="CUDA error")),
        ("False", Reason.ENGINE_RESTARTING, "False", "False"),
    ),
    (
        "out of reach, kubelet calls it ready",
        replica(),
        seen(pod(), report=Report(state=state(), error="timeout", failing_for=30)),
        ("Unknown", Reason.POD_UNREACHABLE, "False", "True"),
    ),
    (
        "out of reach for a moment",
        replica(),
        seen(pod(), report=Report(state=state(), error="timeout", failing_for=3)),
        ("True", Reason.SERVING, "False", "True"),
    ),
    (
        "the token is not taken",
        replica(),
        seen(pod(), report=Report(state=state(), unauthorized=True)),
        ("False", Reason.UNAUTHORIZED, "False", "True"),
    ),
    (
        "the document is not taken",
        replica(),
        seen(pod(), report=Report(state=state(), refused="bucket_bytes: too large")),
        ("False", Reason.DOCUMENT_REFUSED, "False", "True"),
    ),
    (
        "being replaced",
        replica(),
        seen(pod(deleting=True), state(phase=PodPhase.DRAINING)),
        ("False", Reason.POD_REPLACING, "False", "False"),
    ),
    ("no pod yet", replica(), seen(), ("False", Reason.POD_CREATING, "False", "False")),
]


@pytest.mark.parametrize(
    ("wanted", "what", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_conditions(wanted: Replica, what: Seen, expected: tuple[str, Reason, str, str]):
    status = render(wanted, what)
    found = facts(status)
    assert tuple(found) == KINDS
    assert (*found["Ready"], found["Stalled"][0], found["Available"][0]) == expected
    ready, stalled = found["Ready"][0] == "True", found["Stalled"][0] == "True"
    # kstatus: exactly one of the three says how things stand
    assert [ready, stalled, found["Reconciling"][0] == "True"].count(True) == 1
    assert {c.observed_generation for c in status.conditions} == {wanted.generation}
    assert status.observed_generation == wanted.generation
    if not ready:
        assert all(c.message for c in status.conditions if c.type == "Ready")
    assert status == ReplicaStatus.parse(status.dump())


@pytest.mark.parametrize(("wanted", "what"), [c[1:3] for c in CASES], ids=[c[0] for c in CASES])
def test_nothing_to_tell_is_told_once(wanted: Replica, what: Seen):
    first = render(wanted, what)
    again = replace(wanted, status=first)
    second = render(again, what, NOW + 100)
    # an engine that never came up does not look better on the second sight
    assert second == first
    assert transitions(first, second) == []


def test_after_a_restart_of_the_operator_the_status_waits_for_the_pod():
    before = render(replica(), seen(pod(), state()))
    known = replica(status=before.dump())
    assert render(known, seen(pod())) == before
    just_failed = Report(error="refused", failing_for=1)
    assert render(known, seen(pod(), report=just_failed)) == before
    long_gone = Report(error="refused", failing_for=11)
    assert facts(render(known, seen(pod(), report=long_gone)))["Ready"][0] == "Unknown"


def test_a_transition_changes_the_time_and_only_of_what_changed():
    before = render(replica(), seen(pod(), state()))
    after = render(
        replica(status=before.dump(), paused=True), seen(pod(), state(**PAUSED)), NOW + 60
    )
    moved = {
        new.type
        for old, new in zip(before.conditions, after.conditions, strict=True)
        if old.last_transition_time != new.last_transition_time
    }
    assert moved == {"Paused"}
    assert before.conditions[0].last_transition_time == "2027-01-15T08:00:00Z"


def test_the_whole_status_of_an_update():
    took = UpdateSeconds(prefetch=3.14159, cancel=0.03, transfer=0.3, commit=0.01, paused=0.36)
    done = update(
        UpdatePhase.COMMITTED,
        attempt=2,
        bytes=99,
        seconds=took,
        transport="shared_memory",
        mode="bucketed",
        started_at=NOW - 4,
        finished_at=NOW,
    )
    status = render(asks(weightStep=1), seen(pod(), state("step-1", update=done)))
    dumped = status.dump()
    assert dumped["weightVersion"] == "step-1"
    assert dumped["phase"] == "Serving"
    assert dumped["endpoint"] == "http://qwen.ns.svc:8000"
    assert dumped["lastCommitted"] == {"version": "step-1", "source": {"path": "/ckpt/step-1"}}
    assert dumped["weightUpdate"] == {
        "target": "step-1",
        "phase": "Committed",
        "attempt": 2,
        "startedAt": "2027-01-15T07:59:56Z",
        "finishedAt": "2027-01-15T08:00:00Z",
        "pausedSeconds": 0.36,
        "seconds": {"prefetch": 3.142, "cancel": 0.03, "transfer": 0.3, "commit": 0.01},
        "bytes": 99,
        "transport": "shared_memory",
        "mode": "bucketed",
        "message": "",
    }
    assert dumped["pods"] == [
        {
            "name": "qwen-0",
            "rank": 0,
            "node": "node-1",
            "ready": True,
            "bootID": "boot-1",
            "phase": "Serving",
            "weightVersion": "step-1",
            "message": "",
        }
    ]


def test_a_push_that_is_awaited_says_so_and_the_replica_stays_available():
    waits = update(UpdatePhase.AWAITING_PUSH, message="the sender vanished")
    asked = replica(weightVersion="step-1", weights={"source": {"push": {}}})
    said = state("base", desired_version="step-1", needs="step-1", update=waits)
    status = render(asked, seen(pod(), said))
    shown = {c.type: (c.status, c.reason) for c in status.conditions}
    assert shown["Ready"] == ("False", "AwaitingPush") == shown["WeightsReady"]
    assert shown["Reconciling"] == ("True", "AwaitingPush")
    assert (shown["Available"][0], shown["Stalled"][0]) == ("True", "False")
    words = next(c.message for c in status.conditions if c.type == "Ready")
    assert all(w in words for w in ("push step-1", "base serves on", "vanished", "ROLLOUT_RUN_DIR"))
    assert status.weight_update and status.weight_update.phase == "AwaitingPush"

    lost = state(
        None, phase=PodPhase.POISONED, ready=False, gate=GateState.CLOSED, needs="step-1",
        desired_version="step-1", update=waits,
    )  # fmt: skip
    status = render(asked, seen(pod(ready=False), lost))
    shown = {c.type: (c.status, c.reason) for c in status.conditions}
    assert shown["Ready"] == ("False", "AwaitingPush")
    assert shown["Available"][0] == "False"
    assert "nothing is served" in status.conditions[0].message


def test_a_pushed_update_shows_how_it_went():
    done = update(
        UpdatePhase.COMMITTED, bytes=7, session="p", transport="cuda_ipc", mode="direct",
        note="", steps={f"s{i}": i / 7 for i in range(40)},
        seconds=UpdateSeconds(cancel=0.03, transfer=0.3, commit=0.01, paused=0.36),
    )  # fmt: skip
    ranks = tuple(
        RankState(rank=r, host="h", weight_version="step-1", path=p, note=n)
        for r, p, n in ((0, "replayed", ""), (1, "mixed", "a packed layer"))
    )
    committed = WeightsRef.model_validate({"version": "step-1", "source": {"push": {}}})
    said = state("step-1", update=done, ranks=ranks, committed=committed)
    shown = render(asks(weightStep=1), seen(pod(), said)).dump()
    assert shown["lastCommitted"] == {"version": "step-1", "source": {"push": {}}}
    told = shown["weightUpdate"]
    assert (told["transport"], told["mode"], told["bytes"]) == ("cuda_ipc", "direct", 7)
    assert (told["path"], told["note"]) == ("mixed, replayed", "a packed layer")
    assert told["pausedSeconds"] == 0.36
    steps = told["seconds"].pop("steps")
    assert told["seconds"] == {"cancel": 0.03, "transfer": 0.3, "commit": 0.01}
    assert len(steps) == 32 and steps["s39"] == 5.571 and "s0" not in steps
    assert shown["history"][0]["source"] == {"push": {}}

    offered = update(UpdatePhase.STAGED, session="p", transport="cuda_ipc")
    shown = render(asks(), seen(pod(), state("base", update=offered))).dump()
    assert shown["weightUpdate"]["phase"] == "Transferring", "a moment; one write less"


def test_a_sleep_says_what_it_released_and_what_is_held():
    status = render(replica(sleep=FULL), sleeping(1, "weights", "kv_cache"))
    words = {c.type: c.message for c in status.conditions}
    assert status.phase == "Sleeping"
    assert words["Ready"] == "weights and kv_cache asleep, 3.0 GiB released; holds base"
    assert facts(status)["Paused"] == ("True", "Sleeping")
    assert facts(status)["WeightsReady"] == ("True", "Committed")
    assert facts(status)["Available"] == ("False", "Sleeping")
    dropped = render(replica(sleep={"level": 2}), sleeping(2, "weights", "kv_cache", version=None))
    assert facts(dropped)["WeightsReady"] == ("False", "Sleeping")
    assert dropped.weight_version == ""
    on_cpu = sleeping(1, "kv_cache")
    assert on_cpu.report and on_cpu.report.state and on_cpu.report.state.sleep
    slept = on_cpu.report.state.sleep.model_copy(
        update={"released": False, "bytes": 0, "message": "a CPU"}
    )
    said = on_cpu.report.state.model_copy(update={"sleep": slept})
    status = render(replica(sleep=ONLY_KV), seen(pod(), said))
    assert {c.type: c.message for c in status.conditions}["Ready"] == (
        "kv_cache asleep, but no memory was released: a CPU; holds base"
    )


def test_counters_that_move_are_no_news():
    def at(moved: int, phase: UpdatePhase) -> ReplicaStatus:
        moving = update(phase, bytes=moved, seconds=UpdateSeconds(prefetch=moved))
        return render(
            asks(), seen(pod(), state(desired_version="step-1", unfinished=moved, update=moving))
        )

    assert at(1, UpdatePhase.PREFETCHING) == at(10**9, UpdatePhase.PREFETCHING)
    steps = (UpdatePhase.CANCELLING, UpdatePhase.TRANSFERRING, UpdatePhase.COMMITTING)
    assert len({at(n, phase).dump()["weightUpdate"]["phase"] for n, phase in enumerate(steps)}) == 1


def test_ranks_that_differ_hold_no_version():
    ranks = (
        RankState(rank=0, host="qwen-0", weight_version="base"),
        RankState(rank=1, host="qwen-0", weight_version="step-1"),
    )
    status = render(replica(), seen(pod(), state(ranks=ranks)))
    assert status.weight_version == ""
    assert facts(status)["WeightsReady"][0] == "False"


def test_an_engine_that_the_image_does_not_have_is_told_of_with_those_it_has():
    said = "no engine 'sglang' is installed; there are: vllm"
    dead = replace(DEAD, exit_code=2, exit_message=said)
    status = render(replica(engine="sglang"), seen(pod(ready=False, engine=dead)))
    assert facts(status)["Stalled"] == ("True", "EngineFailed")
    message = messages(status)["Ready"]
    assert said in message
    assert "spec.engine" in message


def test_an_engine_that_failed_stays_failed_until_it_is_up():
    failed = render(replica(), seen(pod(ready=False, engine=DEAD)))
    known = replace(replica(), status=failed)
    # between two deaths: silence, then loading, by a container that kubelet says nothing of
    for said in (
        Report(error="refused", failing_for=1),
        Report(state=state(None, phase="Loading")),
    ):
        status = render(known, seen(pod(ready=False), report=said))
        assert status.conditions[:3] == failed.conditions[:3]
    stale = Report(state=state(None, phase="Stale"))
    again = render(known, seen(pod(ready=False, engine=DIED), report=stale))
    assert facts(again)["Ready"] == ("False", "LoadingWeights")
    # another spec is another chance
    other = replace(replica(generation=4), status=failed)
    silent = seen(pod(ready=False), report=Report(error="refused", failing_for=1))
    assert facts(render(other, silent))["Ready"] == ("False", "EngineStarting")


def messages(status: ReplicaStatus) -> dict[str, str]:
    return {c.type: c.message for c in status.conditions}


@pytest.mark.parametrize(
    ("mode", "pausing", "ready", "paused"),
    [
        ("Abort", "are being returned", "paused at base", "no request is in the engine"),
        ("Keep", "are being held", "paused at base; requests are kept", "requests are kept in"),
        (
            "Drain",
            "may end by themselves, for 7 s",
            "paused at base",
            "no request is in the engine",
        ),
    ],
)
def test_a_pause_says_what_becomes_of_requests(mode: str, pausing: str, ready: str, paused: str):
    wanted = replica(paused=True, interruption={"mode": mode, "timeoutSeconds": 7})
    closing = {"phase": PodPhase.PAUSING, "gate": GateState.CLOSED, "unfinished": 3}
    status = render(wanted, seen(pod(), state(**closing)))
    assert facts(status)["Ready"] == ("False", "Pausing")
    assert facts(status)["Paused"] == ("False", "Pausing")
    assert pausing in messages(status)["Ready"]
    left = 3 if mode == "Keep" else 0
    status = render(wanted, seen(pod(), state(**PAUSED, unfinished=left)))
    assert facts(status)["Ready"] == ("True", "Paused")
    assert facts(status)["Paused"] == ("True", "Paused")
    assert messages(status)["Ready"] == ready
    assert paused in messages(status)["Paused"]


@pytest.mark.parametrize(("held", "words"), [("base", "base is held"), (None, "nothing is served")])
def test_a_rejection_says_why_and_what_is_held(held: str | None, words: str):
    rejected = WeightsRef.model_validate({"version": "step-1", "source": {"path": "/ckpt/step-1"}})
    said = state(
        held, desired_version="step-1", rejected=rejected, rejected_message="wrong shape of w"
    )
    status = render(asks(), seen(pod(ready=held is not None), said))
    assert facts(status)["Ready"] == ("False", "UpdateFailed")
    assert f"wrong shape of w; {words}" in messages(status)["Ready"]
    assert facts(status)["Available"][0] == ("True" if held else "False")


def test_the_source_of_what_was_committed_is_the_pods_word_for_it():
    # the spec names another folder by now, which nobody has loaded
    moved = replica(weightVersion="step-1", weights={"source": {"path": "/moved/{version}"}})
    committed = render(moved, seen(pod(), state("step-1"))).dump()["lastCommitted"]
    assert committed == {"version": "step-1", "source": {"path": "/ckpt/step-1"}}
    under_way = state("base", desired_version="step-1", update=update(UpdatePhase.COMMITTING))
    assert render(moved, seen(pod(), under_way)).dump()["lastCommitted"] == {"version": "base"}


def test_a_fault_of_the_operator_is_news_once():
    known = replica(status=render(replica(), seen(pod(), state())).dump())
    failed = render_failure(known, TypeError("x" * 10**5), NOW + 60)
    assert facts(failed)["Ready"] == ("False", "InternalError")
    assert facts(failed)["Available"] == ("True", "Serving")
    assert tuple(facts(failed)) == KINDS
    assert 'event "pass failed"' in messages(failed)["Ready"]
    assert failed.conditions[0].last_transition_time == "2027-01-15T08:01:00Z"
    again = replace(known, status=failed)
    assert render_failure(again, TypeError("another"), NOW + 90) == failed
    assert "KeyError: 'y'" in messages(render_failure(again, KeyError("y"), NOW + 90))["Ready"]
    later = replace(again, generation=4)
    assert render_failure(later, TypeError("another"), NOW + 90).observed_generation == 4
    # of a replica that has no status yet
    assert len(render_failure(replica(), TypeError("x"), NOW).conditions) == 3


def test_what_was_committed_last_outlives_the_pod():
    known = replica(status={"lastCommitted": {"version": "step-9", "source": {"path": "/9"}}})
    status = render(known, seen())
    assert status.last_committed is not None
    assert status.last_committed.version == "step-9"


def test_another_owners_commit_is_not_ours():
    status = render(replica(), seen(pod(), state("step-1", owner="somebody")))
    assert status.last_committed is None
    assert status.weight_update is None


def test_the_back_off_of_an_image_is_no_news():
    def at(waiting: str, message: str) -> ReplicaStatus:
        agent = container(running=False, waiting=waiting, waiting_message=message)
        return render(replica(), seen(pod(ready=False, weights=agent, engine=None)))

    error = at("ErrImagePull", "not found")
    assert error == at("ImagePullBackOff", 'Back-off pulling image "x": ErrImagePull: not found')


def test_messages_are_bounded():
    endless = update(UpdatePhase.WAITING, message="x" * 10**5)
    status = render(asks(), seen(pod(), state(desired_version="step-1", update=endless)))
    assert max(len(c.message) for c in status.conditions) == 4096


def test_going():
    assert render(replica(deleting=True), seen(pod(), state())).phase == "Terminating"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, "Serving", [("Normal", "Serving")]),
        ("PodStarting", "Serving", [("Normal", "Serving")]),
        ("Serving", "Serving", []),
        ("Serving", "Updating", []),
        ("Serving", "Paused", [("Normal", "Paused")]),
        ("Serving", "WeightsUnavailable", [("Warning", "WeightsUnavailable")]),
        ("EngineFailed", "EngineFailed", []),
    ],
)
def test_events(before: str | None, after: str, expected: list[tuple[str, str]]):
    def status(reason: str | None) -> ReplicaStatus:
        ready = {"type": "Ready", "status": "False", "reason": reason, "message": "m"}
        return ReplicaStatus.parse({"conditions": [ready] if reason else []})

    assert [e[:2] for e in transitions(status(before), status(after))] == expected

"""What follows from what was seen: tables, and that planning on the result does nothing."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.api.conditions import Reason
from rollout_operator.api.replica import Replica
from rollout_operator.plan.actions import (
    Action,
    ApplyService,
    CreatePod,
    CreateSecret,
    DeletePod,
    Plan,
    RepairSecret,
)
from rollout_operator.plan.observed import (
    ChildRefusal,
    Ownership,
    PodSeen,
    Refusal,
    Report,
    Seen,
    covers,
    ownership,
    pod_seen,
)
from rollout_operator.plan.plan import make_plan
from rollout_operator.plan.status import render_status
from tests.support.operator_objects import (
    DEFAULTS,
    NOW,
    UID,
    child,
    children,
    pod,
    replica,
    seen,
    state,
)


def plan(wanted: Replica, what: Seen, now: float = NOW) -> Plan:
    return make_plan(wanted, what, now, defaults=DEFAULTS)


def kinds(made: Plan) -> list[type[Action]]:
    return [type(action) for action in made.actions]


REFUSED = (
    ChildRefusal(
        child="Service qwen", reason=Reason.POD_FORBIDDEN, message="no", retry_at=NOW + 30
    ),
)
UNLIKE = (child("Service", "qwen", complete=False), child("Service", "qwen-nodes"))


def lacking(has: PodSeen | None = None, *, retry_at: float = NOW + 30) -> Seen:
    """Without a Service, which is refused."""
    refused = (replace(REFUSED[0], retry_at=retry_at),)
    return seen(has, services=(None, child("Service", "qwen-nodes")), refused=refused)


def refusal(reason: Reason = Reason.INVALID_TEMPLATE, **spec: Any) -> Refusal:
    hashed = pod(replica(**spec)).hash
    return Refusal(hash=hashed, reason=reason, message="no", retry_at=NOW + 60)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (Seen(), [CreateSecret, ApplyService, ApplyService, CreatePod]),
        (seen(), [CreatePod]),
        (seen(secret=None), [CreateSecret, CreatePod]),
        (seen(pod(), secret=child("Secret", "qwen-admin", complete=False)), [RepairSecret]),
        (seen(pod(), services=(None, child("Service", "qwen-nodes"))), [ApplyService]),
        (
            seen(
                pod(),
                services=(child("Service", "qwen", complete=False), child("Service", "qwen-nodes")),
            ),
            [ApplyService],
        ),
        (seen(pod(), state()), []),
        (seen(pod(deleting=True)), []),
        (seen(pod(deleting=True, hash="old")), []),
        (seen(pod(hash="old")), [DeletePod]),
        # one that failed, or obeys another, goes when that stands in the status
        (seen(pod(phase="Failed")), []),
        (seen(pod(), report=Report(fenced=True)), []),
        # but not one that a changed spec replaces anyway
        (seen(pod(phase="Failed", hash="old")), [DeletePod]),
        # what is uncertain destroys nothing
        (seen(pod(ready=False), report=Report(error="gone", failing_for=1e6)), []),
        (seen(pod(), report=Report(unauthorized=True, error="401")), []),
        (seen(pod(), report=Report(refused="unknown field")), []),
        # nor does what the API server would refuse again
        (seen(refusal=refusal()), []),
        (seen(pod(hash="old"), refusal=refusal()), []),
        (seen(pod(hash="old"), refusal=refusal(model="older")), [DeletePod]),
        (seen(refusal=replace(refusal(), retry_at=NOW)), [CreatePod]),
        # without a child that is refused no pod is made, nor given up for another
        (lacking(), []),
        (lacking(pod()), []),
        (lacking(pod(hash="old")), []),
        (lacking(pod(phase="Failed", hash="old")), [DeletePod]),
        (lacking(retry_at=NOW), [ApplyService, CreatePod]),
        (seen(secret=None, refused=REFUSED), [CreateSecret, CreatePod]),
        (seen(pod(hash="old"), services=UNLIKE, refused=REFUSED), [DeletePod]),
        (seen(services=UNLIKE, refused=REFUSED), [CreatePod]),
    ],
)
def test_actions(what: Seen, expected: list[type[Action]]):
    assert kinds(plan(replica(), what)) == expected


def test_a_replica_that_goes_is_left_to_the_garbage_collector():
    assert plan(replica(deleting=True), Seen()) == Plan()


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("Secret qwen-admin", {"secret": child("Secret", "qwen-admin", Ownership.FOREIGN)}),
        (
            "Service qwen",
            {
                "services": (
                    child("Service", "qwen", Ownership.FOREIGN, complete=False),
                    child("Service", "qwen-nodes"),
                )
            },
        ),
        ("Pod qwen-0", {"pod": pod(owner=Ownership.FOREIGN, hash="x", phase="Failed")}),
    ],
)
def test_foreign_objects_stop_everything_and_are_named(place: str, what: dict[str, Any]):
    made = plan(replica(), Seen(**{**children(), **what}))
    assert made.actions == ()
    assert made.verdict is not None
    assert made.verdict.reason is Reason.FOREIGN_OBJECT
    assert place in made.verdict.message
    assert made.document is None


def test_what_an_earlier_replica_left_is_waited_for():
    made = plan(replica(), seen(pod(owner=Ownership.PREDECESSOR)))
    assert made.actions == ()
    assert made.verdict is not None
    assert made.verdict.reason is Reason.WAITING_FOR_PREDECESSOR
    assert made.requeue_after is not None


def test_a_spec_nobody_understands_changes_nothing():
    made = plan(replica(gpus="many"), seen(pod(hash="old")))
    assert made.actions == ()
    assert made.verdict is not None
    assert made.verdict.reason is Reason.INVALID_SPEC
    assert "spec.gpus" in made.verdict.message


@pytest.mark.parametrize(
    "mistake",
    [{"gpus": "many"}, {"weightVersion": "base", "weights": {"source": {"path": "/a"}}}],
)
def test_a_spec_nobody_understands_forgets_no_end_that_was_counted(mistake: dict[str, Any]):
    over = seen(pod(phase="Failed", ready=False))
    counted = plan(replica(), over).restarts
    assert counted is not None
    before = {"restarts": counted.model_dump(by_alias=True, exclude_none=True)}
    wanted = replica(status=before, **mistake)
    made = plan(wanted, over, NOW + 5)
    assert made.verdict is not None
    assert made.verdict.reason is Reason.INVALID_SPEC
    after = render_status(wanted, over, made, NOW + 5).dump()
    assert plan(replica(status=after), over, NOW + 9).restarts == counted


def test_a_replacement_is_checked_before_the_pod_goes():
    (action,) = plan(replica(model="new"), seen(pod())).actions
    assert isinstance(action, DeletePod)
    assert action.uid == "pod-1"
    assert action.replacement is not None
    assert "new" in action.replacement["spec"]["containers"][0]["args"]


def test_a_refused_replacement_leaves_the_old_pod_steered():
    made = plan(replica(paused=True), seen(pod(hash="old"), refusal=refusal()))
    assert made.document is not None
    assert made.document.paused
    assert made.verdict is not None
    assert made.verdict.stalled
    assert made.requeue_after == 60


@pytest.mark.parametrize("has", [pod(), pod(hash="old")])
def test_what_runs_is_steered_while_a_child_is_refused(has: PodSeen):
    made = plan(replica(paused=True), lacking(has))
    assert made.document is not None
    assert made.document.paused
    assert made.verdict is not None
    assert (made.verdict.reason, made.verdict.stalled) == (Reason.POD_FORBIDDEN, False)
    assert made.requeue_after == 30


def test_the_document_carries_what_is_asked():
    wanted = replica(
        weightVersion="step-120",
        weightStep=120,
        paused=True,
        interruption={"mode": "Keep", "timeoutSeconds": 7},
        sleep={"tags": ["kv_cache"]},
        weights={
            "source": {"path": "/ckpt/{version}/model"},
            "transport": "SharedMemory",
            "bucketSize": "1Mi",
            "timeoutSeconds": 11,
            "maxAttempts": 5,
        },
        status={
            "lastCommitted": {"version": "step-110", "step": 110, "source": {"path": "/old/110"}}
        },
    )
    document = plan(wanted, seen(pod(wanted))).document
    assert document is not None
    assert document.model_dump() == {
        "owner": UID,
        "generation": 3,
        "paused": True,
        "weights": {
            "version": "step-120",
            "step": 120,
            "source": {"path": "/ckpt/step-120/model"},
        },
        "fallback": {"version": "step-110", "step": 110, "source": {"path": "/old/110"}},
        "interruption": {"mode": "keep", "timeout_s": 7.0},
        "sleep": {"level": 1, "tags": ("kv_cache",)},
        "bucket_bytes": 1 << 20,
        "update_timeout_s": 11.0,
        "max_attempts": 5,
        "transport": "shared_memory",
    }


def test_a_push_is_rendered_and_is_a_fallback_later():
    weights = {"source": {"push": {}}, "transport": "CUDAIPC"}
    status = {"lastCommitted": {"version": "v", "step": 3, "source": {"push": {}}}}
    spec = replica(weightVersion="w", weightStep=4, weights=weights, status=status)
    made = plan(spec, seen(pod(spec))).document
    assert made is not None
    document = json.loads(made.model_dump_json())
    assert document["weights"] == {"version": "w", "step": 4, "source": {"push": {}}}
    assert document["fallback"] == {"version": "v", "step": 3, "source": {"push": {}}}
    assert document["transport"] == "cuda_ipc"


@pytest.mark.parametrize("url", ["s3://b/{version}/model", "hf://o/r@{version}", "https://h/v"])
def test_a_url_is_rendered_as_a_path_is(url: str):
    spec = replica(weightVersion="v", weights={"source": {"url": url, "secretRef": {"name": "s"}}})
    document = plan(spec, seen(pod(spec))).document
    assert document is not None
    expected = {"version": "v", "step": None, "source": {"url": url.replace("{version}", "v")}}
    assert json.loads(document.model_dump_json())["weights"] == expected


@pytest.mark.parametrize(
    ("last", "version"),
    [
        (None, None),
        ({"version": "base"}, "base"),
        ({"version": "a"}, None),
        ({"version": "a", "source": {"path": "/a"}}, "a"),
        ({"version": "a", "source": {"url": "hf://o/r@a"}}, "a"),
        ({"version": "a", "source": {"url": "ftp://o/r"}}, None),
    ],
)
def test_the_fallback_is_what_was_committed_last(last: Any, version: str | None):
    document = plan(replica(status={"lastCommitted": last}), seen(pod())).document
    assert document is not None
    assert (document.fallback.version if document.fallback else None) == version


# -- the fixpoint

owners = st.sampled_from([Ownership.OURS, Ownership.OURS, Ownership.OURS, Ownership.FOREIGN])


def _child(kind: str, name: str) -> st.SearchStrategy[Any]:
    made = st.builds(lambda o, c: child(kind, name, o, complete=c), owners, st.booleans())
    return st.none() | made


pods = st.none() | st.builds(
    lambda **traits: pod(**traits),
    owner=owners,
    hash=st.sampled_from(["old", pod().hash]),
    phase=st.sampled_from(["Pending", "Running", "Failed", "Succeeded"]),
    ready=st.booleans(),
    deleting=st.booleans(),
    created=st.sampled_from([NOW - 100, NOW - 1]),
)
reports = st.none() | st.builds(
    Report,
    state=st.sampled_from([None, state(), state("step-1")]),
    error=st.sampled_from(["", "down"]),
    fenced=st.booleans(),
    unauthorized=st.booleans(),
)
refusals = st.sampled_from([None, refusal(), refusal(model="older")])
sights = st.builds(
    Seen,
    secret=_child("Secret", "qwen-admin"),
    services=st.tuples(_child("Service", "qwen"), _child("Service", "qwen-nodes")),
    pod=pods,
    report=reports,
    refusal=refusals,
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "paused": st.booleans(),
        "template": st.sampled_from([{}, {"sepc": {}}, {"spec": {"nodeSelector": {"a": "b"}}}]),
        "gpus": st.sampled_from([0, 1, "many"]),
    },
)


def _after(action: Action, what: Seen, wanted: Replica) -> Seen:
    """Return what is seen once the action is done and everything came to rest."""
    match action:
        case CreateSecret() | RepairSecret():
            return replace(what, secret=child("Secret", "qwen-admin"))
        case ApplyService():
            slot = 1 if action.manifest["spec"].get("clusterIP") == "None" else 0
            services = list(what.services)
            services[slot] = child("Service", action.manifest["metadata"]["name"])
            return replace(what, services=tuple(services))
        case CreatePod():
            assert what.pod is None
            fresh: PodSeen = pod(wanted, uid="pod-2", ready=False, phase="Pending", created=NOW)
            return replace(what, pod=fresh, report=None)
        case DeletePod():
            assert what.pod is not None
            assert what.pod.owner is Ownership.OURS
            assert what.pod.uid == action.uid
            return replace(what, pod=None, report=None)


@given(spec=specs, what=sights, going=st.booleans())
def test_planning_on_the_result_does_nothing(spec: dict[str, Any], what: Seen, going: bool):
    wanted = replica(deleting=going, **spec)
    deleted = 0
    for _ in range(4):
        made = plan(wanted, what)
        if not made.actions:
            break
        for action in made.actions:
            deleted += isinstance(action, DeletePod)
            what = _after(action, what, wanted)
    assert plan(wanted, what).actions == ()
    assert deleted <= 1


# -- what is seen


def _raw(*owners: dict[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": "qwen-0", "uid": "u", "ownerReferences": list(owners)}}


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        ([], Ownership.FOREIGN),
        ([{"uid": UID}], Ownership.OURS),
        ([{"uid": "x", "kind": "ReplicaSet", "name": "qwen"}], Ownership.FOREIGN),
        (
            [
                {
                    "uid": "x",
                    "kind": "RolloutReplica",
                    "name": "qwen",
                    "apiVersion": "rollout.dev/v1alpha1",
                }
            ],
            Ownership.PREDECESSOR,
        ),
        (
            [{"uid": "x", "kind": "RolloutReplica", "name": "qwen", "apiVersion": "other.dev/v1"}],
            Ownership.FOREIGN,
        ),
    ],
)
def test_ownership(owner: list[dict[str, str]], expected: Ownership):
    assert ownership(_raw(*owner), name="qwen", uid=UID) is expected


def test_a_pod_that_has_just_been_made():
    found = pod_seen(_raw({"uid": UID}), name="qwen", uid=UID)
    assert (found.phase, found.ready, found.answering, found.over) == (
        "Pending",
        False,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("actual", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"a": 1}, False),
        ({"p": [{"x": 1, "nodePort": 3}]}, {"p": [{"x": 1}]}, True),
        ({"p": [{"x": 1}, {"x": 2}]}, {"p": [{"x": 1}]}, False),
        (None, {"a": 1}, False),
    ],
)
def test_covers(actual: Any, wanted: Any, expected: bool):
    assert covers(actual, wanted) is expected

"""A replica of several pods: they come as one group, and go as one."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_operator.api.conditions import ConditionType, Reason
from rollout_operator.api.times import rfc3339
from rollout_operator.plan import manifests
from rollout_operator.plan.actions import CreatePod
from rollout_operator.plan.document import render_document
from rollout_operator.plan.ends import CAUSE_S, OVERDUE_S, end_of
from rollout_operator.plan.observed import Ownership, Refusal, Report
from rollout_operator.plan.plan import PodDefaults, make_plan
from rollout_pod.protocol import PodPhase
from tests.support.group_world import GroupWorld
from tests.support.operator_objects import DEFAULTS, NOW, container, replica, state

POLICY = {
    "backoffSeconds": 10, "backoffLimitSeconds": 60, "resetAfterSeconds": 100, "maxRestarts": 2,
}  # fmt: skip


def world(**spec: Any) -> GroupWorld:
    return GroupWorld(spec={"nodes": 2, "restartPolicy": POLICY, **spec})


def served(**spec: Any) -> GroupWorld:
    made = world(**spec)
    made.settle()
    made.serve()
    assert made.reason() == ("True", Reason.SERVING)
    return made


# -- pods


def build(rank: int = 0, group: str = "", **spec: Any) -> dict[str, Any]:
    wanted = replica(**spec)
    assert wanted.spec is not None
    return manifests.pod(
        wanted, wanted.spec, render_document(wanted, wanted.spec), default_image="pod:1",
        image_pull_policy="IfNotPresent", rank=rank, group=group,
    )  # fmt: skip


def engine(pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in pod["spec"]["containers"] if c["name"] == "engine")
    return found


COMMON = (
    "--model", "m", "--engine", "vllm", "--data-address", "0.0.0.0:8000",
    "--admin-address", "0.0.0.0:8001", "--run-dir", "/run/rollout",
    "--token-dir", "/etc/rollout/admin",
)  # fmt: skip


def test_the_head_exactly():
    made = build(nodes=2, gpus=4, loadTimeoutSeconds=900)
    assert engine(made)["command"] == ["rollout-pod", "serve"]
    assert engine(made)["args"] == [
        *COMMON, "--desired-file", "/etc/rollout/podinfo/desired", "--agent", "external",
        "--drain-timeout", "30", "--nodes", "2", "--group", "$(POD_UID)",
        "--advertise", "$(POD_IP)", "--join-timeout", "810", "--", "--tensor-parallel-size", "8",
    ]  # fmt: skip
    assert made["spec"]["restartPolicy"] == "Never"
    assert "rollout.dev/group" not in made["metadata"]["labels"]


def test_a_follower_exactly():
    head, made = build(nodes=2, gpus=4), build(1, "uid-h", nodes=2, gpus=4)
    assert engine(made)["command"] == ["rollout-pod", "follow"]
    assert engine(made)["args"] == [
        *COMMON, "--agent", "external", "--drain-timeout", "30", "--nodes", "2",
        "--node-rank", "1", "--head", "qwen-0.qwen-nodes.ns.svc:8001", "--group", "uid-h",
        "--advertise", "$(POD_IP)", "--join-timeout", "3240", "--", "--tensor-parallel-size", "8",
    ]  # fmt: skip
    labels = made["metadata"]["labels"]
    assert (labels["rollout.dev/rank"], labels["rollout.dev/role"]) == ("1", "node")
    assert labels["rollout.dev/group"] == "uid-h"
    assert made["metadata"]["name"] == made["spec"]["hostname"] == "qwen-1"
    assert made["metadata"]["annotations"].keys() == {"rollout.dev/pod-hash"}
    assert engine(made)["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    # all else is the head's
    for pod in (head, made):
        for name in ("command", "args"):
            del engine(pod)[name]
        del pod["metadata"], pod["spec"]["hostname"]
    assert made == head


def test_every_pod_has_what_schedulers_of_gangs_look_for():
    template = {
        "metadata": {
            "labels": {"kueue.x-k8s.io/pod-group-name": "g"},
            "annotations": {"kueue.x-k8s.io/pod-group-total-count": "3"},
        },
        "spec": {
            "schedulerName": "volcano",
            "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}],
            "nodeSelector": {"gpu": "yes"},
        },
    }
    for rank in range(3):
        made = build(rank, "uid-h" if rank else "", nodes=3, template=template)
        for name, value in template["spec"].items():
            assert made["spec"][name] == value
        assert made["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "g"
        annotations = made["metadata"]["annotations"]
        assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "3"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"nodes": 2}, ["--tensor-parallel-size", "2"]),
        ({"nodes": 3, "gpus": 2}, ["--tensor-parallel-size", "6"]),
        ({"nodes": 2, "engineArgs": ["-tp=4"]}, ["-tp=4"]),
        (
            {"nodes": 2, "gpus": 1, "engineArgs": ["--pipeline_parallel_size=2"]},
            ["--pipeline_parallel_size=2"],
        ),
        ({"nodes": 1}, []),
    ],
)
def test_ranks_are_as_many_as_gpus_unless_the_arguments_say(
    spec: dict[str, Any], expected: list[str]
):
    args = engine(build(**spec))["args"]
    assert args[args.index("--") + 1 :] == expected


def test_one_node_is_what_it_was_before_there_were_nodes():
    assert build(nodes=1) == build()
    assert manifests.pod_hash(replica(nodes=1).spec) == "48fdce79c0dbf0cd"  # type: ignore[arg-type]
    assert manifests.pod_hash(replica(nodes=2).spec) != "48fdce79c0dbf0cd"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"engine": "other"}, "engine other works on one node only"),
        ({"weights": {"staging": "Device"}, "gpus": 1}, "weights.staging Device works on one"),
        ({"weights": {"source": {"push": {}}}}, "weights.source.push works on one node only"),
        ({"engineArgs": ["--data_parallel_size=2"]}, "engineArgs: --data-parallel-size works"),
        ({"engineArgs": ["--api-server-count", "2"]}, "engineArgs: --api-server-count works"),
    ],
)
def test_what_works_on_one_node_only_is_refused_by_name(spec: dict[str, Any], words: str):
    made = world(**spec)
    made.settle()
    assert made.reason(ConditionType.STALLED) == ("True", Reason.INVALID_SPEC)
    assert words in made.message()
    assert made.pods == {}
    assert replica(**spec).spec is not None


# -- life


def test_the_head_comes_first_and_the_others_bear_its_uid():
    made = world(nodes=3)
    made.settle()
    head = made.pods["qwen-0"].uid
    assert made.made == [(NOW, "qwen-0", ""), (NOW, "qwen-1", head), (NOW, "qwen-2", head)]
    assert made.plan().document is not None
    made.serve()
    assert made.reason() == ("True", Reason.SERVING)
    status = [(p.name, p.rank, p.phase, p.ready) for p in made.replica.status.pods]
    assert status == [
        ("qwen-0", 0, "Serving", True), ("qwen-1", 1, "Following", True),
        ("qwen-2", 2, "Following", True),
    ]  # fmt: skip
    assert made.settle() is None


@pytest.mark.parametrize(
    ("spec", "engine_image", "weights_image"),
    [
        ({}, "pod:1", "pod:1"),
        ({"image": "mine:1"}, "mine:1", "mine:1"),
        (
            {
                "template": {
                    "spec": {
                        "containers": [{"name": "engine", "image": "e:1"}],
                        "initContainers": [{"name": "weights", "image": "w:1"}],
                    }
                }
            },
            "e:1",
            "w:1",
        ),
    ],
)
def test_a_follower_is_of_its_heads_image_whatever_the_operators_is_by_now(
    spec: dict[str, Any], engine_image: str, weights_image: str
):
    made = world(**spec)
    made.settle()
    del made.pods["qwen-1"]
    plan = make_plan(made.replica, made.seen, NOW, defaults=PodDefaults(image="pod:2"))
    (action,) = plan.actions
    assert isinstance(action, CreatePod)
    found: Any = action.manifest["spec"]
    assert engine({"spec": found})["image"] == engine_image
    assert next(c for c in found["initContainers"] if c["name"] == "weights")["image"] == (
        weights_image
    )
    # a new group is of the new one
    made.pods.clear()
    plan = make_plan(made.replica, made.seen, NOW, defaults=PodDefaults(image="pod:2"))
    (action,) = plan.actions
    assert isinstance(action, CreatePod)
    fresh: Any = action.manifest
    assert engine(fresh)["image"] == (engine_image if spec else "pod:2")


def test_it_is_ready_when_every_pod_is():
    made = world()
    made.settle()
    made.change(0, ready=True, engine=container(started=True))
    made.settle()
    assert made.reason() == ("False", Reason.READINESS_PENDING)
    assert "qwen-1" in made.message()
    made.change(1, ready=True)
    made.settle()
    assert made.reason() == ("True", Reason.SERVING)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({"unschedulable": "0/1 nodes", "phase": "Pending"}, Reason.UNSCHEDULABLE),
        ({"engine": container(running=False, waiting="ErrImagePull")}, Reason.IMAGE_PULL_FAILED),
        ({"engine": container(running=False)}, Reason.POD_STARTING),
    ],
)
def test_what_keeps_one_pod_from_starting_is_told(traits: dict[str, Any], reason: Reason):
    made = world()
    made.settle()
    made.change(1, **traits)
    made.settle()
    assert made.reason() == ("False", reason)
    assert "qwen-1" in made.message()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_engine_that_dies_takes_the_others_along_and_they_come_back_together(rank: int):
    made = served()
    before = {name: pod.uid for name, pod in made.pods.items()}
    died = made.now
    made.die(rank)
    made.run(5)
    # the one that lives is ended at once; the dead one stays until the next may start, for its log
    assert [name for _, name, _, _ in made.removed] == [f"qwen-{1 - rank}"]
    assert list(made.pods) == [f"qwen-{rank}"]
    assert made.reason() == ("False", Reason.ENGINE_FAILED)
    assert made.counts() == {"EngineFailed": 1}
    made.run(10)
    assert made.made[2][:2] == (died + 10, "qwen-0")
    assert {p.uid for p in made.pods.values()}.isdisjoint(before.values())
    assert made.pods["qwen-1"].group == made.pods["qwen-0"].uid
    made.serve()
    assert made.reason() == ("True", Reason.SERVING)
    assert made.counts() == {"EngineFailed": 1}


def test_the_failure_stands_in_the_status_before_any_pod_goes():
    made = served()
    made.die(1)
    made.pass_once()
    assert made.restarts.total == 1
    assert made.removed == []


def test_both_that_die_one_after_the_other_are_one_failure():
    made = served()
    made.die(1, exit_message="bus error")
    made.pass_once()
    made.die(0)
    made.settle()
    made.change(0, phase="Failed")
    made.change(1, phase="Failed")
    made.settle()
    assert made.counts() == {"EngineFailed": 1}
    assert made.restarts.message == "qwen-1: bus error"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lack_of_memory_is_the_cause_and_the_other_end_its_effect(rank: int):
    made = served()
    made.die(1 - rank)
    killed = container(running=False, exit_code=137, exit_reason="OOMKilled")
    made.change(rank, ready=False, engine=killed)
    made.settle()
    assert made.counts() == {"OOMKilled": 1}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_drained_node_is_no_failure_and_the_group_moves_at_once(rank: int):
    made = served(restartPolicy={**POLICY, "maxRestarts": 0})
    made.change(rank, deleting=True, delete_by=NOW + 45, disruption="EvictionByEvictionAPI")
    made.settle()
    assert made.counts() == {"Evicted": 1}
    assert made.restarts.consecutive == 0
    assert all(pod.deleting for pod in made.pods.values())
    # the head has drained: that is no end of its own
    made.change(0, phase="Succeeded", engine=container(running=False, exit_code=0))
    made.settle()
    made.run(1)
    assert [name for _, name, _ in made.made] == ["qwen-0", "qwen-1"] * 2
    assert made.counts() == {"Evicted": 1}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pod_that_a_person_deletes_takes_the_group_along_uncounted(rank: int):
    made = served()
    made.change(rank, deleting=True, delete_by=NOW + 45)
    made.settle()
    assert made.reason() == ("False", Reason.POD_REPLACING)
    made.run(1)
    assert len(made.made) == 4
    assert made.counts() == {}


def test_a_head_that_drained_for_another_has_not_failed():
    """The follower tells it to, and it may be through before the operator has looked."""
    made = served()
    made.change(1, deleting=True, delete_by=NOW + 45)
    made.change(0, phase="Succeeded", engine=container(running=False, exit_code=0))
    made.run(20)
    assert len(made.made) == 4
    assert made.counts() == {}


def ended(**traits: Any) -> dict[str, Any]:
    """What is seen of a pod whose engine has drained: kubelet still ends the sidecar."""
    return {"ready": False, "engine": container(running=False, exit_code=0, **traits)}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
def test_one_that_drained_for_another_has_not_failed_whatever_its_sidecar_does(
    rank: int, phase: str
):
    made = served()
    made.change(1 - rank, deleting=True, delete_by=NOW + 45)
    made.change(rank, phase=phase, **ended())
    made.settle()
    assert made.reason() == ("False", Reason.POD_REPLACING)
    assert made.counts() == {}


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
def test_an_eviction_that_is_seen_late_is_counted_all_the_same(phase: str):
    """The operator was away until the pods had drained."""
    made = served()
    made.change(
        1, deleting=True, delete_by=NOW + 45, disruption="EvictionByEvictionAPI", phase=phase,
        **ended(),
    )  # fmt: skip
    made.change(0, phase=phase, **ended())
    made.settle()
    assert made.counts() == {"Evicted": 1}
    assert made.reason() == ("False", Reason.EVICTED)
    assert made.restarts.consecutive == 0


def test_a_follower_whose_head_is_asked_to_end_has_not_failed():
    made = served()
    made.change(0, deleting=True, delete_by=NOW + 45)
    made.die(1)
    made.settle()
    assert made.reason() == ("False", Reason.POD_REPLACING)
    assert made.counts() == {}


def test_a_follower_whose_head_is_gone_has_not_failed():
    """As when the operator was away while the head was drained off its node."""
    made = served()
    del made.pods["qwen-0"]
    made.die(1)
    made.run(20)
    assert len(made.made) == 4
    assert made.counts() == {}


def test_a_lack_of_memory_counts_although_the_head_is_asked_to_end():
    made = served()
    made.change(0, deleting=True, delete_by=NOW + 45)
    killed = container(running=False, exit_code=137, exit_reason="OOMKilled")
    made.change(1, ready=False, engine=killed)
    made.settle()
    assert made.counts() == {"OOMKilled": 1}


def test_what_was_counted_stays_the_cause_when_the_others_are_asked_to_end():
    made = served()
    made.run(50)
    at = made.now
    made.die(1)
    made.settle()
    assert made.pods["qwen-0"].deleting
    assert made.reason() == ("False", Reason.ENGINE_FAILED)
    del made.pods["qwen-0"]
    made.settle()
    assert made.reason() == ("False", Reason.ENGINE_FAILED)
    made.run(20)
    assert made.made[2][:2] == (at + 10, "qwen-0")


def test_the_pause_after_an_eviction_by_kubelet_is_kept_while_the_others_end():
    made = served()
    made.run(50)
    at = made.now
    made.change(1, ready=False, phase="Failed", reason="Evicted", failure="Evicted: memory")
    made.settle()
    assert made.pods["qwen-0"].deleting
    made.run(20)
    assert made.made[2][:2] == (at + 10, "qwen-0")
    assert made.counts() == {"Evicted": 1}
    assert made.restarts.consecutive == 1


SHUTDOWN: dict[str, Any] = {"reason": "Terminated", "disruption": "TerminationByKubelet"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kubelet", "reason"),
    [(SHUTDOWN, Reason.NODE_SHUTDOWN), ({"reason": "Evicted"}, Reason.EVICTED)],
)
def test_what_kubelet_says_late_of_a_drain_is_the_cause(
    rank: int, kubelet: dict[str, Any], reason: Reason
):
    """No pod is ever marked as deleted, and the head drains first, wherever it was asked."""
    made = served()
    made.change(0, **ended(ended_at=NOW))
    made.settle()
    made.change(0, phase="Failed" if rank == 0 else "Succeeded", **(kubelet if rank == 0 else {}))
    made.settle()
    if rank == 1:
        assert made.reason() == ("False", Reason.POD_REPLACING)
        assert made.counts() == {}
        made.change(1, **ended(ended_at=NOW + 2))
        made.run(8)
        assert made.counts() == {}
        made.change(1, phase="Failed", **kubelet)
        made.settle()
    assert made.reason() == ("False", reason)
    assert made.counts() == {reason: 1}
    assert made.removed == [] or rank == 0
    made.run(30)
    assert len(made.made) == 4


def test_a_follower_that_drains_before_its_head_is_waited_for_too():
    made = served()
    made.change(1, **ended(ended_at=NOW))
    made.settle()
    assert made.counts() == {}
    assert made.plan().document is not None, "the head is told on"
    made.change(1, phase="Failed", **SHUTDOWN)
    made.settle()
    assert made.counts() == {"NodeShutdown": 1}


def test_a_drain_without_a_cause_is_a_failure_once_all_are_over():
    made = served()
    for rank in (0, 1):
        made.change(rank, **ended(ended_at=NOW))
        made.settle()
    assert made.counts() == {}
    for rank in (0, 1):
        made.change(rank, phase="Succeeded")
        made.settle()
    assert made.counts() == {"PodFailed": 1}


def test_a_drain_without_a_cause_is_a_failure_after_a_while():
    made = served()
    made.change(0, phase="Succeeded", **ended(ended_at=NOW))
    made.run(CAUSE_S - 1)
    assert made.counts() == {}
    assert made.removed == []
    made.run(1)
    assert made.counts() == {"PodFailed": 1}
    assert "qwen-1" not in made.pods or made.pods["qwen-1"].deleting


def test_a_changed_spec_waits_for_no_cause():
    made = served()
    made.change(0, phase="Succeeded", **ended(ended_at=NOW))
    made.settle()
    made.spec |= {"model": "mended"}
    made.generation += 1
    made.run(11)
    assert len(made.made) == 4


def test_pods_that_end_by_themselves_have_failed_and_are_waited_for():
    """As when kubelet ends a head that did not start in time: it drains, and the others with it."""
    made = served()
    ended = made.now
    made.change(0, phase="Succeeded", engine=container(running=False, exit_code=0))
    made.run(5)
    assert made.counts() == {"PodFailed": 1}
    assert list(made.pods) == ["qwen-0"]
    made.run(20)
    assert made.made[2][:2] == (ended + 10, "qwen-0")
    made.serve()
    made.change(0, phase="Succeeded", engine=container(running=False, exit_code=0))
    made.run(15)
    assert len(made.made) == 4, "twice the pause"
    made.run(10)
    assert len(made.made) == 6
    assert made.counts() == {"PodFailed": 2}


def test_a_follower_of_another_head_goes_alone_and_is_made_anew():
    made = world()
    made.settle()
    made.change(1, group="an-earlier-head")
    made.settle()
    assert [name for _, name, _, _ in made.removed] == ["qwen-1"]
    assert len(made.made) == 2, "its name is taken still"
    made.run(1)
    assert made.pods["qwen-1"].group == made.pods["qwen-0"].uid
    assert len(made.made) == 3


def test_a_pod_that_is_gone_without_a_word_takes_the_group_along():
    made = served(nodes=3)
    del made.pods["qwen-1"]
    made.settle()
    assert made.counts() == {"NodePodGone": 1}
    made.run(1)
    assert len(made.made) == 6
    assert len({pod.group for pod in made.pods.values() if pod.rank}) == 1


def test_a_pod_that_is_gone_before_the_engine_started_is_made_again():
    made = world()
    made.settle()
    del made.pods["qwen-1"]
    made.settle()
    head = made.pods["qwen-0"].uid
    assert made.made[-1] == (NOW, "qwen-1", head)
    assert made.removed == []


def test_a_head_that_is_gone_is_followed_when_the_others_are():
    made = served(nodes=3)
    del made.pods["qwen-0"]
    made.settle()
    assert all(pod.deleting for pod in made.pods.values())
    assert len(made.made) == 3
    made.run(1)
    assert len(made.made) == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_node_is_given_up_by_force_once_it_is_overdue(rank: int):
    made = served()
    made.lost_nodes.add(f"node-{rank}")
    made.change(rank, deleting=True, delete_by=NOW + 45, disruption="DeletionByTaintManager")
    made.run(90)
    assert len(made.made) == 2
    made.run(60)
    assert [(name, why) for _, name, why, force in made.removed if force] == [
        (f"qwen-{rank}", Reason.NODE_LOST)
    ]
    made.lost_nodes.clear()
    made.run(1)
    assert len(made.made) == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_the_taint_of_a_lost_node_is_told_at_once_whosever_it_is(rank: int):
    made = served()
    made.lost_nodes.add(f"node-{rank}")
    made.change(
        rank, ready=False, deleting=True, delete_by=NOW + 16, disruption="DeletionByTaintManager"
    )
    made.settle()
    assert made.reason() == ("False", Reason.NODE_LOST)
    assert f"node-{rank} is lost" in made.message()
    assert f"or at {rfc3339(NOW + 16 + OVERDUE_S)}" in made.message()
    assert made.counts() == {"NodeLost": 1}


@pytest.mark.parametrize("lost", [True, False])
def test_a_stray_on_a_lost_node_is_given_up_too_and_no_other(lost: bool):
    made = world()
    made.settle()
    made.change(1, group="an-earlier-head", deleting=True, delete_by=NOW + 45)
    made.lost_nodes.add("node-1" if lost else "node-7")
    for _ in range(120):
        wait = made.settle()
        assert wait is not None or made.pods["qwen-1"].group == made.pods["qwen-0"].uid
        made.now += 1
    forced = [(at, why) for at, _, why, force in made.removed if force]
    assert forced == ([(NOW + 45 + OVERDUE_S, Reason.NODE_LOST)] if lost else [])
    assert (made.pods["qwen-1"].group == made.pods["qwen-0"].uid) is lost


def test_a_mended_spec_does_not_wait_for_what_failed_before():
    made = served(restartPolicy={**POLICY, "backoffSeconds": 600, "backoffLimitSeconds": 600})
    made.die(0)
    made.run(20)
    assert len(made.made) == 2
    made.spec |= {"model": "mended"}
    made.generation += 1
    made.run(1)
    assert len(made.made) == 4
    assert made.counts() == {"EngineFailed": 1}


def test_it_gives_up_and_holds_no_gpu():
    made = served()
    for _ in range(3):
        made.die(1)
        made.run(99)
        if made.pods.get("qwen-0") and not made.pods["qwen-0"].over:
            made.serve()
    assert made.reason(ConditionType.STALLED) == ("True", Reason.CRASH_LOOP)
    assert all(pod.over for pod in made.pods.values())
    before = len(made.made)
    made.run(10_000)
    assert len(made.made) == before
    made.spec |= {"model": "mended"}
    made.generation += 1
    made.run(20)
    assert sorted(made.pods) == ["qwen-0", "qwen-1"]
    assert not any(pod.over for pod in made.pods.values())


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (1, 2), (2, 1)])
def test_another_number_of_nodes_rolls_the_group(before: int, after: int):
    made = served(nodes=before)
    made.spec |= {"nodes": after}
    made.generation += 1
    made.settle()
    assert len(made.made) == before, "the old group goes first"
    made.run(20)
    assert sorted(made.pods) == [f"qwen-{rank}" for rank in range(after)]
    made.serve()
    assert made.reason() == ("True", Reason.SERVING)
    assert made.counts() == {}


def test_a_replacement_is_checked_before_any_pod_goes():
    made = served()
    made.spec |= {"model": "other"}
    made.generation += 1
    (action,) = made.plan().actions
    assert action.name == "qwen-0"  # type: ignore[union-attr]
    assert action.replacement is not None  # type: ignore[union-attr]


def test_a_refused_follower_is_told_and_the_head_waits():
    made = world()
    made.pass_once()
    head = made.pods["qwen-0"]
    refusal = Refusal(
        hash=head.hash, reason=Reason.QUOTA_EXCEEDED, message="full", retry_at=NOW + 30
    )
    what = replace(made.seen, refusal=refusal)
    plan = make_plan(made.replica, what, NOW, defaults=DEFAULTS)
    assert (plan.actions, plan.requeue_after) == ((), 30)
    assert plan.verdict is not None
    assert plan.verdict.reason is Reason.QUOTA_EXCEEDED
    later = make_plan(made.replica, what, NOW + 30, defaults=DEFAULTS)
    assert [type(a).__name__ for a in later.actions] == ["CreatePod"]


def test_a_fenced_head_takes_the_group_along():
    made = served()
    what = replace(made.seen, report=Report(state=state(), fenced=True))
    plan = make_plan(made.replica, what, NOW, defaults=DEFAULTS)
    assert plan.restarts is not None
    made.status["restarts"] = plan.restarts.model_dump(mode="json", by_alias=True)
    plan = make_plan(made.replica, what, NOW, defaults=DEFAULTS)
    assert sorted(a.name for a in plan.actions) == ["qwen-0", "qwen-1"]  # type: ignore[union-attr]


def test_a_stranger_with_a_followers_name_is_reported():
    made = world()
    made.pass_once()
    made.settle()
    made.change(1, owner=Ownership.FOREIGN)
    made.settle()
    assert made.reason(ConditionType.STALLED) == ("True", Reason.FOREIGN_OBJECT)
    assert "Pod qwen-1" in made.message()


# -- pods that are lacking


def gave_up(made: GroupWorld, rank: int, after_s: float) -> None:
    """Its engine has run so long, and ends, since the others are not there."""
    made.now += after_s
    made.die(rank, started_at=made.now - after_s, ended_at=made.now, exit_message="not there")
    made.settle()


JOIN_S = 3600 * 9 // 10
PENDING: dict[str, Any] = {"phase": "Pending", "engine": None}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({**PENDING, "unschedulable": "0/1 nodes"}, Reason.UNSCHEDULABLE),
        ({**PENDING, "unschedulable": "PersistentVolumeClaim a"}, Reason.VOLUME_UNAVAILABLE),
        ({"engine": container(running=False, waiting="ErrImagePull")}, Reason.IMAGE_PULL_FAILED),
        (
            {"engine": container(running=False, waiting="CreateContainerConfigError")},
            Reason.POD_CONFIG_ERROR,
        ),
        ({"engine": container(running=False)}, Reason.POD_STARTING),
        ({"engine": container(started_at=NOW + 100_000)}, Reason.POD_STARTING),
    ],
)
def test_a_pod_that_waited_in_vain_for_another_has_not_failed(
    rank: int, traits: dict[str, Any], reason: Reason
):
    made = world()
    made.settle()
    for times in range(1, 5):
        made.change(rank, **traits)
        gave_up(made, 1 - rank, JOIN_S)
        assert made.counts() == {reason: times}
        made.run(1)
        assert len(made.made) == 2 * (times + 1), "at once: nobody has failed"
    assert made.restarts.consecutive == 0
    assert f"waited {JOIN_S} s" in made.restarts.message
    assert f"qwen-{rank}" in made.restarts.message


def test_two_that_waited_in_vain_for_a_third_have_not_failed():
    made = world(nodes=3)
    made.settle()
    made.change(2, **PENDING, unschedulable="0/1 nodes")
    gave_up(made, 1, JOIN_S)
    gave_up(made, 0, JOIN_S + 2)
    assert made.counts() == {"Unschedulable": 1}


def test_an_engine_that_ends_before_it_waited_has_failed_whoever_is_there():
    """A wrong argument: the images of the others are on their way still."""
    made = world()
    for times in range(1, 4):
        made.settle()
        made.change(1, **PENDING)
        gave_up(made, 0, 3)
        assert made.counts() == {"EngineFailed": times}
        made.run(100)
    assert made.reason(ConditionType.STALLED) == ("True", Reason.CRASH_LOOP)


def test_an_engine_that_ends_with_all_there_has_failed_however_long_it_ran():
    made = served()
    gave_up(made, 0, 100_000)
    assert made.counts() == {"EngineFailed": 1}


@pytest.mark.parametrize(("refused", "reason"), [(True, "QuotaExceeded"), (False, "NodePodGone")])
def test_a_pod_that_waited_for_one_that_was_never_made_has_not_failed(refused: bool, reason: str):
    made = world()
    made.settle()
    head = made.pods["qwen-0"]
    del made.pods["qwen-1"]
    gone = container(running=False, exit_code=1, started_at=NOW, ended_at=NOW + JOIN_S)
    refusal = Refusal(
        hash=head.hash, reason=Reason.QUOTA_EXCEEDED, message="full", retry_at=NOW + JOIN_S + 30
    )
    made.change(0, engine=gone)
    what = replace(made.seen, refusal=refusal if refused else None)
    plan = make_plan(made.replica, what, NOW + JOIN_S, defaults=DEFAULTS)
    assert plan.restarts is not None
    assert (plan.restarts.last_reason, plan.restarts.consecutive) == (reason, 0)


@pytest.mark.parametrize(
    ("phase", "ends"),
    [
        (PodPhase.LOADING, False),
        (PodPhase.DRAINING, False),
        (PodPhase.FAILED, False),
        (PodPhase.STALE, True),
        (PodPhase.UPDATING, True),
        (PodPhase.SERVING, True),
        (PodPhase.SLEEPING, True),
    ],
)
def test_no_pod_takes_the_place_of_one_that_an_engine_started_with(phase: PodPhase, ends: bool):
    """The watch has lost that it has started, and the head's own word tells."""
    made = world()
    made.settle()
    del made.pods["qwen-1"]
    assert made.pods["qwen-0"].engine == container()
    end = end_of(made.replica.spec, replace(made.seen, report=Report(state=state(phase=phase))),
                 made.now)  # fmt: skip
    assert (end is not None and end.reason is Reason.NODE_POD_GONE) is ends


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pod_that_vanished_while_the_engine_loaded_is_no_failure_of_those_that_miss_it(rank: int):
    """The head takes no other in its place: that one ends, and then, after a silence, the head."""
    made = world()
    made.settle()
    made.now += 300
    del made.pods["qwen-1"]
    made.settle()
    assert made.pods["qwen-1"].group == made.pods["qwen-0"].uid
    made.now += 30
    started = NOW if rank == 0 else made.now - 5
    made.change(1, engine=container(started_at=made.now - 5))
    made.die(rank, started_at=started, ended_at=made.now, exit_message="another process")
    made.settle()
    assert made.counts() == {"NodePodGone": 1}
    made.run(1)
    assert len(made.made) == 5
    assert made.restarts.consecutive == 0


@pytest.mark.parametrize(("lived", "reason"), [(200, "NodePodGone"), (3, "EngineFailed")])
def test_a_head_that_misses_a_pod_has_not_failed_unless_it_ended_before_any_came(
    lived: float, reason: str
):
    """The operator was away."""
    made = world()
    made.settle()
    del made.pods["qwen-1"]
    gave_up(made, 0, lived)
    assert made.counts() == {reason: 1}


def test_a_pod_that_came_late_and_served_fails_as_any_other():
    made = world()
    made.settle()
    made.now += 300
    del made.pods["qwen-1"]
    made.settle()
    made.change(1, engine=container(started_at=made.now))
    made.serve()
    made.now += 1000
    made.die(1, started_at=made.now - 1000, ended_at=made.now)
    made.settle()
    assert made.counts() == {"EngineFailed": 1}


# -- whatever happens


def happens(made: GroupWorld, what: str, rank: int) -> None:
    name = f"qwen-{rank}"
    if what == "pass":
        made.pass_once()
    elif what == "run":
        made.run(7.0 * (1 + rank))
    elif what == "roll":
        made.spec |= {"nodes": 1 + rank}
        made.generation += 1
    elif what == "revert":
        made.spec |= {"nodes": 3}
        made.generation += 1
    elif what == "serve":
        made.serve()
    elif what == "drained":
        made.drained()
    elif name not in made.pods:
        return
    elif what == "die" and not made.pods[name].over:
        made.die(rank)
    elif what == "ended" and not made.pods[name].over:
        made.change(rank, **ended(ended_at=made.now))
    elif what == "lacking" and not made.pods[name].over:
        made.change(rank, **PENDING)
    elif what == "failed":
        made.change(rank, phase="Failed", ready=False)
    elif what == "deleted":
        made.change(rank, deleting=True, delete_by=made.now + 45)
    elif what == "evicted":
        made.change(
            rank, deleting=True, delete_by=made.now + 45, disruption="EvictionByEvictionAPI"
        )
    elif what == "vanished":
        del made.pods[name]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["pass", "pass", "run", "roll", "revert", "serve", "drained", "die", "failed",
             "ended", "lacking",
             "deleted", "evicted", "vanished"]
        ),
        st.integers(0, 2),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_whatever_happens_there_is_one_group_at_a_time_and_it_comes_back(
    events: list[tuple[str, int]],
):
    """``GroupWorld`` itself refuses a head beside pods of another group, a follower of another
    head, and a delete of another uid.
    """
    made = world(nodes=3, restartPolicy={**POLICY, "maxRestarts": 1000})
    for what, rank in events:
        happens(made, what, rank)
    made.run(1000)
    made.serve()
    made.run(10)
    assert sorted(made.pods) == [f"qwen-{rank}" for rank in range(made.nodes)]
    assert {pod.group for pod in made.pods.values() if pod.rank} <= {made.pods["qwen-0"].uid}
    assert made.reason() == ("True", Reason.SERVING)
    assert made.plan().actions == ()

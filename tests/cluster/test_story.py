"""The README's story on the real cluster: kubectl on one side, callers' tokens on the other."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from devcluster.client import Cluster
from examples.tiny_models import make
from rollout_client import Rollout
from tests.support.engine_kit import prompts
from tests.support.replica import (
    Replica,
    checkpoints,
    container_pids,
    difference,
    in_flight,
    metric,
    operator_site,
    writes,
)

LONG = 3500
SHAPE = {"kind": "dense", "hidden": 256, "layers": 4, "vocab": 4096}


@pytest.fixture(scope="module")
def data(cluster: Cluster) -> Iterator[Path]:
    """Large enough that a transfer in small buckets takes a while."""
    with checkpoints(cluster, "story", ("base", "step-1", "step-2", "step-3"), **SHAPE) as folder:
        yield folder


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Iterator[str]:
    """A namespace with the operator in it."""
    with operator_site(cluster, "story") as name:
        yield name


@pytest.fixture(scope="module")
def replica(cluster: Cluster, site: str, data: Path) -> Replica:
    """Serves base at first; the tests below leave it serving something."""
    replica = Replica(cluster, site, data)
    replica.apply()
    replica.serving("base")
    return replica


@pytest.fixture(autouse=True)
def tell(request: pytest.FixtureRequest, cluster: Cluster, site: str) -> Iterator[None]:
    """The state of the namespace in the report of a failed test."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(cluster.dump(site))


def settle(replica: Replica, version: str) -> None:
    """Bring the replica to a version, however the test before left it."""
    replica.patch(paused=False, sleep=None, weightVersion=version, weights={"bucketSize": "1Mi"})
    replica.serving(version)


async def test_a_patch_pauses_and_loses_no_token(replica: Replica) -> None:
    settle(replica, "step-1")
    asked = prompts(8)
    partials: dict[int, Rollout] = {}
    async with replica.client() as client:
        tasks = [
            asyncio.create_task(
                client.generate(
                    prompt,
                    {"temperature": 0, "ignore_eos": True, "max_tokens": LONG},
                    deadline_s=200,
                    on_partial=lambda partial, i=i: partials.setdefault(i, partial),
                )
            )
            for i, prompt in enumerate(asked)
        ]
        await in_flight(replica, len(asked))
        await asyncio.to_thread(replica.patch, paused=True)
        ready = await asyncio.to_thread(replica.until_condition, "Ready", "True", "Paused")
        assert "paused" in ready["message"]
        assert replica.condition("Paused")["status"] == "True"
        assert replica.condition("Available")["status"] == "True"
        assert metric(replica.metrics(), "rollout_unfinished ") == 0
        assert len(partials) == len(asked), "a caller has no partial"
        assert all(0 < len(p.token_ids) < LONG for p in partials.values())
        assert not any(task.done() for task in tasks)
        pod = replica.pod()
        assert all(c["ready"] for c in pod["status"]["containerStatuses"]), "readiness flipped"
        await asyncio.to_thread(replica.patch, paused=False)
        rollouts = await asyncio.gather(*tasks)
    for prompt, rollout in zip(asked, rollouts, strict=True):
        assert len(rollout.token_ids) == LONG
        assert rollout.attempts > 1
        assert replica.is_greedy("step-1", prompt, rollout)


async def test_a_patch_updates_under_load_and_two_quick_ones_end_in_the_newest(
    replica: Replica,
) -> None:
    settle(replica, "step-1")
    asked = prompts(8, seed=1)
    async with replica.client() as client:
        tasks = [
            asyncio.create_task(
                client.generate(
                    prompt,
                    {"temperature": 0, "ignore_eos": True, "max_tokens": LONG},
                    deadline_s=200,
                )
            )
            for prompt in asked
        ]
        await in_flight(replica, len(asked))
        await asyncio.to_thread(replica.patch, weightVersion="step-2", weightStep=2)
        await asyncio.to_thread(replica.patch, weightVersion="step-3", weightStep=3)
        status = await asyncio.to_thread(replica.serving, "step-3")
        rollouts = await asyncio.gather(*tasks)
    assert status["lastCommitted"] == {
        "version": "step-3", "step": 3, "source": {"path": "/checkpoints/step-3"},
    }  # fmt: skip
    assert status["weightUpdate"]["target"] == "step-3"
    for rollout in rollouts:
        assert len(rollout.token_ids) == len(rollout.log_probs) == LONG
        seen = [span.version for span in rollout.weight_versions]
        assert seen in (["step-1", "step-3"], ["step-1", "step-2", "step-3"], ["step-1"])
        assert rollout.weight_versions[-1].end == LONG
    fresh = await replica.generate(asked[0], 60)
    assert replica.is_greedy("step-3", asked[0], fresh)


async def test_a_patch_sleeps_updates_and_wakes_without_a_restart(
    cluster: Cluster, replica: Replica, site: str
) -> None:
    settle(replica, "step-1")
    before = replica.pod()
    prompt = prompts(1, seed=2)[0]
    async with replica.client() as client:
        task = asyncio.create_task(
            client.generate(
                prompt,
                {"temperature": 0, "ignore_eos": True, "max_tokens": LONG},
                deadline_s=200,
            )
        )
        await in_flight(replica, 1)
        await asyncio.to_thread(replica.patch, sleep={"level": 2})
        ready = await asyncio.to_thread(replica.until_condition, "Ready", "True", "Sleeping")
        assert "no memory was released" in ready["message"]  # by a CPU
        assert replica.condition("Available")["reason"] == "Sleeping"
        assert replica.get()["status"]["phase"] == "Sleeping"
        assert not replica.get()["status"].get("weightVersion")
        await asyncio.to_thread(
            cluster.wait,
            lambda: not all(c["ready"] for c in replica.pod()["status"]["containerStatuses"]),
            60,
            "kubelet to see that nothing is served",
        )
        await asyncio.to_thread(replica.patch, sleep={"tags": ["kv_cache"]}, weightVersion="step-2")
        await asyncio.to_thread(
            replica.until,
            lambda status: status.get("weightVersion") == "step-2",
            "the update while the cache sleeps",
        )
        await asyncio.to_thread(replica.until_condition, "Ready", "True", "Sleeping")
        assert replica.condition("Available")["status"] == "True"
        await asyncio.to_thread(replica.patch, sleep=None)
        await asyncio.to_thread(replica.serving, "step-2")
        rollout = await task
    assert len(rollout.token_ids) == LONG
    assert [s.version for s in rollout.weight_versions] == ["step-1", "step-2"]
    assert replica.is_greedy("step-2", prompt, await replica.generate(prompt, 60))
    after = replica.pod()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert [c["restartCount"] for c in after["status"]["containerStatuses"]] == [
        c["restartCount"] for c in before["status"]["containerStatuses"]
    ]


def test_what_it_writes(cluster: Cluster, replica: Replica) -> None:
    """At most two writes a pause, four an update, and none while nothing changes."""
    settle(replica, "step-1")
    time.sleep(3)  # the Ready transition's own writes are behind us
    before = writes(cluster)
    time.sleep(60)
    assert difference(before, writes(cluster)) == {}

    before = writes(cluster)
    replica.patch(paused=True)
    replica.until_condition("Ready", "True", "Paused")
    time.sleep(2)
    made = difference(before, writes(cluster))
    assert made.pop("PATCH rolloutreplicas") == 1  # ours
    assert sum(made.values()) <= 2, made

    replica.patch(paused=False)
    replica.serving("step-1")
    time.sleep(2)
    before = writes(cluster)
    replica.patch(weightVersion="step-2")
    replica.serving("step-2")
    time.sleep(2)
    made = difference(before, writes(cluster))
    assert made.pop("PATCH rolloutreplicas") == 1
    assert sum(made.values()) <= 4, made


def test_the_operator_killed_in_the_middle_of_an_update(
    cluster: Cluster, replica: Replica, site: str
) -> None:
    settle(replica, "step-1")
    committed = metric(replica.metrics(), 'rollout_weight_updates_total{result="committed"}')
    failed = metric(replica.metrics(), 'rollout_weight_updates_total{result="failed"}')
    operators = cluster.kubectl(
        "get", "pods", "-n", site, "-l", "app.kubernetes.io/name=rollout-operator",
        "-o", "jsonpath={.items[*].status.containerStatuses[0].containerID}",
    ).split()  # fmt: skip
    replica.patch(weightVersion="step-2", weights={"bucketSize": "4Ki"})
    deadline = time.monotonic() + 20
    while metric(replica.metrics(), "rollout_gate_open ") != 0:
        assert time.monotonic() < deadline, "the gate never closed"
        time.sleep(0.005)
    assert len(operators) == 2
    for operator in operators:
        for pid in container_pids(operator):
            os.kill(pid, signal.SIGKILL)
    status = replica.serving("step-2")
    assert status["weightUpdate"]["phase"] == "Committed"
    assert status["weightUpdate"]["attempt"] == 1
    text = replica.metrics()
    assert metric(text, 'rollout_weight_updates_total{result="committed"}') == committed + 1
    assert metric(text, 'rollout_weight_updates_total{result="failed"}') == failed


async def test_the_engine_killed_comes_back_without_the_operator(
    cluster: Cluster, replica: Replica, site: str
) -> None:
    settle(replica, "step-1")
    uid = replica.pod()["metadata"]["uid"]
    cluster.kubectl("scale", "-n", site, "deploy/ro-rollout-operator", "--replicas=0")
    cluster.wait(
        lambda: "rollout-operator" not in cluster.kubectl("get", "pods", "-n", site, "-o", "name"),
        60,
        "the operator to be gone",
    )
    killed = replica.kill_container("engine")

    def engine() -> dict:
        (found,) = [
            c for c in replica.pod()["status"]["containerStatuses"] if c["name"] == "engine"
        ]
        return found

    cluster.wait(
        lambda: engine()["containerID"] != killed and engine()["state"].get("running"),
        60,
        "the engine's container to start again",
        namespace=site,
    )
    assert not engine()["ready"]
    cluster.wait(lambda: engine()["ready"], 180, "readiness", namespace=site)
    prompt = prompts(1)[0]
    rollout = await replica.generate(prompt, 60)
    assert [s.version for s in rollout.weight_versions] == ["step-1"]
    assert replica.is_greedy("step-1", prompt, rollout)
    assert replica.pod()["metadata"]["uid"] == uid
    cluster.kubectl("scale", "-n", site, "deploy/ro-rollout-operator", "--replicas=2")
    replica.serving("step-1")
    assert replica.pod()["metadata"]["uid"] == uid, "the operator made another pod"


async def test_the_agent_killed_in_the_middle_of_a_transfer(replica: Replica) -> None:
    settle(replica, "step-1")
    replica.patch(weightVersion="step-3", weights={"bucketSize": "4Ki"})
    deadline = time.monotonic() + 20
    while metric(replica.metrics(), "rollout_gate_open ") != 0:
        assert time.monotonic() < deadline, "the gate never closed"
        await asyncio.sleep(0.005)
    replica.kill_container("weights")
    replica.serving("step-3")
    prompt = prompts(1)[0]
    assert replica.is_greedy("step-3", prompt, await replica.generate(prompt, 60))


@pytest.mark.parametrize("fault", ["absent", "missing", "shape", "truncated"])
async def test_a_bad_version_is_named_and_serving_goes_on(
    replica: Replica, data: Path, fault: str
) -> None:
    settle(replica, "step-1")
    version = f"bad-{fault}"
    if fault != "absent":
        make(data / version, seed=9, **SHAPE)
        file = next((data / version).glob("*.safetensors"))
        tensors = load_file(file)
        name = "model.layers.2.mlp.up_proj.weight"
        if fault == "missing":
            del tensors[name]
        elif fault == "shape":
            tensors[name] = tensors[name][:-1].contiguous()
        save_file(tensors, file)
        file.chmod(0o644)  # it writes 0600, and the pod is not root
        if fault == "truncated":
            os.truncate(file, file.stat().st_size - 8192)
    replica.patch(weightVersion=version)
    ready = replica.until_condition("Ready", "False", "WeightsUnavailable")
    assert version in ready["message"]
    assert fault in ("absent", "truncated") or "up_proj" in ready["message"]
    assert replica.condition("Available")["status"] == "True"
    assert replica.get()["status"]["weightVersion"] == "step-1"
    prompt = prompts(1)[0]
    rollout = await replica.generate(prompt, 60)
    assert rollout.attempts == 1, "a request was refused"
    assert replica.is_greedy("step-1", prompt, rollout)
    make(data / version, seed=9, **SHAPE)  # mended: it heals by itself
    replica.serving(version)
    assert replica.is_greedy(version, prompt, await replica.generate(prompt, 60))


def test_the_status_tells_what_an_update_took(replica: Replica) -> None:
    settle(replica, "step-1")
    settle(replica, "step-2")
    update = replica.get()["status"]["weightUpdate"]
    assert update["phase"] == "Committed"
    assert (update["transport"], update["mode"]) == ("shared_memory", "bucketed")
    size = sum(f.stat().st_size for f in (replica.data / "step-2").glob("*.safetensors"))
    assert 0 < update["bytes"] <= size
    assert update["pausedSeconds"] > 0
    assert {"prefetch", "cancel", "transfer", "commit"} <= set(update["seconds"])
    assert {"load", "finish"} <= set(update["seconds"]["steps"])


async def test_deletion_drains(cluster: Cluster, replica: Replica) -> None:
    settle(replica, "step-1")
    answers: list[Rollout] = []
    async with replica.client() as client:
        task = asyncio.create_task(
            client.generate(
                prompts(1)[0],
                {"temperature": 0, "ignore_eos": True, "max_tokens": 600},
                deadline_s=60,
                on_partial=answers.append,
            )
        )
        await in_flight(replica, 1)
        replica.kubectl("delete", "rr", replica.name)
        rollout = await task
    assert len(rollout.token_ids) == 600 and rollout.attempts == 1, "cut instead of drained"
    left = cluster.wait(
        lambda: (
            "gone"
            if not replica.kubectl(
                "get", "pods,services,secrets", "-l", f"rollout.dev/replica={replica.name}",
                "-o", "name",
            )
            else ""
        ),
        90,
        "the children to be gone",
    )  # fmt: skip
    assert left == "gone"


class TestBadInput:
    """Replicas of their own: none of these ever serves what it was first asked for."""

    def test_a_template_that_the_api_server_refuses(
        self, cluster: Cluster, site: str, data: Path
    ) -> None:
        replica = Replica(cluster, site, data, name="refused")
        manifest = replica.manifest()
        template = manifest["spec"]["template"]
        template["spec"]["nodeSelectr"] = {"a": "b"}
        replica.apply({"template": template})
        ready = replica.until_condition("Ready", "False", "InvalidTemplate")
        assert "nodeSelectr" in ready["message"]
        replica.kubectl("delete", "rr", replica.name)

    def test_an_engine_that_the_image_does_not_have(
        self, cluster: Cluster, site: str, data: Path
    ) -> None:
        replica = Replica(cluster, site, data, name="chosen")
        replica.apply({"engine": "sglang"})
        stalled = replica.until_condition("Stalled", "True", "EngineFailed", timeout_s=120)
        assert "no engine 'sglang' is installed; there are: vllm;" in stalled["message"]
        replica.kubectl("delete", "rr", replica.name)

    def test_a_model_that_does_not_exist_and_is_mended(
        self, cluster: Cluster, site: str, data: Path
    ) -> None:
        replica = Replica(cluster, site, data, name="mended")
        replica.apply({"model": "/checkpoints/nowhere"})
        stalled = replica.until_condition("Stalled", "True", "EngineFailed", timeout_s=120)
        assert "/checkpoints/nowhere" in stalled["message"]
        assert replica.condition("Available")["status"] == "False"
        replica.apply({"model": "/checkpoints/base"})
        replica.serving("base")
        assert replica.condition("Stalled")["status"] == "False"
        replica.kubectl("delete", "rr", replica.name)

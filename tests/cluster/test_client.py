"""Who asks for a version on the real cluster: ``rollout_client.kube``, ``kubectl rr``, trainers' adapters."""

import asyncio
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster.client import Cluster
from examples.tiny_models import make
from rollout_client.kube import Kube, ReplicaSelector, Superseded
from rollout_client.trainer import ReplicaTarget, ServerAdapter
from rollout_client.trainer import Superseded as AdapterSuperseded
from tests.support.replica import Replica, in_flight, install_operator
from tests.support.terminal import Terminal


@pytest.fixture
def replica(cluster: Cluster, namespace: str) -> Iterator[Replica]:
    assert cluster.data, "name a folder that the nodes share in DEVCLUSTER_DATA"
    folder = cluster.data / f"client-{uuid.uuid4().hex[:6]}"
    for seed, version in enumerate(("base", *(f"step-{n}" for n in range(1, 5)))):
        make(folder / version, seed=seed)
    install_operator(cluster, namespace)
    yield Replica(cluster, namespace, folder)
    shutil.rmtree(folder)


async def test_who_asked_is_told_and_the_last_writer_wins(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", replica.cluster.kubeconfig)
    # kubectl finds its plugins on PATH
    bins = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{bins}{os.pathsep}{os.environ['PATH']}")

    async def rr(*args: str) -> str:
        return await asyncio.to_thread(
            replica.cluster.kubectl, "rr", *args, "-n", replica.namespace, timeout=150
        )

    async with await Kube.connect(namespace=replica.namespace, manager="trainer") as kube:
        status = await (await kube.apply(replica.manifest())).wait(180)
        assert status["phase"] == "Serving"
        tiny = kube.replica("tiny")
        await (await tiny.pause()).wait(60)
        await (await tiny.resume()).wait(60)
        await (await tiny.set_weight_version("step-1", step=1)).wait(120)
        await asyncio.to_thread(update_at_a_terminal, replica, "step-2", "--step=2")
        selector = ReplicaSelector(namespace=replica.namespace)
        (endpoint,) = await selector.list()
        await selector.aclose()
        assert (endpoint.is_ready, endpoint.step) == (True, 2)
        assert endpoint.url == f"http://tiny.{replica.namespace}.svc:8000"
        assert "tiny goes back to step-1" in await rr("undo", "tiny", "--wait")
        await asyncio.to_thread(replica.patch, weightVersion="step-2")
        await asyncio.to_thread(replica.serving, "step-2")
        first = await tiny.set_weight_version("step-1")
        second = await tiny.set_weight_version("base")
        with pytest.raises(Superseded):
            await first.wait(60)
        await second.wait(120)
        history = (await tiny.get())["status"]["history"]
        told = [(u["version"], u.get("step"), u["phase"], u.get("by")) for u in history]
        # the one that was superseded may have been begun before it was
        assert [t for t in told[:-4] if t[0] == "base"] == [("base", None, "Committed", None)]
        assert told[-4:] == [
            ("step-2", 1, "Committed", "kubectl-patch"),
            ("step-1", 1, "Committed", "kubectl-rr"),
            ("step-2", 2, "Committed", "kubectl-rr"),
            ("step-1", 1, "Committed", "trainer"),
        ]
        assert all(u["startedAt"] <= u["finishedAt"] for u in history)
        lines = (await rr("history", "tiny")).splitlines()
        assert len(lines) == len(history) + 1
        await adapters_race(replica)
        await (await tiny.delete()).wait(60)


def update_at_a_terminal(replica: Replica, version: str, *options: str) -> None:
    """``kubectl rr update --wait`` as a person runs it: a line that changes, and the result in its place."""
    cluster = replica.cluster
    seen = Terminal(
        [cluster.kubectl_path, "rr", "update", "tiny", version, *options, "--wait", "-n",
         replica.namespace],
        cluster.environment() | {"TERM": "xterm"},
    )  # fmt: skip
    try:
        assert seen.end(150) == 0, seen.screen.text
    finally:
        seen.close()
    assert seen.screen.text == [f"every rank of tiny holds {version}"]
    assert seen.screen.codes, "it was drawn anew"
    assert seen.screen.has_cursor


RACES = (("step-3", "step-4"), ("step-1", "step-2"), ("step-3", "step-4"))


async def adapters_race(replica: Replica) -> None:
    """Two trainers ask for different versions at once: the API server's last write wins.

    A request in flight is let end by itself, so that neither version can be there before both were asked for.
    """
    replica.patch(interruption={"mode": "Drain", "timeoutSeconds": 100})
    target = ReplicaTarget(name="tiny", namespace=replica.namespace)
    name, before = f"{replica.namespace}/tiny", "base"
    async with (
        ServerAdapter(target, manager="one", timeout_s=120) as one,
        ServerAdapter(target, manager="two", timeout_s=120) as two,
    ):
        for versions in RACES:
            rollout = asyncio.create_task(replica.generate([1, 2, 3], 2000))
            await in_flight(replica, 1)
            told = await asyncio.gather(
                one.update_weights(version=versions[0]),
                two.update_weights(version=versions[1]),
                return_exceptions=True,
            )
            body = await asyncio.to_thread(replica.get)
            won = versions.index(body["spec"]["weightVersion"])
            assert told[won][name].weight_version == versions[won]
            assert isinstance(told[1 - won], AdapterSuperseded), told
            newest = body["status"]["history"][0]
            assert (newest["version"], newest["phase"], newest["by"]) == (
                versions[won], "Committed", ("one", "two")[won],
            )  # fmt: skip
            assert body["status"]["weightVersion"] == versions[won]
            # the rollout is whole, and of no version but the one before
            said = await rollout
            assert (len(said.token_ids), said.attempts) == (2000, 1)
            assert {span.version for span in said.weight_versions} == {before}
            before = versions[won]

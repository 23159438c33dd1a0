"""examples/async_grpo on RolloutReplicas: what it applies, patches, looks at and deletes; the cluster is a fake."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from devcluster.client import CommandError
from examples.async_grpo import cluster as example
from examples.async_grpo.model import new_model
from examples.async_grpo.replicas import KEPT, Published, Replicas, RunError
from tests.support.fake_apiserver import Fault
from tests.support.fake_pod_admin import FakePodAdmin
from tests.support.operator_kit import Bench, bench
from tests.support.operator_process import kubeconfig

pytestmark = pytest.mark.timeout(120)

NAMES = ["grpo-0", "grpo-1"]


class FakeCluster:
    """What the example asks of the dev cluster: the addresses of Services."""

    def __init__(self, b: Bench) -> None:
        self._server = b.server

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any]:
        assert namespace == "ns"
        found = self._server.get(f"{kind}s", name)
        if found is None:
            raise CommandError(("kubectl", "get", kind, name), "not found")
        number = NAMES.index(name)
        spec = {**found["spec"], "clusterIP": f"10.96.0.{100 + number}"}
        return {**found, "spec": spec}


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The manifest, with a folder of this test's for the weights."""
    folder = tmp_path / "versions"
    body = yaml.safe_load(example.MANIFEST.read_text())
    body["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"] = str(folder)
    manifest = tmp_path / "replica.yaml"
    manifest.write_text(yaml.safe_dump(body))
    monkeypatch.setattr(example, "MANIFEST", manifest)
    monkeypatch.setattr(example, "NAMESPACE", "ns")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return folder


@asynccontextmanager
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    async with bench() as b:
        (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig(b.server.url)))
        monkeypatch.setattr(example, "_cluster", lambda: FakeCluster(b))
        yield b


@asynccontextmanager
async def running(b: Bench, model: Any) -> AsyncIterator[tuple[Replicas, list[FakePodAdmin]]]:
    """The example's replicas, and kubelet's part."""
    kubelet = [asyncio.create_task(b.run_pod(name)) for name in NAMES]
    try:
        async with example.cluster_replicas(model) as replicas:
            yield replicas, list(await asyncio.gather(*kubelet))
    finally:
        for task in kubelet:
            task.cancel()
        await asyncio.wait(kubelet)


def replicas_left(b: Bench) -> list[str]:
    return [name for name in NAMES if b.server.get("rolloutreplicas", name)]


def names_in(folder: Path) -> list[str] | None:
    """None where there is none."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else None


async def test_two_replicas_are_applied_fed_by_folders_and_deleted(
    tmp_path: Path, versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(seed=0)
    async with site(tmp_path, monkeypatch) as b:
        async with running(b, model) as (replicas, admins):
            assert replicas.endpoints == [f"http://10.96.0.{n}:8000" for n in (100, 101)]
            assert (versions / "base" / "config.json").exists()
            for name in NAMES:
                body = b.server.get("rolloutreplicas", name)
                assert body is not None
                assert body["metadata"]["labels"] == {"app": "async-grpo"}
            for step in range(1, KEPT + 3):
                weights = {"w": torch.full((2,), float(step))}
                told = await replicas.publish(step, weights)
                assert [type(one) for one in told] == [Published, Published]
                assert [one.replica for one in told] == NAMES
                for admin in admins:
                    assert admin.state.weight_version == f"step-{step}"
                    wanted = admin.documents[-1].weights
                    assert wanted is not None
                    assert (wanted.step, wanted.source.path) == (step, f"/versions/step-{step}")
                assert torch.equal(
                    load_file(versions / f"step-{step}" / "model.safetensors")["w"], weights["w"]
                )
            kept = [f"step-{step}" for step in range(3, KEPT + 3)]
            assert names_in(versions) == ["base", *kept]
            status = b.status(NAMES[0])
            assert (status["history"][0]["by"], status["weightUpdate"]["phase"]) == (
                "async-grpo", "Committed",
            )  # fmt: skip
        assert replicas_left(b) == []
        assert names_in(versions) is None


async def test_weights_that_a_replica_does_not_take_end_the_run_and_nothing_is_left(
    tmp_path: Path, versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path, monkeypatch) as b:

        async def run() -> None:
            async with running(b, new_model(seed=0)) as (replicas, admins):
                admins[1].missing = {"step-1"}
                await replicas.publish(1, {"w": torch.zeros(2)})

        with pytest.raises(RunError, match=r"step 1 did not reach every replica: .*grpo-1"):
            await run()
        assert replicas_left(b) == []
        assert names_in(versions) is None


async def test_a_cluster_that_refuses_is_told_with_the_remedy(
    tmp_path: Path, versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path, monkeypatch) as b:
        refused = Fault(lambda r: r.method == "PATCH" and r.name == "grpo-1", 404, message="no CRD")
        b.server.faults.append(refused)
        with pytest.raises(RunError, match=r"no CRD.*is the operator installed in namespace ns"):
            async with example.cluster_replicas(new_model(seed=0)):
                raise AssertionError("they never became ready")
        assert replicas_left(b) == [], "the one that was applied is gone, too"


def test_an_external_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVCLUSTER", "external")
    monkeypatch.setenv("KUBECONFIG", "/nobody/asks/it")
    with pytest.raises(RunError, match="or with --local"):
        example._cluster()
    monkeypatch.delenv("KUBECONFIG")
    with pytest.raises(RunError, match="DEVCLUSTER=external: set KUBECONFIG"):
        example._cluster()


def test_both_containers_see_the_folder_that_the_example_writes_to() -> None:
    spec = yaml.safe_load(example.MANIFEST.read_text())["spec"]
    (volume,) = spec["template"]["spec"]["volumes"]
    parts = spec["template"]["spec"]
    for container in (*parts["containers"], *parts["initContainers"]):
        (mount,) = container["volumeMounts"]
        assert (mount["name"], mount["readOnly"]) == (volume["name"], True)
        for path in (spec["model"], spec["weights"]["source"]["path"]):
            assert path.rpartition("/")[0] == mount["mountPath"]
    assert spec["weights"]["source"]["path"].endswith("/{version}")

"""Changes of the spec: what replaces the pod and what does not, also when they come too soon."""

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

import rollout_operator
from rollout_operator.apply.kube import KubeApi
from rollout_operator.hub import Hub
from tests.support.fake_apiserver import Json
from tests.support.operator_kit import Bench, bench
from tests.wire.test_operator_process import process

CRD = Path(__file__).parents[2] / "crds" / "rolloutreplica.yaml"
SOURCE = {"source": {"path": "/ckpt/{version}"}}


def pod(b: Bench) -> Json | None:
    return b.server.get("pods", "qwen-0")


def uid(b: Bench) -> str:
    found = pod(b)
    return found["metadata"]["uid"] if found else ""


async def draining(b: Bench) -> None:
    await b.until(lambda: (pod(b) or {"metadata": {}})["metadata"].get("deletionTimestamp"))


@pytest.mark.parametrize(
    "change",
    [
        {"paused": True},
        {"weightVersion": "step-1"},
        {"interruption": {"mode": "Keep"}},
        {"restartPolicy": {"maxRestarts": 3}},
        {"weights": {"bucketSize": "1Mi", "timeoutSeconds": 7}},
        {"sleep": {"level": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_what_the_running_pod_can_take_on_replaces_nothing(change: dict[str, Any]):
    async with bench() as b:
        admin = await b.serving(weights=SOURCE)
        before, start = uid(b), len(b.server.requests)
        b.patch(**change)
        await b.until(lambda: admin.documents[-1].generation == 2)
        await b.quiet()
        assert uid(b) == before
        writes = b.server.writes(start)
        assert not [w for w in writes if not w.startswith("PATCH rolloutreplicas")], writes


async def test_reverted_while_the_old_pod_drains_it_comes_back_as_it_was():
    async with bench() as b:
        await b.serving()
        start = len(b.server.requests)
        b.patch(model="other")
        await draining(b)
        b.patch(model="m")
        await b.until(lambda: b.status()["observedGeneration"] == 3)
        # its containers end before kubelet lets it go
        b.server.change("pods", "qwen-0", {"status": {"phase": "Succeeded"}})
        await b.quiet()
        b.server.remove("pods", "qwen-0")
        new = await b.until(lambda: pod(b))
        assert "other" not in new["spec"]["containers"][0]["args"]
        await b.run_pod()
        await b.ready("Serving")
        await b.quiet()
        writes = b.server.writes(start)
        assert writes.count("DELETE pods/qwen-0") == 1
        assert writes.count("POST pods") == 1
        assert "restarts" not in b.status()


async def test_reverted_before_the_new_pod_serves_nothing_serves_the_wrong_model():
    async with bench() as b:
        await b.serving()
        b.patch(model="other")
        await draining(b)
        b.server.remove("pods", "qwen-0")
        await b.until(lambda: pod(b))
        b.patch(model="m")
        await draining(b)
        assert "other" in (pod(b) or {})["spec"]["containers"][0]["args"]
        b.server.remove("pods", "qwen-0")
        new = await b.until(lambda: pod(b))
        assert "other" not in new["spec"]["containers"][0]["args"]
        await b.run_pod()
        await b.ready("Serving")
        assert "restarts" not in b.status()


async def test_a_change_that_the_answer_to_a_status_write_is_the_first_to_show(monkeypatch):
    event, apply = Hub.replica, KubeApi.apply
    changed: list[bool] = []

    def late(self, news) -> None:
        asyncio.get_running_loop().call_later(0.5, event, self, news)

    async def overtaken(self, *args, **given):
        if given.get("subresource") == "status" and not changed:
            changed.append(True)
            b.patch(model="other")
        return await apply(self, *args, **given)

    async with bench() as b:
        await b.serving()
        await b.quiet()
        monkeypatch.setattr(Hub, "replica", late)
        monkeypatch.setattr(KubeApi, "apply", overtaken)
        b.patch(restartPolicy={"maxRestarts": 3})
        await draining(b)
        assert changed


async def test_a_pod_that_is_not_ready_does_not_hold_up_its_own_replacement():
    async with bench() as b:
        b.apply()
        await b.until(lambda: pod(b))
        b.patch(model="other")
        await draining(b)
        b.server.remove("pods", "qwen-0")
        new = await b.until(lambda: pod(b))
        assert "other" in new["spec"]["containers"][0]["args"]


async def test_ready_speaks_of_the_newest_spec_only_when_a_pod_of_it_serves():
    async with bench() as b:
        await b.serving()
        b.patch(model="other")
        await draining(b)
        await b.until(lambda: b.status()["observedGeneration"] == 2)
        assert b.condition("Ready")[0] == "False"
        b.server.remove("pods", "qwen-0")
        await b.until(lambda: pod(b))
        await b.quiet()
        assert b.condition("Ready")[0] == "False"
        await b.run_pod()
        await b.ready("Serving")


NEWER = {
    "api/spec.py": {
        "load_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 3600": "load_timeout_seconds: int = 7",
        "drain_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 30": "drain_timeout_seconds: int = 7",
        '= "16Gi"': '= "7Gi"',
        "max_restarts: Annotated[int, Field(ge=0, le=1000)] = 10": "max_restarts: int = 7",
    },
    "plan/containers.py": {"STARTUP_PERIOD_S: Final = 5": "STARTUP_PERIOD_S: Final = 7"},
    "plan/manifests.py": {
        "GRACE_MARGIN_S: Final = 15": "GRACE_MARGIN_S: Final = 77",
        "SHM_MARGIN: Final = 1 << 30": "SHM_MARGIN: Final = 1 << 31",
    },
}  # fmt: skip
"""Of the operator's files: what stands there, and what another build has instead."""


def newer_build(folder: Path) -> str:
    """Make another build of the operator; return what to put on the path."""
    package = Path(rollout_operator.__file__).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in NEWER.items():
        file = folder / package.name / name
        text = file.read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, f"{name} holds {old!r} no more"
            text = text.replace(old, new)
        file.write_text(text)
    return str(folder)


def as_stored(spec: Json, schema: Json) -> Json:
    """The spec as the API server keeps it: the defaults of the CRD are written down."""
    whole = {
        name: property["default"]
        for name, property in schema.get("properties", {}).items()
        if "default" in property
    } | spec
    return {
        name: as_stored(value, schema["properties"][name])
        if isinstance(value, dict) and name in schema.get("properties", {})
        else value
        for name, value in whole.items()
    }


async def test_a_newer_build_of_the_operator_with_other_defaults_writes_nothing(tmp_path: Path):
    crd = yaml.safe_load(CRD.read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    async with process(tmp_path) as operator:
        b = operator.bench
        b.apply(**as_stored({"model": "m", "weights": SOURCE}, schema))
        await b.run_pod()
        await b.ready("Serving")
        await b.quiet()
        await operator.end(signal.SIGTERM)
        old, start = pod(b), len(b.server.requests)
        assert old is not None
        await operator.start(
            PYTHONPATH=newer_build(tmp_path / "newer"),
            ROLLOUT_OPERATOR_DEFAULT_IMAGE="pod:2",
            ROLLOUT_OPERATOR_IMAGE_PULL_POLICY="Always",
            ROLLOUT_OPERATOR_RESYNC_SECONDS="1",
        )
        await operator.ready()
        # it has looked at all of it, more than once
        await b.until(
            lambda: [str(r) for r in b.server.requests[start:]].count("GET secrets/qwen-admin") > 2,
            timeout=30,
        )
        assert b.server.writes(start) == []
        assert pod(b) == old
        # the new defaults count from the next pod on
        b.patch(model="other")
        await draining(b)
        b.server.remove("pods", "qwen-0")
        new = await b.until(lambda: pod(b))
        for found, image, period, grace in ((old, "pod:1", 5, 45), (new, "pod:2", 7, 107)):
            (engine,) = found["spec"]["containers"]
            assert engine["image"] == image
            assert engine["startupProbe"]["periodSeconds"] == period
            assert found["spec"]["terminationGracePeriodSeconds"] == grace

"""examples/colocated.yaml as it stands: a trainer in the engine's pod trains, pushes and parks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.client import Cluster, CommandError
from tests.support.replica import ROOT, Replica, checkpoints, install_operator

EXAMPLES = ROOT / "examples"


@pytest.fixture
def data(cluster: Cluster) -> Iterator[Path]:
    with checkpoints(cluster, "colocated", ("base",)) as folder:
        yield folder


def objects(data: Path) -> list[dict[str, Any]]:
    found = list(yaml.safe_load_all((EXAMPLES / "colocated.yaml").read_text()))
    volumes = found[0]["spec"]["template"]["spec"]["volumes"]
    volumes[0]["hostPath"]["path"] = str(data)
    return found


def told(replica: Replica) -> list[dict[str, Any]]:
    """What the trainer has printed so far."""
    text = replica.kubectl("logs", "colocated-0", "-c", "trainer", "--tail=100")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


async def test_it_trains_pushes_and_parks(cluster: Cluster, namespace: str, data: Path) -> None:
    install_operator(cluster, namespace)
    replica = Replica(cluster, namespace, data, name="colocated")
    script = EXAMPLES / "colocated_trainer.py"
    replica.kubectl("create", "configmap", "colocated-trainer", f"--from-file={script}")
    for body in objects(data):
        replica.kubectl("apply", "-f", "-", input=json.dumps(body))
    lines = cluster.wait(
        lambda: (found := told(replica)) and "parked" in found[-1] and found,
        200,
        "the trainer to be done",
        namespace=namespace,
    )
    first, last, _ = lines
    assert first["loss"] > last["loss"], "it learns"
    assert last["transport"] == "shared_memory"
    version = last["version"]
    status = replica.serving(version)
    assert status["lastCommitted"]["source"] == {"push": {}}
    assert status["lastCommitted"]["step"] == 2
    updates = [u for u in status["history"] if u["version"].startswith("run-")]
    assert [(u["version"], u["phase"], u["by"]) for u in updates] == [
        (line["version"], "Committed", "rollout-trainer") for line in (last, first)
    ]
    said = await replica.generate([301, 302, 303, 304], 16)
    assert list(said.token_ids) == last["says"] != first["says"]
    assert {span.version for span in said.weight_versions} == {version}

    # what was pushed is lost with the engine; the trainer that parks has it
    replica.kill_container("engine")
    cluster.wait(
        lambda: [
            c
            for c in replica.pod()["status"]["containerStatuses"]
            if c["name"] == "engine" and c["restartCount"]
        ],
        60,
        "the engine to be started again",
        namespace=namespace,
    )
    replica.serving(version)
    again = await replica.generate([301, 302, 303, 304], 16)
    assert list(again.token_ids) == last["says"]
    # its rights end at its own replica
    account = f"system:serviceaccount:{namespace}:colocated-trainer"
    can = ["auth", "can-i", "--as", account]
    assert replica.kubectl(*can, "patch", "rr/colocated").strip() == "yes"
    for verb, what in (("patch", "rr/other"), ("list", "rr"), ("get", "secrets/colocated-admin")):
        with pytest.raises(CommandError, match="no"):
            replica.kubectl(*can, verb, what)

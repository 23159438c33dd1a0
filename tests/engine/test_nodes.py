"""Two pods' processes on one machine as one engine: a rank each, over vLLM's own multi-node mode."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest

from rollout_pod.protocol import UpdatePhase, WeightsRef, WeightsSource
from tests.support.engine_kit import checkpoint, prompts
from tests.support.nodes import TwoNodes, two_nodes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

A = checkpoint("dense", 0)
B = checkpoint("dense", 1)
LONG = 1900


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    shutil.copytree(B, folder / "step-1")
    shutil.copytree(A, folder / "step-2")
    return folder


@pytest.fixture(scope="module")
def nodes(versions: Path) -> Iterator[TwoNodes]:
    args = ("--tensor-parallel-size=2",)
    with two_nodes(A, f"--source={versions}/{{version}}", engine_args=args) as made:
        made.start()
        made.head.serving("base", timeout_s=200)
        yield made


def generates(nodes: TwoNodes, path: Path) -> bool:
    return all(
        nodes.head.is_greedy(path, prompt, nodes.head.generate(prompt, 32)) for prompt in prompts(3)
    )


def test_two_nodes_generate_as_one_engine(nodes: TwoNodes) -> None:
    assert generates(nodes, A)
    state = nodes.head.serving("base")
    assert [rank.rank for rank in state.ranks] == [0, 1]
    for pod in (nodes.head, nodes.node):
        assert pod.process
        # the rank that this pod holds, and no other
        assert pod.child("Worker_TP" + ("0" if pod is nodes.head else "1"))
    assert nodes.node.get("/readyz") == 200


def test_every_rank_takes_an_update_before_it_is_committed(nodes: TwoNodes) -> None:
    done = nodes.head.cli("update", "step-1")
    assert done.returncode == 0, done.stderr
    state = nodes.head.serving("step-1")
    assert [(r.rank, r.weight_version) for r in state.ranks] == [(0, "step-1"), (1, "step-1")]
    assert generates(nodes, B)


def test_a_pause_returns_what_there_is_and_a_resume_goes_on(nodes: TwoNodes) -> None:
    asked = prompts(3)
    running = [nodes.head.begin(prompt, LONG) for prompt in asked]
    while nodes.head.metric("rollout_unfinished ") < len(asked):
        time.sleep(0.01)
    assert nodes.head.cli("pause").returncode == 0
    partials = [future.result(30) for future in running]
    assert all(p.is_cancel and p.cancel_reason == "paused" for p in partials)
    assert nodes.head.cli("resume").returncode == 0
    assert generates(nodes, B)


def test_a_node_whose_agent_dies_delays_an_update_and_nothing_else(
    nodes: TwoNodes, versions: Path
) -> None:
    weights = WeightsRef(version="step-2", source=WeightsSource(path=str(versions / "step-2")))
    agent = nodes.node.child("rollout_pod weights")
    agent.suspend()
    try:
        with nodes.head.ctl() as ctl:
            ctl.change(lambda d: d.model_copy(update={"weights": weights}))
        nodes.head.until(lambda s: bool(s.update and s.update.target == "step-2"))
        assert generates(nodes, B)
        assert nodes.head.serving("step-1")
    finally:
        agent.kill()
    state = nodes.head.until(
        lambda s: bool(s.update and s.update.phase is UpdatePhase.COMMITTED), timeout_s=60
    )
    assert state.weight_version == "step-2"
    assert generates(nodes, A)


def test_a_node_that_is_killed_ends_the_head(nodes: TwoNodes) -> None:
    running = [nodes.head.begin(prompt, LONG) for prompt in prompts(2)]
    while nodes.head.metric("rollout_unfinished ") < 2:
        time.sleep(0.01)
    assert nodes.head.process
    family = psutil.Process(nodes.head.process.pid).children(recursive=True)
    nodes.node.kill()
    assert nodes.head.process.wait(90) == 1
    wait(running, 10)
    assert all(future.done() for future in running)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive

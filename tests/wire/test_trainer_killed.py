"""A trainer dies in the middle of pushing to a replica that an operator owns; the next one takes over.

The trainer and the operator are processes of their own, the API server is a fake, the pod's ranks are real.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fake_apiserver import FakeApiServer
from tests.support.local_pods import Local
from tests.support.operator_kit import Bench
from tests.support.operator_process import Process
from tests.support.pods import PROMPT
from tests.support.pushed_replica import adapter_of, replica, target_of
from tests.support.weights import mixed_tensors, same, write_checkpoint

TRAINER = Path(__file__).resolve().parents[1] / "support" / "trainer_process.py"

pytestmark = pytest.mark.timeout(180)


@asynccontextmanager
async def owned_pod(folder: Path, bucket: str) -> AsyncIterator[tuple[Bench, Process, Local]]:
    """A replica that serves its base, and the operator that owns it."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeApiServer().running())
        operator = Process(Bench(server, stack), folder)
        await operator.start()
        try:
            weights = {"bucketSize": bucket}
            async with replica(operator.bench, weights=weights) as pod:
                yield operator.bench, operator, pod
        finally:
            await operator.end(signal.SIGKILL)


async def killed_in_the_middle(b: Bench, pod: Local, folder: Path, *, is_mixed: bool) -> None:
    """Half of the tensors are read, and the ranks are loading, when it dies.

    Args:
        b: The site.
        pod: The replica's.
        folder: For the tensors.
        is_mixed: Some of them are loaded by then; else they wait for a bucket to be full.
    """
    write_checkpoint(folder, mixed_tensors(1))
    trainer = await asyncio.create_subprocess_exec(
        *(sys.executable, str(TRAINER), b.server.url, str(pod.run_dir), "killed", str(folder)),
        "ns/qwen", cwd=TRAINER.parents[2], env={"PYTHONPATH": "."},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert await trainer.stdout.readline() == b"middle\n"
        await b.until(lambda: "load killed" in pod.engine.calls)
        if is_mixed:
            await b.until(lambda: 0 < len(pod.models[0]) < len(mixed_tensors(1)))
        assert pod.state.phase == "Updating"
    finally:
        trainer.kill()
        await trainer.wait()


@pytest.mark.parametrize(
    ("bucket", "is_mixed", "operator_dies", "next_version"),
    [
        pytest.param("4Ki", True, False, "taken-over", id="a mix is never served"),
        pytest.param("1Mi", False, False, "taken-over", id="no byte loaded: the old one serves on"),
        pytest.param("4Ki", True, True, "killed", id="operator killed too, same version again"),
    ],
)
async def test_it_serves_the_old_version_or_nothing_until_the_next_trainer_commits(
    tmp_path: Path, bucket: str, is_mixed: bool, operator_dies: bool, next_version: str
) -> None:
    async with owned_pod(tmp_path, bucket) as (b, operator, pod):
        async with adapter_of(b, target_of(pod), manager="first") as first:
            await first.update_weights(mixed_tensors(2), version="before")
        await killed_in_the_middle(b, pod, tmp_path / "checkpoint", is_mixed=is_mixed)
        if operator_dies:
            await operator.end(signal.SIGKILL)

        state = await pod.pod.until(lambda s: s.needs == "killed" and s.phase != "Updating")
        assert (state.phase, state.weight_version, state.ready) == (
            ("Poisoned", None, False) if is_mixed else ("Serving", "before", True)
        )
        assert state.desired_version == "killed", "the replica goes on asking for it"
        if not is_mixed:
            assert same(pod.models[0], mixed_tensors(2))
            said = await pod.pod.ask(PROMPT, 3)
            assert {span.version for span in said.weight_versions} == {"before"}
        if operator_dies:
            await operator.start()
            await operator.ready()
        await b.until(lambda: b.condition("WeightsReady") == ("False", "AwaitingPush"))
        await b.until(lambda: b.condition("Available")[0] == ("False" if is_mixed else "True"))
        assert b.status()["lastCommitted"]["version"] == "before"

        async with adapter_of(b, target_of(pod), manager="second") as second:
            results = await second.update_weights(mixed_tensors(3), version=next_version)
        assert results["ns/qwen"].weight_version == next_version
        assert same(pod.models[0], mixed_tensors(3)), "all of the second one's, and no more"
        said = await pod.pod.ask(PROMPT, 3)
        assert {span.version for span in said.weight_versions} == {next_version}
        assert (await pod.pod.serving(next_version)).needs is None
        await b.ready("Serving")
        last = b.status()["history"][0]
        # whoever asked for a version first did ask for it
        by = "killed-trainer" if next_version == "killed" else "second"
        assert (last["version"], last["phase"], last["by"]) == (next_version, "Committed", by)

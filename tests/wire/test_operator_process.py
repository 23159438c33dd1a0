"""The operator as a process of its own: killed, stopped, started again, asked how it is."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fake_apiserver import FakeApiServer
from tests.support.operator_kit import Bench
from tests.support.operator_process import Process

SOURCE = {"source": {"path": "/ckpt/{version}"}}


@asynccontextmanager
async def process(folder: Path) -> AsyncIterator[Process]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeApiServer().running())
        made = Process(Bench(server, stack), folder)
        await made.start()
        try:
            yield made
        finally:
            await made.end(signal.SIGKILL)


async def test_killed_between_cancel_and_commit_the_update_completes_once(tmp_path: Path):
    async with process(tmp_path) as operator:
        b = operator.bench
        b.apply(weights=SOURCE)
        admin = await b.run_pod()
        await b.ready("Serving")
        admin.hold = asyncio.Event()
        b.patch(weightVersion="step-1")
        await b.until(lambda: admin.state.phase == "Updating")
        await operator.end(signal.SIGKILL)
        start, told = len(b.server.requests), len(admin.documents)
        admin.hold.set()
        await b.until(lambda: admin.state.weight_version == "step-1")
        await operator.start()
        await b.until(lambda: b.status().get("weightVersion") == "step-1", timeout=30)
        await b.ready("Serving")
        assert set(b.server.writes(start)) == {"PATCH rolloutreplicas/qwen/status"}
        # told again once, because the fallback is another one now
        assert len(admin.documents) <= told + 1
        assert admin.state.update is not None
        assert admin.state.update.attempt == 1


@pytest.mark.parametrize("after", ["POST secrets", "PATCH services/qwen", "POST pods"])
async def test_killed_while_it_creates_it_goes_on_and_makes_one_pod(tmp_path: Path, after: str):
    async with process(tmp_path) as operator:
        b = operator.bench
        await operator.ready()
        b.apply()
        await b.until(lambda: after in b.server.writes())
        await operator.end(signal.SIGKILL)
        await operator.start()
        await b.run_pod()
        await b.ready("Serving")
        assert b.server.writes().count("POST pods") == 1
        assert b.server.writes().count("POST secrets") == 1


async def test_sigterm_ends_it_within_seconds_and_without_a_trace(tmp_path: Path):
    async with process(tmp_path) as operator:
        b = operator.bench
        b.apply()
        admin = await b.run_pod()
        await b.ready("Serving")
        start = len(b.server.requests)
        seconds, log = await operator.end(signal.SIGTERM)
        assert operator.child is not None
        assert operator.child.returncode == 0
        assert seconds < 5
        assert "Traceback" not in log
        assert b.server.writes(start) == []
        assert admin.state.phase == "Serving"
        # every line is JSON
        assert all("event" in json.loads(line) for line in log.splitlines())


async def test_probes_and_metrics(tmp_path: Path):
    async with process(tmp_path) as operator:
        await operator.ready()
        assert operator.get("healthz") == "ok"
        operator.bench.apply()
        await operator.bench.run_pod()
        await operator.bench.ready("Serving")
        metrics = await asyncio.to_thread(operator.get, "metrics")
        assert "rollout_operator_replicas 1.0" in metrics
        assert "rollout_operator_pod_polls 1.0" in metrics
        assert 'rollout_operator_reconciles_total{outcome="ok"}' in metrics
        own = 'rollout_replica_ready{name="qwen",namespace="ns"} 1.0'
        assert own in metrics
        operator.bench.server.remove("rolloutreplicas", "qwen")
        await operator.bench.until(lambda: "rollout_replica_ready{" not in operator.get("metrics"))
        assert 'name="qwen"' not in await asyncio.to_thread(operator.get, "metrics")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "no namespace to watch"),
        (
            {"ROLLOUT_OPERATOR_CLUSTER_WIDE": "true", "ROLLOUT_OPERATOR_WATCH_NAMESPACES": "a,b"},
            "exclude each other",
        ),
        ({"ROLLOUT_OPERATOR_CLUSTER_WIDE": "true"}, "no namespace for the Lease"),
        ({"POD_NAMESPACE": "x", "ROLLOUT_OPERATOR_METRICS_PORT": "99999"}, "metrics_port"),
    ],
)
async def test_bad_settings_end_it_with_the_name_of_the_setting(
    environment: dict[str, str], words: str
):
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollout_operator"),
        env={"PATH": os.environ["PATH"], **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode == 1
    assert words in err.decode()

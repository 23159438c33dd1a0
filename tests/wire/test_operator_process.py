"""The operator as a process of its own: killed, stopped, started again, asked how it is."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.fake_apiserver import FakeApiServer
from tests.support.operator_kit import Bench, free_port

SOURCE = {"source": {"path": "/ckpt/{version}"}}


class Process:
    """``python -m rollout_operator`` against the bench's API server."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench = bench
        self.probe_port, self.metrics_port = free_port(), free_port()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(_kubeconfig(bench.server.url)))
        self.child: asyncio.subprocess.Process | None = None

    async def start(self, **more: str) -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.kubeconfig.parent),
            "KUBECONFIG": str(self.kubeconfig),
            "POD_NAMESPACE": self.bench.server.namespace,
            "ROLLOUT_OPERATOR_PROBE_ADDRESS": "127.0.0.1",
            "ROLLOUT_OPERATOR_PROBE_PORT": str(self.probe_port),
            "ROLLOUT_OPERATOR_METRICS_PORT": str(self.metrics_port),
            "ROLLOUT_OPERATOR_ADMIN_PORT": str(self.bench.port),
            "ROLLOUT_OPERATOR_DEFAULT_IMAGE": "pod:1",
            **more,
        }
        self.child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollout_operator",
            env=environment,
            stderr=asyncio.subprocess.PIPE,
        )

    async def ready(self) -> None:
        await self.bench.until(lambda: self.get("readyz") == "ok", timeout=30)

    async def end(self, how: signal.Signals) -> tuple[float, str]:
        """Send a signal; return the seconds until the end and what it logged."""
        assert self.child is not None
        begun = time.monotonic()
        if self.child.returncode is None:
            self.child.send_signal(how)
        _, err = await asyncio.wait_for(self.child.communicate(), 20)
        return time.monotonic() - begun, err.decode()

    def get(self, path: str) -> str:
        port = self.metrics_port if path == "metrics" else self.probe_port
        try:
            with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=2) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""


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


def _kubeconfig(url: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "fake", "user": {"token": "t"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
    }


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


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "no namespace to watch"),
        (
            {"ROLLOUT_OPERATOR_CLUSTER_WIDE": "true", "ROLLOUT_OPERATOR_WATCH_NAMESPACES": "a,b"},
            "exclude each other",
        ),
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

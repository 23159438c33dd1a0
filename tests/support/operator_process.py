"""The operator as a process of its own."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from urllib.request import urlopen

from tests.support.operator_kit import Bench, free_port


class Process:
    """``python -m rollout_operator`` against the bench's API server."""

    def __init__(
        self,
        bench: Bench,
        folder: Path,
        *,
        url: str = "",
        identity: str = "the-pods-uid",
        **settings: str,
    ) -> None:
        self.bench = bench
        self.settings = settings
        self.identity = identity
        """As the containers of one pod have it, of which there is one at a time."""
        self.probe_port, self.metrics_port = free_port(), free_port()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(kubeconfig(url or bench.server.url)))
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
            "ROLLOUT_OPERATOR_IDENTITY": self.identity,
            **{f"ROLLOUT_OPERATOR_{name.upper()}": v for name, v in self.settings.items()},
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


def kubeconfig(url: str, *, namespace: str | None = None) -> dict[str, object]:
    """Of a plain address."""
    context = {"cluster": "fake", "user": "fake"} | ({"namespace": namespace} if namespace else {})
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "fake", "user": {"token": "t"}}],
        "contexts": [{"name": "fake", "context": context}],
    }

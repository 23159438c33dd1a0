"""The operator in process, between a fake API server and fake pods."""

import asyncio
import base64
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rollout_operator.app import run
from rollout_operator.runtime import Runtime
from rollout_operator.settings import Settings
from tests.support.fake_apiserver import FakeApiServer, Json
from tests.support.fake_pod_admin import FakePodAdmin

DEADLINE_S = 15.0


class Bench:
    """What a test drives. Pods listen on 127.0.0.2, .3 and so on, on one free port."""

    def __init__(self, server: FakeApiServer, stack: AsyncExitStack) -> None:
        self.server = server
        self.url = server.url
        self.port = free_port()
        self.admins: list[FakePodAdmin] = []
        self._stack = stack
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self.runtime: Runtime | None = None

    async def start(self, **settings: Any) -> None:
        given = {
            "watch_namespaces": self.server.namespace,
            "resync_seconds": 600,
            "default_image": "pod:1",
            "leader_election": False,
            **settings,
        }
        self._stop = asyncio.Event()
        self.runtime = Runtime(
            Settings(
                metrics_port=0,
                probe_port=0,
                probe_address="127.0.0.1",
                admin_port=self.port,
                **given,
            ),
            server=self.url,
        )
        self._task = asyncio.create_task(run(self.runtime, stop_flag=self._stop))
        await self.until(lambda: self.runtime is not None and self.runtime.watching.is_set())

    async def stop(self) -> None:
        """Let the operator end in peace."""
        if self._task is not None and self._stop is not None:
            self._stop.set()
            await asyncio.wait_for(self._task, DEADLINE_S)
        self._task = None

    async def until(
        self, check: Callable[[], Any], what: str = "", *, timeout: float = DEADLINE_S
    ) -> Any:
        """Wait until ``check`` is true; on time-out show the replica's conditions."""
        end = time.monotonic() + timeout
        while not (found := check()):
            if self._task is not None and self._task.done():
                self._task.result()
                raise AssertionError("the operator ended")
            if time.monotonic() > end:
                raise AssertionError(f"{what or check} did not come true: {self.explain()}")
            await asyncio.sleep(0.01)
        return found

    def explain(self) -> str:
        raw = self.server.get("rolloutreplicas", "qwen") or {}
        requests = [str(r) for r in self.server.requests[-12:]]
        return f"status={raw.get('status')} last requests={requests}"

    # -- the replica

    def apply(self, name: str = "qwen", **spec: Any) -> Json:
        return self.server.put(
            "rolloutreplicas", {"metadata": {"name": name}, "spec": {"model": "m", **spec}}
        )

    def patch(self, **spec: Any) -> Json:
        return self.server.change("rolloutreplicas", "qwen", {"spec": spec})

    def status(self, name: str = "qwen") -> Json:
        found: Json = (self.server.get("rolloutreplicas", name) or {}).get("status") or {}
        return found

    def condition(self, kind: str, name: str = "qwen") -> tuple[str, str]:
        for condition in self.status(name).get("conditions") or ():
            if condition["type"] == kind:
                return condition["status"], condition["reason"]
        return "", ""

    def message(self, kind: str = "Ready") -> str:
        conditions = self.status()["conditions"]
        found: str = next(c["message"] for c in conditions if c["type"] == kind)
        return found

    async def ready(self, reason: str, status: str = "True") -> None:
        await self.until(
            lambda: self.condition("Ready") == (status, reason), f"Ready={status} {reason}"
        )

    # -- the pod

    def token(self, name: str = "qwen") -> str:
        secret = self.server.get("secrets", f"{name}-admin")
        assert secret is not None
        return base64.b64decode(secret["data"]["token"]).decode()

    async def run_pod(self, name: str = "qwen", **traits: Any) -> FakePodAdmin:
        """Do kubelet's part: wait for the pod, run it, call it ready."""
        await self.until(lambda: self.server.get("pods", f"{name}-0"), "the pod")
        admin = FakePodAdmin(self.token(name))
        for trait, value in traits.items():
            setattr(admin, trait, value)
        ip = f"127.0.0.{2 + len(self.admins)}"
        self.admins.append(admin)
        await self._stack.enter_async_context(admin.running(ip, self.port))
        self.server.change("pods", f"{name}-0", {"status": running_status(ip)})
        return admin

    async def serving(self, **spec: Any) -> FakePodAdmin:
        """Have a replica that serves."""
        self.apply(**spec)
        admin = await self.run_pod()
        await self.ready("Serving")
        await self.quiet()
        return admin

    async def quiet(self, seconds: float = 0.5) -> None:
        """Wait until nothing was asked of the API server for so long, but for the Lease."""
        seen, since = self.server.asked(), time.monotonic()
        end = since + DEADLINE_S
        while time.monotonic() - since < seconds:
            if time.monotonic() > end:
                raise AssertionError(f"never quiet: {self.explain()}")
            await asyncio.sleep(0.02)
            if self.server.asked() != seen:
                seen, since = self.server.asked(), time.monotonic()


@asynccontextmanager
async def bench(**settings: Any) -> AsyncIterator[Bench]:
    """Yield a running operator between its fakes."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeApiServer().running())
        made = Bench(server, stack)
        try:
            await made.start(**settings)
            yield made
        finally:
            await made.stop()


def running_status(
    ip: str, *, ready: bool = True, restarts: int = 0, started: bool | None = None
) -> Json:
    def container(name: str) -> Json:
        return {
            "name": name,
            "ready": ready,
            "restartCount": restarts,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }

    engine = container("engine") | ({} if started is None else {"started": started})
    return {
        "phase": "Running",
        "podIP": ip,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [engine],
        "initContainerStatuses": [container("weights")],
    }


def ended_status(ip: str, exit_code: int, *, at: str) -> Json:
    """Of a pod whose containers start once."""
    reason = "Error" if exit_code else "Completed"
    end = {"exitCode": exit_code, "reason": reason, "startedAt": at, "finishedAt": at}
    status = running_status(ip, ready=False)
    status["phase"] = "Failed" if exit_code else "Succeeded"
    status["containerStatuses"][0]["state"] = {"terminated": end}
    return status


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

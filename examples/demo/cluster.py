"""kubectl and helm of the dev cluster, and the pod's own state, for the demo."""

import asyncio
import base64
import json
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from devcluster.client import Cluster
from rollout_pod.protocol import ADMIN_PORT, StateDocument

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 20.0


class DemoError(Exception):
    """What went wrong, in words for the person who watches."""


@dataclass(frozen=True)
class Done:
    """A command that ended well."""

    output: str
    started: float
    """``time.perf_counter()`` just before its process was started."""
    ended: float


class Shell:
    """Runs kubectl and helm, and shows each command as a person would type it."""

    def __init__(self, cluster: Cluster, namespace: str, show: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._show = show

    async def kubectl(
        self, *args: str, quiet: bool = False, check: bool = True, timeout_s: float = 60.0
    ) -> Done:
        """Run kubectl, in the demo's namespace where it names none; ``quiet`` shows no command.

        Raises:
            DemoError: it failed (only with ``check``) or did not end in time.
        """
        place = () if "namespace" in args[:2] else ("-n", self.namespace)
        return await self._run(
            "kubectl", (*place, *args), quiet=quiet, check=check, timeout_s=timeout_s
        )

    async def helm(self, *args: str, timeout_s: float = 180.0) -> Done:
        """Run helm in the demo's namespace. Raises as ``kubectl`` does."""
        return await self._run(
            "helm", ("-n", self.namespace, *args), quiet=False, check=True, timeout_s=timeout_s
        )

    async def patch(self, name: str, spec: dict[str, Any]) -> Done:
        """``kubectl patch`` of a RolloutReplica's spec."""
        body = json.dumps({"spec": spec}, separators=(",", ":"))
        return await self.kubectl("patch", "rr", name, "--type", "merge", "-p", body)

    async def get(self, *args: str) -> dict[str, Any]:
        """``kubectl get -o json``, unseen."""
        done = await self.kubectl("get", *args, "-o", "json", quiet=True)
        document: dict[str, Any] = json.loads(done.output)
        return document

    async def _run(
        self, tool: str, args: Sequence[str], *, quiet: bool, check: bool, timeout_s: float
    ) -> Done:
        if not quiet:
            self._show(shlex.join((tool, *args)))
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            self.cluster.helm_path if tool == "helm" else self.cluster.kubectl_path,
            *args,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.cluster.environment(),
            cwd=ROOT,
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate()
        except TimeoutError:
            raise DemoError(f"{shlex.join((tool, *args))}: no end in {timeout_s:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if check and process.returncode:
            said = (err or out).decode().strip()
            raise DemoError(f"{shlex.join((tool, *args))}: {said}")
        return Done(out.decode(), started, time.perf_counter())


@dataclass(frozen=True)
class Seen:
    """A state document and when it arrived (``time.perf_counter()``)."""

    at: float
    state: StateDocument


class Watch:
    """Follows the state document of one pod by long polls on its admin port."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(POLL_S + 10, connect=5),
        )
        self._seen: list[Seen] = []
        self._news = asyncio.Condition()

    async def follow(self) -> None:
        """Poll until the pod is gone; an unanswered poll ends it."""
        after: dict[str, str] = {}
        while True:
            try:
                answer = await self._http.get(
                    "/admin/v1/state", params={"timeout": str(POLL_S), **after}
                )
            except httpx.TransportError:
                return
            if answer.is_error:
                raise DemoError(f"the pod's admin port answered {answer.status_code}")
            state = StateDocument.model_validate_json(answer.content)
            after = {"after": f"{state.boot_id}:{state.revision}"}
            async with self._news:
                self._seen.append(Seen(time.perf_counter(), state))
                self._news.notify_all()

    async def now(self) -> StateDocument:
        """The state at this moment, with the counters that make no revision."""
        answer = await self._http.get("/admin/v1/state", params={"timeout": "0"})
        return StateDocument.model_validate_json(answer.content)

    async def until(
        self,
        wanted: Callable[[StateDocument], bool],
        what: str,
        *,
        since: float = 0.0,
        timeout_s: float = 60.0,
    ) -> Seen:
        """The first wanted state that arrived after ``since`` (``time.perf_counter()``).

        Raises:
            DemoError: ``timeout_s`` passed.
        """

        def first() -> Seen | None:
            return next((s for s in self._seen if s.at >= since and wanted(s.state)), None)

        try:
            async with asyncio.timeout(timeout_s), self._news:
                while (found := first()) is None:
                    await self._news.wait()
                return found
        except TimeoutError:
            last = (
                self._seen[-1].state.model_dump_json(exclude_none=True) if self._seen else "nothing"
            )
            raise DemoError(f"waited {timeout_s:.0f} s for {what}; the pod said {last}") from None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


async def admin_token(shell: Shell, name: str) -> str:
    """The bearer token of the replica's admin port, from its Secret."""
    secret = await shell.get("secret", f"{name}-admin")
    return base64.b64decode(secret["data"]["token"]).decode()


@dataclass(frozen=True)
class Reach:
    """Base URLs of a replica's data and admin ports, as this machine reaches them."""

    data: str
    admin: str


@asynccontextmanager
async def reach(shell: Shell, name: str, *, external: bool) -> AsyncIterator[Reach]:
    """How this machine reaches the replica: directly in the dev cluster (the Service's address and
    the pod's), through ``kubectl port-forward`` in a cluster of the user's own.
    """
    if not external:
        service = await shell.get("service", name)
        pod = await shell.get("pod", f"{name}-0")
        port = service["spec"]["ports"][0]["port"]
        yield Reach(
            data=f"http://{service['spec']['clusterIP']}:{port}",
            admin=f"http://{pod['status']['podIP']}:{ADMIN_PORT}",
        )
        return
    command = ("-n", shell.namespace, "port-forward", f"pod/{name}-0", ":8000", ":8001")
    process = await asyncio.create_subprocess_exec(
        shell.cluster.kubectl_path,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
        env=shell.cluster.environment(),
    )
    try:
        ports: dict[str, str] = {}
        async with asyncio.timeout(30):
            while len(ports) < 2 and process.stdout:
                line = (await process.stdout.readline()).decode()
                if not line:
                    raise DemoError("kubectl port-forward ended at once")
                words = line.split()  # Forwarding from 127.0.0.1:40123 -> 8000
                if "127.0.0.1" in line:
                    ports[words[-1]] = f"http://{words[2]}"
        yield Reach(data=ports["8000"], admin=ports["8001"])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()

"""One operator and thousands of replicas: memory, a restart, and requests for each operation.

The API server and its etcd are real, the pods' admin ports are not: they hold the operator's long
polls and take documents. No controller, scheduler or kubelet runs. ``SCALE_SIZES=200,1000``
measures other numbers of replicas.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.api_server import api_server
from benchmarks.report import Result
from benchmarks.scale_fill import IMAGE, NAMESPACE, REPLICAS, Api, fill, path, prepare, session
from tests.support.process import free_port

GOALS = {1000: (150.0, 10.0), 5000: (300.0, 60.0)}
"""By replicas: MiB of memory, seconds from the process' start until all are observed."""
DEADLINE_S = 240.0
STEADY_S = 20.0


def run(quick: bool) -> Result:
    """Measure; ``quick``: few replicas, and no goal to hold."""
    named = os.environ.get("SCALE_SIZES", "100" if quick else "1000,5000")
    rows = asyncio.run(_measure([int(size) for size in named.split(",")]))
    last = rows[-1]
    return Result(
        name="scale", figure=last["restart s"], unit=f"s until {last['replicas']} are observed",
        reference=None, ratio=None,
        goal="1,000: 150 MiB, 10 s; 5,000: 300 MiB, 60 s; a restart writes nothing",
        holds=all(_holds(row) for row in rows),
        rows=rows,
    )  # fmt: skip


def _holds(row: dict[str, Any]) -> bool:
    memory, seconds = GOALS.get(row["replicas"], (float("inf"), float("inf")))
    fits = row["MiB"] <= memory and row["restart s"] <= seconds
    return fits and not row["writes at restart"]


async def _measure(sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    with api_server() as (url, token, kubeconfig), tempfile.TemporaryDirectory() as folder:
        async with session(token, kubeconfig) as http:
            api = Api(http, url)
            await prepare(api)
            states: dict[str, Any] = {}
            for size in sizes:
                begun = time.monotonic()
                states |= await fill(api, range(len(states), size))
                print(f"{size} replicas are there ({time.monotonic() - begun:.0f} s)", flush=True)
                rows.append(await _row(api, kubeconfig, Path(folder), states))
                print(json.dumps(rows[-1]), flush=True)
    return rows


async def _row(api: Api, kubeconfig: Path, folder: Path, states: dict[str, Any]) -> dict[str, Any]:
    count, port = len(states), free_port()
    (folder / "states.json").write_text(json.dumps(states))
    async with _pods(port, folder / "states.json") as pods, _operator(kubeconfig, port) as operator:
        await _line(pods, b"held", DEADLINE_S)
        await operator.observed(count)
        seconds, cpu = time.monotonic() - operator.begun, operator.cpu_s()
        requests = await operator.requests()
        await asyncio.sleep(2)
        pause = await _operation(api, operator, paused=True)
        resume = await _operation(api, operator, paused=False)
        before, cpu_before = await operator.requests(), operator.cpu_s()
        await asyncio.sleep(STEADY_S)
        steady = (await operator.requests()) - before
        steady_cpu = (operator.cpu_s() - cpu_before) / STEADY_S
        memory = operator.peak_mib()
    return {
        "replicas": count,
        "MiB": memory,
        "restart s": seconds,
        "restart CPU s": cpu,
        "reads at restart": sum(n for what, n in requests.items() if _reads(what)),
        "writes at restart": sum(n for what, n in requests.items() if not _reads(what)),
        "pause": _words(pause),
        "resume": _words(resume),
        f"steady {STEADY_S:.0f} s": _words(steady) or "0",
        "steady CPU %": 100 * steady_cpu,
    }


def _reads(what: str) -> bool:
    return what.startswith(("GET", "LIST")) or "leases" in what


def _words(requests: "Counter[str]") -> str:
    return ", ".join(
        f"{n:.0f} {what}" for what, n in sorted(requests.items()) if n and "leases" not in what
    )


async def _operation(api: Api, operator: "Operator", *, paused: bool) -> "Counter[str]":
    """One replica is patched, until its status says so."""
    before = await operator.requests()
    name, reason = "r-00007", "Paused" if paused else "Serving"
    await api.send(
        "PATCH", path(REPLICAS, name), {"spec": {"paused": paused}}, "application/merge-patch+json"
    )
    deadline = time.monotonic() + 30
    while True:
        body = await api.send("GET", path(REPLICAS, name), {})
        (ready,) = [c for c in body["status"]["conditions"] if c["type"] == "Ready"]
        if (ready["reason"], ready["observedGeneration"]) == (
            reason,
            body["metadata"]["generation"],
        ):
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"{name} is not {reason} within 30 s: {ready}")
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)
    return (await operator.requests()) - before


@dataclass
class Operator:
    """The operator's process, asked by its metrics."""

    process: psutil.Process
    port: int
    begun: float
    http: aiohttp.ClientSession

    async def samples(self) -> list[Any]:
        """All that it counts; nothing while it does not answer."""
        try:
            async with self.http.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
                text = await answer.text()
        except aiohttp.ClientError:
            return []
        return [s for family in text_string_to_metric_families(text) for s in family.samples]

    async def observed(self, count: int) -> None:
        """Until each replica had its pass and each pod has answered and holds a poll."""
        deadline = self.begun + DEADLINE_S
        while True:
            found = Counter[str]()
            for sample in await self.samples():
                if sample.labels.get("outcome") in (None, "ok", "200"):
                    found[sample.name + sample.labels.get("verb", "")] += sample.value
            reached = [
                found["rollout_operator_pod_polls"],
                found["rollout_operator_pod_requests_totalGET"],
                found["rollout_operator_pod_requests_totalPUT"],
            ]
            if min(reached) >= count and not found["rollout_operator_queue_depth"]:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"not all observed in {DEADLINE_S:.0f} s: {found}")
            await asyncio.sleep(0.2)

    async def requests(self) -> "Counter[str]":
        """Requests to the API server so far, by verb and resource."""
        found = Counter[str]()
        for sample in await self.samples():
            if sample.name == "rollout_operator_api_requests_total":
                found[f"{sample.labels['verb']} {sample.labels['resource']}"] += sample.value
        return found

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def peak_mib(self) -> float:
        """The most that it ever had resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / 1024


@asynccontextmanager
async def _operator(kubeconfig: Path, admin_port: int) -> AsyncIterator[Operator]:
    port = free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "KUBECONFIG": str(kubeconfig),
        "POD_NAMESPACE": NAMESPACE,
        "ROLLOUT_OPERATOR_PROBE_ADDRESS": "127.0.0.1",
        "ROLLOUT_OPERATOR_PROBE_PORT": "0",
        "ROLLOUT_OPERATOR_METRICS_PORT": str(port),
        "ROLLOUT_OPERATOR_ADMIN_PORT": str(admin_port),
        "ROLLOUT_OPERATOR_DEFAULT_IMAGE": IMAGE,
        "ROLLOUT_OPERATOR_IDENTITY": "scale",
        "ROLLOUT_OPERATOR_LOG_LEVEL": "warning",
    }
    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollout_operator"), env=environment
    )
    try:
        async with aiohttp.ClientSession() as http:
            yield Operator(psutil.Process(process.pid), port, begun, http)
    finally:
        # as a node does that loses power
        process.send_signal(signal.SIGKILL)
        await process.wait()


@asynccontextmanager
async def _pods(port: int, states: Path) -> AsyncIterator[asyncio.StreamReader]:
    """Yields what they print."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.scale_pods", str(port), str(states),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        await _line(process.stdout, b"ready", 120)
        yield process.stdout
    finally:
        process.kill()
        await process.wait()


async def _line(printed: asyncio.StreamReader, wanted: bytes, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            line = await printed.readline()
    except TimeoutError:
        raise SystemExit(
            f"the fake pods are not {wanted.decode()} within {seconds:.0f} s"
        ) from None
    if line.strip() != wanted:
        raise SystemExit(f"the fake pods ended, or said {line!r} instead of {wanted!r}")

"""Two operators and one Lease: by the API server's own log one works at a time."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.support.fake_apiserver import FakeApiServer, Fault, Request
from tests.support.operator_kit import Bench
from tests.support.operator_process import Process

LEASE_S = 2


@asynccontextmanager
async def two(**settings: object) -> AsyncIterator[tuple[Bench, Bench]]:
    """Two operators behind doors "a" and "b"; "a" holds the Lease, and its replica serves."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeApiServer().running())
        benches = [Bench(server, stack) for _ in range(2)]
        for bench, door in zip(benches, "ab", strict=True):
            bench.url = await server.open_door(door)
            bench.port, bench.admins = benches[0].port, benches[0].admins
            stack.push_async_callback(bench.stop)
            given = {"leader_election": True, "lease_seconds": LEASE_S, "identity": door}
            await bench.start(**given | settings)
            if door == "a":
                await bench.until(lambda: server.get("leases", "rollout-operator"))
        await benches[0].serving()
        yield benches[0], benches[1]


def doors_of_writes(server: FakeApiServer) -> list[str]:
    """Who wrote, in order, without repetitions; a write without the Lease is an error."""
    holder, found = "", [""]
    for request in server.accepted:
        if request.resource == "leases":
            holder = request.body["spec"]["holderIdentity"] or ""
            continue
        assert request.door == holder, f"{request} came from {request.door!r}, {holder!r} holds"
        if found[-1] != request.door:
            found.append(request.door)
    return found[1:]


def quiet_workers(bench: Bench) -> bool:
    metrics = bench.runtime.metrics
    values = [g._value.get() for g in (metrics.replicas, metrics.polls, metrics.leader)]
    return values == [0, 0, 0]


async def test_one_works_and_the_other_waits_and_both_are_well():
    async with two() as (a, b):
        a.patch(paused=True)
        await a.ready("Paused")
        await asyncio.sleep(2 * LEASE_S)
        assert doors_of_writes(a.server) == ["a"]
        assert quiet_workers(b)
        assert [bench.runtime._unready() for bench in (a, b)] == ["", ""]
        lease = a.server.get("leases", "rollout-operator")
        assert lease["spec"]["holderIdentity"] == "a"
        assert lease["spec"]["leaseTransitions"] == 0


async def test_a_holder_that_is_cut_off_has_stopped_before_the_other_begins():
    async with two() as (a, b):
        server, admin = a.server, a.admins[0]
        puts = admin.puts
        server.cut = {"a"}
        begun = time.monotonic()
        while not quiet_workers(a):
            assert server.get("leases", "rollout-operator")["spec"]["holderIdentity"] == "a"
            assert time.monotonic() - begun < LEASE_S
            await asyncio.sleep(0.01)
        assert admin.puts == puts
        a.patch(paused=True)
        await b.ready("Paused")
        # its watches were warm: what was asked meanwhile is there as soon as the Lease is
        assert time.monotonic() - begun < 2 * LEASE_S + 1
        assert "no Lease" in a.runtime._unready()
        server.cut = set()
        await a.until(lambda: a.runtime._unready() == "")
        a.patch(paused=False)
        await b.ready("Serving")
        await b.quiet(0.1)
        assert doors_of_writes(server) == ["a", "b"]
        assert admin.documents[-1].paused is False


async def test_one_that_is_cut_off_in_the_middle_of_its_writes_ends_them():
    async with two() as (a, b):
        server = a.server

        def cut(request: Request) -> bool:
            # the plan is made, its first write is under way
            if str(request) == "POST pods?dryRun":
                server.cut = {"a"}
            return False

        server.faults.append(Fault(cut, 500))
        a.patch(model="other")
        await b.until(lambda: "DELETE pods/qwen-0" in server.writes(), "the other to go on")
        server.cut = set()
        server.remove("pods", "qwen-0")
        pod = await b.until(lambda: server.get("pods", "qwen-0"), "the new pod")
        assert "other" in pod["spec"]["containers"][0]["args"]
        await b.quiet()
        assert doors_of_writes(server) == ["a", "b"]
        assert server.writes().count("DELETE pods/qwen-0") == 1
        assert server.writes().count("POST pods") == 2


async def test_an_api_server_that_was_away_is_worked_with_again():
    async with two() as (a, _):
        a.server.cut = {"a", "b"}
        await a.until(lambda: a.runtime.metrics.leader._value.get() == 0)
        await asyncio.sleep(LEASE_S)
        a.patch(paused=True)
        a.server.cut = set()
        await a.ready("Paused")
        assert doors_of_writes(a.server) in (["a"], ["a", "b"])


async def test_without_the_right_to_the_lease_it_says_so_and_does_nothing():
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeApiServer().running())
        bench = Bench(server, stack)
        server.faults.append(
            Fault(lambda r: r.resource == "leases", 403, count=10**6, message="leases is forbidden")
        )
        await bench.start(leader_election=True)
        stack.push_async_callback(bench.stop)
        bench.apply()
        await bench.until(lambda: "leases is forbidden" in bench.runtime._unready())
        await asyncio.sleep(0.5)
        assert server.writes() == []


@asynccontextmanager
async def two_processes(folder: Path, **settings: str) -> AsyncIterator[dict[str, Process]]:
    """The same, each as a process; which one works is chance."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeApiServer().running())
        bench = Bench(server, stack)
        processes = {}
        for door in "ab":
            (folder / door).mkdir()
            one = Process(
                bench, folder / door, url=await server.open_door(door), identity=door, **settings
            )
            processes[door] = one
            stack.push_async_callback(one.end, signal.SIGKILL)
            await one.start()
        for one in processes.values():
            await one.ready()
        await bench.serving()
        yield processes


async def test_one_that_stops_hands_over_at_once_and_without_a_write(tmp_path: Path):
    async with two_processes(tmp_path, lease_seconds="60") as processes:
        bench = processes["a"].bench
        server = bench.server
        (first,) = doors_of_writes(server)
        second = processes["b" if first == "a" else "a"]
        start, documents = len(server.requests), len(bench.admins[0].documents)
        await processes[first].end(signal.SIGTERM)
        begun = time.monotonic()
        await bench.until(lambda: "rollout_operator_pod_polls 1.0" in second.get("metrics"))
        # a tenth of what it would take without
        assert time.monotonic() - begun < 6
        await bench.quiet()
        assert server.writes(start) == []
        assert len(bench.admins[0].documents) == documents
        bench.patch(paused=True)
        await bench.ready("Paused")
        assert doors_of_writes(server) == [first, second.identity]
        assert server.get("leases", "rollout-operator")["spec"]["leaseTransitions"] == 1


async def test_after_a_kill_the_other_works_within_twenty_seconds(tmp_path: Path):
    async with two_processes(tmp_path) as processes:
        bench = processes["a"].bench
        (first,) = doors_of_writes(bench.server)
        second = processes["b" if first == "a" else "a"]
        begun = time.monotonic()
        await processes[first].end(signal.SIGKILL)
        bench.patch(paused=True)
        await bench.until(lambda: bench.condition("Ready")[1] == "Paused", timeout=30)
        assert time.monotonic() - begun <= 20
        # a container of the same pod need not wait for its own Lease to run out
        await second.end(signal.SIGKILL)
        await second.start()
        await second.ready()
        begun = time.monotonic()
        bench.patch(paused=False)
        await bench.ready("Serving")
        assert time.monotonic() - begun <= 5
        assert doors_of_writes(bench.server) == [first, second.identity]

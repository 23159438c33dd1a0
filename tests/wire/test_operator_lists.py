"""What a restart costs, how lists heal, when replicas are looked at again, and how operators share
replicas by labels and namespaces.
"""

import asyncio
from contextlib import AsyncExitStack

import pytest

from rollout_operator import workers
from rollout_operator.reconcile import Next
from tests.support.fake_apiserver import FakeApiServer, Fault
from tests.support.operator_kit import Bench, bench

NAMES = ("qwen", "llama", "phi")


async def test_a_restart_costs_lists_and_one_secret_a_replica():
    async with bench() as b:
        for name in NAMES:
            b.apply(name)
            await b.run_pod(name)
            await b.until(lambda name=name: b.condition("Ready", name) == ("True", "Serving"))
        await b.quiet()
        await b.stop()
        b.server.page = 2
        start, puts = len(b.server.requests), [admin.puts for admin in b.admins]
        await b.start()
        await b.until(lambda: b.runtime.metrics.polls._value.get() == len(NAMES))
        await b.quiet()
        asked = [str(r) for r in b.server.requests[start:]]
        single = [r for r in asked if "/" in r]
        assert sorted(single) == sorted(f"GET secrets/{name}-admin" for name in NAMES)
        # ours in pages of two, and Kopf's own
        lists = {r: asked.count(r) for r in asked if "/" not in r}
        assert lists == {"GET rolloutreplicas": 4, "GET pods": 4, "GET services": 6}
        assert [admin.puts for admin in b.admins] == [n + 1 for n in puts]


async def test_what_is_gone_without_an_event_is_found_by_the_next_list():
    async with bench(resync_seconds=1) as b:
        await b.serving()
        b.server.muted = {"rolloutreplicas", "pods", "services", "secrets"}
        b.server.remove("services", "qwen")
        await b.until(lambda: b.server.get("services", "qwen"), "the Service")
        b.server.remove("rolloutreplicas", "qwen")
        b.server.remove("pods", "qwen-0")
        await b.until(lambda: b.runtime.metrics.replicas._value.get() == 0, "its worker to end")
        # the worker is no longer counted while it still waits for its poll to end
        await b.until(lambda: b.runtime.metrics.polls._value.get() == 0, "its poll to end")


async def test_what_is_new_without_an_event_is_found_by_the_next_list():
    async with bench(resync_seconds=1) as b:
        b.server.muted = {"rolloutreplicas"}
        b.apply()
        await b.run_pod()
        await b.ready("Serving")


async def test_a_list_that_fails_is_tried_again_and_nothing_works_before():
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeApiServer().running())
        b = Bench(server, stack)
        b.apply()
        fault = Fault(lambda r: str(r) == "GET pods" and "limit" in r.query, 403, count=10**6)
        server.faults.append(fault)
        await b.start()
        stack.push_async_callback(b.stop)
        await b.until(lambda: "made to fail" in b.runtime._unready())
        await asyncio.sleep(0.5)
        assert server.writes() == []
        fault.count = 0
        await b.run_pod()
        await b.ready("Serving")


class Chance:
    """Never the same twice, and the same in each run."""

    def __init__(self) -> None:
        self.drawn = 0

    def uniform(self, low: float, high: float) -> float:
        self.drawn += 1
        return low + (high - low) * (self.drawn * 0.6180339887 % 1)


async def test_replicas_that_began_together_are_not_looked_at_again_together(
    monkeypatch: pytest.MonkeyPatch,
):
    delays: dict[int, float] = {}

    async def wait(worker: workers._Worker, following: Next) -> None:
        delays[id(worker)] = following.delay
        await waiting(worker, following)

    waiting = workers._wait
    monkeypatch.setattr(workers, "_wait", wait)
    monkeypatch.setattr("rollout_operator.reconcile.random", Chance())
    async with bench(resync_seconds=100) as b:
        for name in NAMES:
            b.apply(name)
            await b.run_pod(name)
            await b.until(lambda name=name: b.condition("Ready", name) == ("True", "Serving"))
        await b.quiet()
    assert len(delays) == len(NAMES)
    assert all(90 <= delay <= 110 for delay in delays.values())
    assert len({round(delay, 3) for delay in delays.values()}) == len(NAMES)


async def test_operators_share_by_namespace():
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeApiServer("ns").running())
        mine, other = [Bench(server, stack) for _ in range(2)]
        for one, door, namespaces in ((mine, "mine", "ns"), (other, "other", "else,where")):
            one.url = await server.open_door(door)
            stack.push_async_callback(one.stop)
            await one.start(watch_namespaces=namespaces)
        await mine.serving()
        await other.until(lambda: not other.runtime._unready(), "the other to have listed all")
        asked = {(r.door, r.namespace) for r in server.requests}
        assert asked == {("mine", "ns"), ("other", "else"), ("other", "where")}
        assert {r.door for r in server.accepted} == {"mine"}
        assert [one.runtime.metrics.replicas._value.get() for one in (mine, other)] == [1, 0]


@pytest.mark.parametrize("selectors", [("shard=a", "shard=b"), ("shard=a", "shard!=a")])
async def test_two_operators_share_by_label(selectors: tuple[str, str]):
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeApiServer().running())
        both = [Bench(server, stack) for _ in range(2)]
        for one, selector, door in zip(both, selectors, "ab", strict=True):
            one.url = await server.open_door(door)
            one.port, one.admins = both[0].port, both[0].admins
            stack.push_async_callback(one.stop)
            await one.start(replica_selector=selector)
        b = both[0]
        for name, shard in (("qwen", "a"), ("llama", "b")):
            body = {"metadata": {"name": name, "labels": {"shard": shard}}, "spec": {"model": "m"}}
            server.put("rolloutreplicas", body)
            await b.run_pod(name)
            await b.until(lambda name=name: b.condition("Ready", name) == ("True", "Serving"))
        await b.quiet()

        def writers(name: str, since: int = 0) -> set[str]:
            made = server.requests[since:]
            return {r.door for r in made if r.write and name in str(r) and r.resource != "events"}

        assert (writers("qwen"), writers("llama")) == ({"a"}, {"b"})
        assert [one.runtime.metrics.replicas._value.get() for one in both] == [1, 1]
        # another label, another operator; and back again
        for shard, owner, other in (("b", 1, 0), ("a", 0, 1)):
            server.change("rolloutreplicas", "qwen", {"metadata": {"labels": {"shard": shard}}})
            await b.until(
                lambda owner=owner, other=other: (
                    both[owner].runtime.metrics.polls._value.get() == 1 + owner
                    and both[other].runtime.metrics.polls._value.get() == other
                ),
                f"shard {shard}",
            )
            start = len(server.requests)
            server.change("rolloutreplicas", "qwen", {"spec": {"paused": shard == "b"}})
            reason = "Paused" if shard == "b" else "Serving"
            await b.until(lambda reason=reason: b.condition("Ready", "qwen")[1] == reason)
            await b.quiet()
            assert writers("qwen", start) == {"ab"[owner]}

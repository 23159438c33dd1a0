"""Fair turns for all replicas, label selectors, and caches that late lists do not spoil."""

import asyncio
import copy
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from rollout_operator.api.selector import Selector
from rollout_operator.apply.cache import Cache, Key, slim_pod
from rollout_operator.apply.errors import KubeError
from rollout_operator.hub import Hub
from rollout_operator.memory import Memory
from rollout_operator.metrics import Metrics
from rollout_operator.observe import Caches
from rollout_operator.plan.observed import pod_seen
from rollout_operator.reconcile import Next
from rollout_operator.relist import Relist
from rollout_operator.workers import FAST_LANE, SLOW_LANE, Workers
from tests.support.virtual_time import VirtualLoop, clock_of


class Passes:
    """Broken replicas hang for a while and fail; the others are done at once."""

    def __init__(self, broken: Callable[[Key], bool]) -> None:
        self.broken = broken
        self.running = self.most = 0
        self.failed = 0
        self.order: list[Key] = []
        self.done: dict[Key, float] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(
        self, key: Key, memory: Memory, *, fresh: bool, wake: Callable[[], None]
    ) -> Next | None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.order.append(key)
        try:
            await self.gate.wait()
            if self.broken(key):
                await asyncio.sleep(0.5)
                self.failed += 1
                raise KubeError(0, "Timeout", "no answer")
        finally:
            self.running -= 1
        self.done[key] = time.monotonic()
        return Next(delay=60)

    async def report(self, key: Key, error: Exception) -> None:
        raise AssertionError(f"{key}: {error!r}")


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.005)


async def test_broken_replicas_do_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_operator.workers._BACKOFF_S", (0.0,))
    passes = Passes(lambda key: key[1].startswith("broken"))
    metrics = Metrics()
    workers = Workers(passes, report=passes.report, metrics=metrics)
    workers.open()
    count = 4 * FAST_LANE
    for n in range(count):
        workers.wake(("ns", f"broken-{n}"))
    # each has failed once, and from then on they fail without a pause
    await until(lambda: passes.failed >= count)
    assert metrics.queued._value.get() >= count - SLOW_LANE - FAST_LANE
    for _ in range(5):
        asked = time.monotonic()
        workers.wake(("ns", "well"))
        await until(lambda asked=asked: passes.done.get(("ns", "well"), 0) >= asked)
        assert time.monotonic() - asked < 0.25
    await workers.stop()


async def test_turns_are_taken_in_the_order_of_asking_and_so_many_at_once():
    passes = Passes(lambda _: False)
    passes.gate.clear()
    metrics = Metrics()
    workers = Workers(passes, report=passes.report, metrics=metrics)
    workers.open()
    keys = [("ns", f"r-{n}") for n in range(5 * FAST_LANE)]
    for key in keys:
        workers.wake(key)
    await until(lambda: passes.running == FAST_LANE)
    await asyncio.sleep(0.02)
    assert metrics.queued._value.get() == 4 * FAST_LANE
    # what waits for its turn is not late
    assert workers.overdue() is None
    # and what comes meanwhile makes no pass more
    for key in keys[FAST_LANE:]:
        workers.wake(key)
    passes.gate.set()
    await until(lambda: len(passes.done) == len(keys))
    await asyncio.sleep(0.02)
    assert passes.order == keys
    assert passes.most == FAST_LANE
    assert metrics.queued._value.get() == 0
    await workers.stop()


@pytest.mark.parametrize(
    ("text", "labels", "matches"),
    [
        ("", {}, True),
        ("", {"a": "b"}, True),
        ("shard=a", {"shard": "a"}, True),
        ("shard==a", {"shard": "a"}, True),
        ("shard=a", {"shard": "b"}, False),
        ("shard=a", {}, False),
        ("shard!=a", {}, True),
        ("shard!=a", {"shard": "a"}, False),
        ("shard", {"shard": ""}, True),
        ("shard", {}, False),
        ("!shard", {}, True),
        ("!shard", {"shard": "x"}, False),
        ("example.com/shard=a, tier!=test", {"example.com/shard": "a"}, True),
        ("example.com/shard=a, tier!=test", {"example.com/shard": "a", "tier": "test"}, False),
        ("shard=", {"shard": ""}, True),
    ],
)
def test_a_selector_means_what_kubernetes_means(text: str, labels: dict[str, str], matches: bool):
    assert Selector.parse(text).matches(labels) is matches


@pytest.mark.parametrize("text", ["shard in (a,b)", "a=b,,c=d", "=a", "a = b = c", "!", "a b"])
def test_a_selector_that_is_not_by_equality_is_refused_with_the_remedy(text: str):
    with pytest.raises(ValueError, match="write key=value"):
        Selector.parse(text)


def thing(version: int, uid: str = "u") -> dict:
    meta = {"namespace": "ns", "name": "x", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": meta}


def test_a_late_list_does_not_bring_back_what_a_watch_saw_go():
    cache = Cache()
    assert cache.put(thing(5))
    assert cache.drop(("ns", "x"), last=thing(9))
    assert not cache.put(thing(5))
    assert not cache.put(thing(8))
    assert cache.get(("ns", "x")) is None
    # one of the same name is another; and one that only left our selector may come back
    assert cache.put(thing(7, uid="v"))
    assert cache.drop(("ns", "x"))
    assert cache.put(thing(12))


def test_a_pod_is_kept_without_what_nobody_reads():
    pod = {
        "metadata": {
            "generateName": "x",
            "annotations": {"rollout.dev/desired": "{}", "rollout.dev/pod-hash": "h"},
        },
        "spec": {"nodeName": "n", "containers": [{}], "initContainers": [{}], "volumes": [{}]},
        "status": {
            "phase": "Running",
            "qosClass": "Burstable",
            "containerStatuses": [{"name": "engine", "imageID": "sha256:1", "restartCount": 2}],
        },
    }
    slim_pod(pod)
    assert pod == {
        "metadata": {"annotations": {"rollout.dev/pod-hash": "h"}},
        "spec": {"nodeName": "n"},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "engine", "restartCount": 2}],
        },
    }
    empty: dict = {"metadata": {}}
    slim_pod(empty)
    assert empty == {"metadata": {}}


class Noted(dict):
    """Notes what is read of it, by path."""

    def __init__(self, raw: dict, path: str, read: set[str]) -> None:
        super().__init__({key: noted(value, f"{path}.{key}", read) for key, value in raw.items()})
        self.path, self.read = path, read

    def __getitem__(self, key: str) -> Any:
        self.read.add(f"{self.path}.{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(f"{self.path}.{key}")
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(f"{self.path}.{key}")
        return super().__contains__(key)


def noted(value: Any, path: str, read: set[str]) -> Any:
    if isinstance(value, dict):
        return Noted(value, path, read)
    return [noted(item, path, read) for item in value] if isinstance(value, list) else value


def test_of_a_pod_all_that_a_plan_reads_is_kept():
    read: set[str] = set()
    container = {"restartCount": 1, "state": {"waiting": {"reason": "a"}}, "lastState": {}}
    condition = {"type": "PodScheduled", "status": "False", "reason": "r", "message": "m"}
    pod = {
        "metadata": {"name": "p", "uid": "u", "ownerReferences": [{"uid": "other"}]},
        "spec": {},
        "status": {
            "conditions": [condition, {**condition, "type": "DisruptionTarget", "status": "True"}],
            "containerStatuses": [{"name": "engine", **container}],
            "initContainerStatuses": [{"name": "weights", **container}],
        },
    }
    pod_seen(noted(pod, "", read), name="r", uid="of-the-replica")
    # each path that was read, as a pod that has it
    for path in read:
        *parts, last = path.removeprefix(".").split(".")
        whole: dict = {"metadata": {}}
        place = whole
        for part in parts:
            # what stands below a list is an item of it
            into = place.setdefault(part, [{}] if part.endswith("Statuses") else {})
            place = into[0] if isinstance(into, list) else into
        place[last] = {} if not place.get(last) else place[last]
        before = copy.deepcopy(whole)
        slim_pod(whole)
        assert whole == before, path


def test_operators_list_at_times_of_their_own(monkeypatch: pytest.MonkeyPatch):
    # chance, but the same one in each run
    monkeypatch.setattr("rollout_operator.relist.random", random.Random(7))
    loop = VirtualLoop()
    times: dict[str, list[float]] = {"a": [], "b": []}

    class Kube:
        def __init__(self, who: str) -> None:
            self.who = who

        async def pages(self, resource: str, namespace: str, *, selector: str = ""):
            if resource == "pods":
                times[self.who].append(loop.now)
            yield {"metadata": {"resourceVersion": "1"}, "items": []}

    async def main() -> None:
        both = []
        for who in times:
            passes = Passes(lambda _: False)
            caches = Caches(replicas=Cache(), pods=Cache(), services=Cache())
            workers = Workers(passes, report=passes.report, metrics=Metrics())
            both.append(
                Relist(
                    Kube(who),  # type: ignore[arg-type]  # only what it needs
                    caches,
                    Hub(caches, workers),
                    namespaces=("ns",),
                    selector=Selector.parse(""),
                    period_s=300,
                    wanted=lambda: True,
                )
            )
        for one in both:
            one.start()
        await asyncio.sleep(3000)
        for one in both:
            await one.stop()

    with clock_of(loop):
        loop.run_until_complete(main())
    loop.close()
    for found in times.values():
        gaps = [later - earlier for earlier, later in pairwise(found)]
        assert len(gaps) >= 9
        assert all(270 <= gap <= 331 for gap in gaps)
        assert len({round(gap, 3) for gap in gaps}) == len(gaps)
    assert times["a"][1:] != times["b"][1:]


@pytest.mark.parametrize("failures", [0, 2])
def test_who_takes_over_lists_after_that(failures: int):
    loop = VirtualLoop()
    began: list[float] = []

    class Kube:
        async def pages(self, resource: str, namespace: str, *, selector: str = ""):
            if resource == "rolloutreplicas":
                began.append(loop.now)
                await asyncio.sleep(1)
                if 1 <= len(began) - 1 <= failures:
                    raise KubeError(0, "Timeout", "no answer")
            yield {"metadata": {"resourceVersion": "1"}, "items": []}

    async def main() -> None:
        passes = Passes(lambda _: False)
        caches = Caches(replicas=Cache(), pods=Cache(), services=Cache())
        workers = Workers(passes, report=passes.report, metrics=Metrics())
        relist = Relist(
            Kube(),  # type: ignore[arg-type]  # only what it needs
            caches,
            Hub(caches, workers),
            namespaces=("ns",),
            selector=Selector.parse(""),
            period_s=300,
            wanted=lambda: True,
        )
        relist.start()
        await asyncio.sleep(0.5)
        await relist.renew()  # one is on, and may have passed what it is about
        assert loop.now >= began[1 + failures] + 1
        assert len(began) == 2 + failures
        await asyncio.sleep(100)
        assert len(began) == 2 + failures, "no more than it takes"
        await relist.stop()

    with clock_of(loop):
        loop.run_until_complete(main())
    loop.close()

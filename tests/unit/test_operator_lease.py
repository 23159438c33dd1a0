"""The Lease: what a candidate may do, and that no two ever work at once."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.leased import LeasedKube
from rollout_operator.elect import Elector
from rollout_operator.metrics import Metrics
from rollout_operator.plan.lease import LeaseSeen, Move, Timing, held, may_work, next_move, released
from tests.support.virtual_time import VirtualLoop

T = Timing(duration=12)
STAMP = "2027-01-01T00:00:00.000000Z"


def lease(holder: str | None = "other", **spec: Any) -> LeaseSeen:
    given = {"holderIdentity": holder, "leaseDurationSeconds": 12, "leaseTransitions": 3, **spec}
    return LeaseSeen.parse(
        {"metadata": {"resourceVersion": "7", "labels": {"a": "b"}}, "spec": given}
    )


@pytest.mark.parametrize(
    ("known", "exists", "unchanged_s", "move"),
    [
        (None, False, 0, Move.CREATE),
        (lease(None), True, 0, Move.TAKE),
        (lease(""), True, 0, Move.TAKE),
        (lease("me"), True, 0, Move.RENEW),
        (lease("me"), True, 100, Move.RENEW),
        (lease(), True, 11.9, Move.WAIT),
        (lease(), True, 12, Move.TAKE),
        # what counts is what its holder promised, not what we would
        (lease(leaseDurationSeconds=60), True, 30, Move.WAIT),
        # somebody deleted the Lease: its holder works on until it finds out
        (lease(), False, 11.9, Move.WAIT),
        (lease(), False, 12, Move.CREATE),
        (lease("me"), False, 0, Move.CREATE),
        (lease(None), False, 0, Move.CREATE),
        # one that says nothing was never held
        (LeaseSeen.parse({"metadata": {}}), True, 0, Move.TAKE),
    ],
)
def test_what_a_candidate_may_do(known, exists, unchanged_s, move):
    assert next_move(known, exists=exists, me="me", unchanged_s=unchanged_s) is move


def test_a_holder_ends_before_others_begin():
    for seconds in range(2, 601):
        timing = Timing(duration=seconds)
        assert 0 < timing.retry < timing.renew_every < timing.renew_deadline < timing.duration
        assert may_work(100.0, 100.0 + timing.renew_deadline - 0.001, timing)
        assert not may_work(100.0, 100.0 + timing.renew_deadline, timing)
    assert not may_work(None, 0.0, T)


def test_what_is_written():
    first = held(None, name="op", namespace="ns", me="me", stamp=STAMP, timing=T)
    assert first == {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "op", "namespace": "ns"},
        "spec": {
            "holderIdentity": "me",
            "leaseDurationSeconds": 12,
            "acquireTime": STAMP,
            "renewTime": STAMP,
            "leaseTransitions": 0,
        },
    }
    taken = held(lease(), name="op", namespace="ns", me="me", stamp=STAMP, timing=T)
    # the precondition, and what others have put there
    assert taken["metadata"]["resourceVersion"] == "7"
    assert taken["metadata"]["labels"] == {"a": "b"}
    assert taken["spec"]["leaseTransitions"] == 4
    mine = LeaseSeen.parse(taken)
    later = held(mine, name="op", namespace="ns", me="me", stamp="later", timing=T)["spec"]
    assert (later["acquireTime"], later["renewTime"], later["leaseTransitions"]) == (
        STAMP,
        "later",
        4,
    )
    free = released(mine, name="op", namespace="ns", stamp="later")
    assert next_move(LeaseSeen.parse(free), exists=True, me="x", unchanged_s=0) is Move.TAKE


class Site:
    """One Lease, and a way to it that loses, delays and repeats."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.dice = random.Random(seed)
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.trouble = 0.0
        """The share of requests that something happens to."""
        self.cut: set[str] = set()

    def kube(self, who: str) -> "Line":
        return Line(self, who)


class Line:
    """One candidate's ``Kube``."""

    def __init__(self, site: Site, who: str) -> None:
        self.site, self.who = site, who

    async def _travel(self, act: Callable[[], Any]) -> Any:
        site = self.site
        if self.who in site.cut or site.dice.random() < site.trouble:
            fate = site.dice.choice(("lost", "answer lost", "late", "refused"))
            if fate == "refused":
                raise KubeError(500, "Made", "to fail")
            if fate == "late":
                # it arrives although its sender has given up by then
                site.loop.call_later(site.dice.uniform(0, 30), _quietly, act)
            if fate == "answer lost":
                _quietly(act)
            await asyncio.sleep(3600)
        await asyncio.sleep(site.dice.uniform(0, 0.2))
        answer = act()
        await asyncio.sleep(site.dice.uniform(0, 0.2))
        return answer

    async def get(self, resource: str, namespace: str, name: str) -> Any:
        return await self._travel(lambda: self.site.lease)

    async def create(self, resource: str, namespace: str, body: Mapping[str, Any], **_: Any) -> Any:
        def act() -> Any:
            if self.site.lease is not None:
                raise KubeError(409, "AlreadyExists", "")
            return self._store(body)

        return await self._travel(act)

    async def replace(
        self, resource: str, namespace: str, name: str, body: Mapping[str, Any]
    ) -> Any:
        def act() -> Any:
            if self.site.lease is None:
                raise KubeError(404, "NotFound", "")
            now = self.site.lease["metadata"]["resourceVersion"]
            if body["metadata"]["resourceVersion"] != now:
                raise KubeError(409, "Conflict", "")
            return self._store(body)

        return await self._travel(act)

    def _store(self, body: Mapping[str, Any]) -> Any:
        self.site.version += 1
        meta = {**body["metadata"], "resourceVersion": str(self.site.version)}
        self.site.lease = {**body, "metadata": meta}
        return self.site.lease


def _quietly(act: Callable[[], Any]) -> None:
    with contextlib.suppress(KubeError):
        act()


class Candidate:
    """An elector, and whether its workers run."""

    def __init__(self, site: Site, who: str, *, slow_s: float = 0.0) -> None:
        self.who = who
        self.working = False
        self.slow_s = slow_s
        self.elector = Elector(
            site.kube(who),  # type: ignore[arg-type]  # only what an elector needs
            name="op", namespace="ns", me=who, timing=T,
            gained=self._gained, lost=self._lost, metrics=Metrics(), clock=site.loop.time,
        )  # fmt: skip

    def _gained(self) -> None:
        self.working = True

    async def _lost(self) -> None:
        await asyncio.sleep(self.slow_s)
        self.working = False


def in_virtual_time(main: Callable[[VirtualLoop], Awaitable[None]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main(loop))
    finally:
        loop.close()


@pytest.mark.parametrize("seed", range(150))
def test_no_two_work_at_once_whatever_happens_to_requests(seed: int):
    async def main(loop: VirtualLoop) -> None:
        site = Site(loop, seed)
        dice = site.dice
        # so long joining the workers may take: a third of the Lease
        candidates = [Candidate(site, f"op-{n}", slow_s=dice.uniform(0, 3)) for n in range(3)]

        def check() -> None:
            working = [c.who for c in candidates if c.working]
            assert len(working) < 2, f"{working} work at once (seed {seed})"

        loop.on_turn = check
        for candidate in candidates:
            candidate.elector.start()
        for _ in range(20):
            site.trouble = dice.choice((0.0, 0.2, 0.6))
            site.cut = {c.who for c in candidates if dice.random() < 0.3}
            if dice.random() < 0.2:
                one = dice.choice(candidates)
                await one.elector.stop()  # SIGTERM, and a new container
                candidates.remove(one)
                candidates.append(Candidate(site, dice.choice((one.who, f"op-{loop.now}"))))
                candidates[-1].elector.start()
            await asyncio.sleep(dice.uniform(0, 25))
        site.trouble, site.cut = 0.0, set()
        await asyncio.sleep(60)
        assert sum(c.working for c in candidates) == 1, f"nobody works (seed {seed})"
        for candidate in candidates:
            await candidate.elector.stop()

    in_virtual_time(main)


def test_the_next_one_works_within_twenty_seconds_of_a_death_and_at_once_after_a_release():
    async def main(loop: VirtualLoop) -> None:
        for way, limit in (("killed", 20.0), ("cut off", 20.0), ("stopped", 2.0)):
            site = Site(loop, 1)
            first, second = Candidate(site, "first"), Candidate(site, "second")
            first.elector.start()
            await asyncio.sleep(5)
            second.elector.start()
            await asyncio.sleep(31.7)
            assert (first.working, second.working) == (True, False)
            begun = loop.now
            if way == "killed":
                await first.elector._background.stop()
            elif way == "cut off":
                site.cut = {"first"}
            else:
                await first.elector.stop()
            while not second.working:
                await asyncio.sleep(0.05)
            assert loop.now - begun <= limit, way
            assert way == "killed" or not first.working
            await second.elector.stop()

    in_virtual_time(main)


def test_a_lease_that_is_taken_by_force_ends_the_work_at_the_next_renewal():
    async def main(loop: VirtualLoop) -> None:
        site = Site(loop, 1)
        one = Candidate(site, "one")
        one.elector.start()
        await asyncio.sleep(5)
        assert one.working
        site.kube("x")._store(held(None, name="op", namespace="ns", me="x", stamp=STAMP, timing=T))
        await asyncio.sleep(T.renew_every + T.retry + 1)
        assert not one.working
        await one.elector.stop()

    in_virtual_time(main)


def test_a_fault_in_the_elector_itself_ends_the_work_in_time(monkeypatch: pytest.MonkeyPatch):
    async def main(loop: VirtualLoop) -> None:
        site = Site(loop, 1)
        one = Candidate(site, "one")
        one.elector.start()
        await asyncio.sleep(5)
        monkeypatch.setattr("rollout_operator.elect.held", lambda *_, **__: 1 / 0)
        await asyncio.sleep(T.renew_deadline + 1)
        assert not one.working
        assert "ZeroDivisionError" in one.elector.trouble
        monkeypatch.undo()
        await asyncio.sleep(T.duration + 2)
        assert one.working
        assert one.elector.trouble == ""
        await one.elector.stop()

    in_virtual_time(main)


async def test_without_the_lease_nothing_is_written():
    class Never:
        async def get(self, *_: Any) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was let through")

    kube = LeasedKube(Never(), lambda: False)  # type: ignore[arg-type]
    assert await kube.get("pods", "ns", "x") is None
    for call in (
        kube.create("pods", "ns", {}),
        kube.apply("services", "ns", "x", {}),
        kube.merge("secrets", "ns", "x", {}),
        kube.replace("leases", "ns", "x", {}),
        kube.delete("pods", "ns", "x", uid="u"),
    ):
        with pytest.raises(KubeError, match="LeaseLost"):
            await call

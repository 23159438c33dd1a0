"""What may happen to two operators and their replicas; each says in words what it did."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.support.chaos_judge import Judge
from tests.support.chaos_kubelet import Kubelet
from tests.support.chaos_pods import Pod
from tests.support.chaos_site import Operator, Site
from tests.support.fake_apiserver import Json
from tests.support.virtual_time import VirtualLoop

DOORS = ("a", "b")
NAMES = ("qwen", "llama")
WIDE = "wide"
"""Spans two nodes."""
_SPEC = {"weights": {"source": {"path": "/w/{version}"}, "timeoutSeconds": 30}}
_WIDE = {
    "nodes": 2, "loadTimeoutSeconds": 100,
    "restartPolicy": {"backoffSeconds": 2, "backoffLimitSeconds": 8, "maxRestarts": 1000},
}  # fmt: skip


class Acts:
    """Does one thing a call."""

    def __init__(self, loop: VirtualLoop, seed: int, root: Path) -> None:
        self.site = Site(loop, seed)
        self.dice = self.site.dice
        self.server = self.site.server
        self.site.judge = self.judge = Judge(self.site)
        self.site.kubelet = self.kubelet = Kubelet(self.site, root)
        self.operators: dict[str, Operator] = {}
        self.owed: list[asyncio.Task[None]] = []

    def start(self, door: str) -> None:
        self.operators[door] = Operator(self.site, door)
        self.operators[door].start()

    # -- people

    def apply(self, name: str) -> str:
        spec = {"model": "m", **_SPEC, **(_WIDE if name == WIDE else {}), **self._spec()}
        body = {"metadata": {"name": name}, "spec": spec}
        self.judge.asked(self.server.put("rolloutreplicas", body))
        return f"{name} {body['spec']}"

    def _spec(self) -> Json:
        dice = self.dice
        version = dice.choice((None, "step-1", "step-2", "step-3"))
        spec: Json = {"paused": dice.random() < 0.3}
        return spec if version is None else {**spec, "weightVersion": version}

    def _replica(self) -> str:
        names = [r["metadata"]["name"] for r in self.server.peek("rolloutreplicas")]
        return self.dice.choice([n for n in names if n in (*NAMES, WIDE)] or [""])

    def _patch(self, name: str, spec: Json) -> str:
        raw = self.server.change("rolloutreplicas", name, {"spec": spec})
        self.judge.asked(raw)
        return f"{name} {spec} is generation {raw['metadata']['generation']}"

    def patch(self) -> str:
        name, dice = self._replica(), self.dice
        if not name:
            return "nobody"
        change = dice.choice(
            (
                {"paused": True}, {"paused": False}, {"weightVersion": "step-1"},
                {"weightVersion": "step-2", "paused": False}, {"weightVersion": "step-3"},
                {"weightVersion": None}, {"weightStep": dice.randrange(9)},
                {"interruption": {"mode": dice.choice(("Abort", "Keep", "Drain"))}},
                {"drainTimeoutSeconds": dice.choice((10, 20))}, {"model": dice.choice("mn")},
            )
        )  # fmt: skip
        if name == WIDE and dice.random() < 0.2:
            change = {"nodes": dice.choice((1, 2, 3))}
        return self._patch(name, change)

    async def revert(self) -> str:
        """A change that rolls the pod, and its contrary a moment later."""
        name = self._replica()
        if not name:
            return "nobody"
        before = self.server.get("rolloutreplicas", name)["spec"]["model"]  # type: ignore[index]
        said = self._patch(name, {"model": "n" if before == "m" else "m"})
        await asyncio.sleep(self.dice.choice((0.0, 0.03, 0.5)))
        if self.server.get("rolloutreplicas", name):
            said += " and " + self._patch(name, {"model": before})
        return said

    async def replace_replica(self) -> str:
        name = self._replica()
        if not name:
            return "nobody"
        self.judge.removed(self.server.get("rolloutreplicas", name) or {})
        self.server.remove("rolloutreplicas", name)
        await asyncio.sleep(self.dice.choice((0.0, 0.1, 3.0)))
        return self.apply(name)

    async def hang_node(self) -> str:
        """For a moment, or for so long that its pods are given up."""
        seconds = self.dice.choice((4.0, 30.0, 100.0))
        held = self.kubelet.hang(seconds)
        if self.dice.random() < 0.5:
            await asyncio.sleep(seconds)
        return f"{seconds:g} s with {held}"

    def delete_secret(self) -> str:
        name = f"{self._replica()}-admin"
        if self.server.get("secrets", name):
            self.server.remove("secrets", name)
        return name

    def change_service(self) -> str:
        name = self._replica()
        if self.server.get("services", name):
            self.server.change("services", name, {"spec": {"selector": {"rollout.dev/role": "x"}}})
        return name

    def put_foreign(self) -> None:
        body = self.server.put("pods", {"metadata": {"name": "alien-0"}, "spec": {}})
        self.judge.foreign.append(("pods", body))
        self.apply("alien")

    # -- operators

    def _some_operator(self) -> Operator | None:
        return self.dice.choice(list(self.operators.values())) if self.operators else None

    async def kill_operator(self) -> str:
        return await self._end_operator(killed=True)

    async def stop_operator(self) -> str:
        return await self._end_operator(killed=False)

    async def _end_operator(self, *, killed: bool) -> str:
        one = self._some_operator()
        if one is None:
            return "nobody"
        del self.operators[one.door]
        await one.stop(killed=killed)
        self._later(self.dice.choice((0.0, 2.0, 30.0)), lambda: self.start(one.door))
        return one.door

    def _later(self, delay: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(delay)
            act()

        self.owed.append(asyncio.create_task(wait(), name="owed"))

    def cut_operator(self) -> str:
        door, seconds = self.dice.choice(DOORS), self.dice.choice((1.0, 6.0, 25.0))
        self.site.cut_until[door] = self.site.loop.now + seconds
        return f"{door} for {seconds:g} s"

    def deny_lease(self) -> str:
        """Everything gets through but what would renew the Lease."""
        door, seconds = self.judge.holder or DOORS[0], self.dice.choice((6.0, 25.0))
        self.site.denied_until[door] = self.site.loop.now + seconds
        return f"{door} for {seconds:g} s"

    # -- the API server

    def outage(self) -> str:
        seconds = self.dice.choice((0.5, 5.0, 20.0))
        self.site.down_until = self.site.loop.now + seconds
        return f"{seconds:g} s"

    def api_trouble(self) -> str:
        self.site.api_trouble = self.dice.choice((0.0, 0.1, 0.4))
        return f"{self.site.api_trouble:g}"

    def watch_trouble(self) -> str:
        self.site.trouble_watches(self.dice.choice((0.0, 0.2, 0.7)))
        return f"{self.site.watch_trouble:g}"

    def silence(self) -> str:
        """Every event is lost, and nobody notices."""
        self.site.silence(seconds := self.dice.choice((2.0, 20.0)))
        return f"{seconds:g} s"

    # -- pods and nodes

    def _pod(self) -> Pod | None:
        pods = [p for p in self.kubelet.pods.values() if p.is_listed]
        return self.dice.choice(pods) if pods else None

    def pod_trouble(self) -> str:
        self.site.pod_trouble = self.dice.choice((0.0, 0.1, 0.4))
        return f"{self.site.pod_trouble:g}"

    def _with_pod(self, act: Callable[[Pod], Any]) -> str:
        pod = self._pod()
        if pod is None:
            return "nobody"
        act(pod)
        return pod.name

    def kill_container(self) -> str:
        return self._with_pod(lambda pod: pod.kill_container())

    def kill_agent(self) -> str:
        return self._with_pod(lambda pod: pod.lose_staged())

    def break_update(self) -> str:
        fault = self.dice.choice(
            ("stage fails", "send: midway", "load: a rank fails", "load: dies")
        )
        return f"{self._with_pod(lambda pod: pod.arm(fault))} {fault}"

    def evict(self) -> str:
        return self._with_pod(lambda pod: pod.evict())

    def delete_pod(self) -> str:
        return self._with_pod(lambda pod: self.server.end_pod(pod.name))

    def lose_node_of_pod(self) -> str:
        """Gone from the API server in one moment."""
        return self._with_pod(lambda pod: self.server.remove("pods", pod.name))

    def refuse_documents(self) -> str:
        return self._with_pod(
            lambda pod: pod.refuse_until(self.site.loop.now + self.dice.uniform(1, 20))
        )

    def deafen(self) -> str:
        return self._with_pod(
            lambda pod: setattr(pod, "deaf_until", self.site.loop.now + self.dice.uniform(1, 20))
        )

    def pause_kubelet(self) -> str:
        self.kubelet.paused_until = self.site.loop.now + (seconds := self.dice.uniform(1, 15))
        return f"{seconds:.1f} s"


def operations() -> list[Callable[[Acts], Awaitable[str] | str]]:
    """Return what may happen; what stands twice happens twice as often."""
    a = Acts
    return [
        a.patch, a.patch, a.patch, a.patch, a.revert, a.kill_operator, a.stop_operator, a.cut_operator, a.deny_lease, a.outage, a.api_trouble, a.watch_trouble, a.silence, a.pod_trouble, a.kill_container, a.kill_agent, a.break_update, a.evict, a.delete_pod, a.lose_node_of_pod, a.refuse_documents, a.deafen, a.pause_kubelet, a.hang_node, a.delete_secret, a.change_service, a.replace_replica,
    ]  # fmt: skip

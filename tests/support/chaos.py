"""One seed of chaos for two operators, in virtual time; ``python -m tests.support.chaos SEED`` tells
it all.

Whatever happens, ``chaos_judge`` looks at every write and the pods' oracle at every turn; when the
faults are over, every replica becomes what was asked for last, and then nothing is written.
"""

import asyncio
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import structlog

from rollout_pod.protocol import BASE_VERSION
from tests.support.chaos_acts import DOORS, NAMES, WIDE, Acts, operations
from tests.support.chaos_pods import ChaosPod
from tests.support.chaos_site import RESYNC_S
from tests.support.virtual_time import VirtualLoop, clock_of

OPERATIONS = 12
WIDE_SHARE = 0.3
SETTLE_S = 240.0
"""Within this, whatever was, all is as it was asked for."""
QUIET_S = 2.5 * RESYNC_S
"""So long nothing is written and all is right before a seed is over."""


class ChaosFailed(AssertionError):
    """A seed found something; the text says what, and how to see it again."""


class Chaos(Acts):
    """Two operators, one or two replicas, and the operations of one seed."""

    # -- the story

    async def run(self) -> None:
        kubelet = asyncio.create_task(self.kubelet.run(), name="kubelet")
        for name in NAMES[: self.dice.choice((1, 1, 2))]:
            self.apply(name)
        if self.dice.random() < WIDE_SHARE:
            self.apply(WIDE)
        if self.dice.random() < 0.2:
            self.put_foreign()
        for door in DOORS:
            self.start(door)
        await asyncio.sleep(self.dice.choice((0.0, 1.0, 6.0)))
        for _ in range(OPERATIONS):
            operation = self.dice.choice(operations())
            said = operation(self)
            if not isinstance(said, str):
                said = await said
            self.site.note(f"-- {operation.__name__}: {said}")
            self._look_at(kubelet)
            await asyncio.sleep(self.dice.choice((0.0, 0.05, 0.5, 2.0, 6.0)))
        await self._settle(kubelet)
        kubelet.cancel()
        await asyncio.gather(kubelet, return_exceptions=True)
        for operator in list(self.operators.values()):
            await operator.stop()
        await self.kubelet.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"

    async def _settle(self, kubelet: "asyncio.Task[None]") -> None:
        self.site.calm()
        self.kubelet.paused_until = self.kubelet.hangs_until = 0.0
        for pod in self.kubelet.pods.values():
            pod.calm()
        await asyncio.gather(*self.owed)
        self.site.note("-- calm")
        end, quiet_since, seen = self.site.loop.now + SETTLE_S, self.site.loop.now, 0
        while (wrong := self._wrong()) or self.site.loop.now - quiet_since < QUIET_S:
            writes = self.server.writes()
            assert self.site.loop.now < end, f"not settled: {wrong or writes[-5:]}"
            if wrong or len(writes) != seen:
                quiet_since, seen = self.site.loop.now, len(writes)
            self._look_at(kubelet)
            await asyncio.sleep(1.0)
        leaders = [door for door, one in self.operators.items() if one.core.may_work()]
        assert len(leaders) == 1, f"work: {leaders}"

    def _look_at(self, kubelet: "asyncio.Task[None]") -> None:
        if kubelet.done():
            kubelet.result()

    def _wrong(self) -> str:
        """What is not as it was asked for."""
        for raw in self.server.peek("rolloutreplicas"):
            meta, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
            conditions = {c["type"]: c for c in status.get("conditions") or ()}
            ready = conditions.get("Ready") or {}
            wanted = "Paused" if spec.get("paused") else "Serving"
            if meta["name"] == "alien":
                wanted = "ForeignObject"
            elif status.get("weightVersion") != spec.get("weightVersion", BASE_VERSION):
                return f"{meta['name']}: {status}"
            if (ready.get("reason"), ready.get("observedGeneration")) != (
                wanted, meta["generation"],
            ):  # fmt: skip
                return f"{meta['name']}: {ready}"
            if meta["name"] != "alien":
                pods = [p for p in self.kubelet.pods.values() if p.replica == meta["name"]]
                heads = [p for p in pods if isinstance(p, ChaosPod)]
                ranks = sorted(p.rank for p in pods if p.is_up and p.group == pods[0].group)
                if len(heads) != 1 or ranks != list(range(spec.get("nodes", 1))):
                    return f"{meta['name']}: {[p.name for p in pods]} run"
                (pod,) = heads
                if pod.evicted or pod.documents[-1].generation != meta["generation"]:
                    return f"{meta['name']}: its pod was not told generation {meta['generation']}"
                state = pod.supervisor.board.document()
                if (state.phase, state.weight_version) != (wanted, status["weightVersion"]):
                    return f"{meta['name']}: its pod is {state.phase} of {state.weight_version}"
        return ""


def run(seed: int, *, tell: bool = False) -> list[str]:
    """Run one seed; returns what happened.

    Raises:
        ChaosFailed: an invariant did not hold, or the end was not what was asked for.
    """
    random.seed(seed)  # of the jitter in the code itself
    root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="chaos-"))
    loop = VirtualLoop()
    errors: list[str] = []
    kept = structlog.get_config()
    structlog.configure(processors=[_Collect(errors)], wrapper_class=structlog.BoundLogger)
    chaos = Chaos(loop, seed, root)

    def look() -> None:
        chaos.kubelet.look()
        working = [one.door for one in chaos.operators.values() if one.core.may_work()]
        assert len(working) < 2, f"{working} work at once"
        assert not errors, errors[0]

    loop.on_turn = look
    try:
        with clock_of(loop):
            loop.run_until_complete(chaos.run())
    except Exception as error:
        end = "\n".join(chaos.site.log[-25:])
        shown = "".join(traceback.format_exception(error)) if tell else ""
        raise ChaosFailed(
            f"seed {seed}: {error}\n{end}\n{shown}\n"
            f"to see it again: python -m tests.support.chaos {seed}"
        ) from error
    finally:
        loop.on_turn = lambda: None
        structlog.configure(**kept)
        _drop(loop)
        shutil.rmtree(root)
    return chaos.site.log


class _Collect:
    """Tracebacks that the code itself logs are findings."""

    def __init__(self, errors: list[str]) -> None:
        self._errors = errors

    def __call__(self, logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        if method == "exception" or event.get("exc_info"):
            self._errors.append(f"{event} {traceback.format_exc()}")
        raise structlog.DropEvent


def _drop(loop: VirtualLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=7200))
    loop.close()


if __name__ == "__main__":
    for line in run(int(sys.argv[1]), tell=True):
        print(line)

"""A ready replica with its watcher and callers, as the demo's steps use it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from examples.demo.callers import CALLERS, Batch, Callers
from examples.demo.cluster import DemoError, Watch, admin_token, reach
from examples.demo.stage import Stage


@dataclass
class Play:
    """A ready replica, its callers and its watcher."""

    stage: Stage
    watch: Watch
    callers: Callers
    data_url: str
    batches: list[Batch] = field(default_factory=list)

    def batch(self, max_tokens: int) -> Batch:
        """A new batch that the closing check will see."""
        batch = self.callers.batch(max_tokens)
        self.batches.append(batch)
        return batch

    async def patch(self, **spec: object) -> tuple[float, float]:
        """``kubectl patch``: seconds since its process started, and when that was."""
        done = await self.stage.shell.patch(self.stage.name, spec)
        return done.ended - done.started, done.started

    async def all_in_flight(self) -> None:
        """Wait until the engine has a request of every caller."""
        for _ in range(300):
            if (await self.watch.now()).unfinished == CALLERS:
                return
            await asyncio.sleep(0.1)
        raise DemoError(f"the engine did not get {CALLERS} requests within 30 s")

    async def wait_for(self, *, reason: str | None = None, condition: str | None = None) -> None:
        """``kubectl wait`` for a condition, or for Ready's reason."""
        path = '{.status.conditions[?(@.type=="Ready")].reason}'
        what = f"jsonpath={path}={reason}" if reason else f"condition={condition}"
        await self.stage.shell.kubectl(
            "wait", f"--for={what}", f"rr/{self.stage.name}", "--timeout=60s", timeout_s=70
        )


@contextlib.asynccontextmanager
async def ready_replica(stage: Stage) -> AsyncIterator[Play]:
    """The applied replica within reach, with a watcher and callers."""
    config = json.loads((stage.checkpoints / "base" / "config.json").read_text())
    token = await admin_token(stage.shell, stage.name)
    async with reach(stage.shell, stage.name, external=stage.external) as urls:
        watch = Watch(urls.admin, token)
        callers = Callers(urls.data, vocabulary=config["vocab_size"])
        following = asyncio.create_task(watch.follow())
        try:
            yield Play(stage, watch, callers, urls.data)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await callers.aclose()
            await watch.aclose()

"""A pod's admin port: takes desired documents and becomes what they say, or fails as told."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from rollout_pod.protocol import (
    BASE_VERSION,
    TOKEN_HEADER,
    DesiredDocument,
    GateState,
    PodPhase,
    SleepSpec,
    SleepState,
    SleepTag,
    StateDocument,
    UpdatePhase,
    UpdateState,
    WeightsRef,
)


class FakePodAdmin:
    """One pod; ``documents`` are all that it accepted."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.ip = ""
        self.documents: list[DesiredDocument] = []
        self.puts = 0
        self.missing: set[str] = set()
        """Versions that cannot be fetched."""
        self.prefetched: asyncio.Event | None = None
        """Updates wait for it while the old version serves on."""
        self.hold: asyncio.Event | None = None
        """Updates wait for it after the gate closed."""
        self.bearers: set[str | None] = set()
        """Every Authorization that came; None: none."""
        self.fence = False
        self.refuse = False
        self.full = False
        """Whether its run folder has no space left."""
        self.state = StateDocument(
            revision=1,
            boot_id=uuid.uuid4().hex,
            phase=PodPhase.LOADING,
            weight_version=None,
            desired_version=None,
            owner=None,
            generation=None,
            gate=GateState.CLOSED,
            ready=False,
            unfinished=0,
        )
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self, ip: str, port: int) -> AsyncIterator["FakePodAdmin"]:
        app = web.Application()
        app.router.add_put("/admin/v1/desired", self._put)
        app.router.add_get("/admin/v1/state", self._get)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, ip, port).start()
        self.ip = ip
        try:
            yield self
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await runner.cleanup()

    async def become(self, **changes: object) -> None:
        """Change the state and tell whoever waits."""
        async with self._changed:
            data = self.state.model_dump() | changes | {"revision": self.state.revision + 1}
            self.state = StateDocument.model_validate(data)
            self._changed.notify_all()

    async def _put(self, request: web.Request) -> web.Response:
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        self.puts += 1
        document = DesiredDocument.model_validate_json(await request.read())
        if self.refuse:
            return _problem(422, "invalid_field", "made to refuse")
        if self.full:
            return _problem(507, "store_failed", "run folder /run: No space left on device")
        known = self.documents[-1] if self.documents else None
        lower = known is not None and document.generation < known.generation
        if self.fence or lower:
            return _problem(409, "fenced", "another owner or a later generation")
        if document != known:
            self.documents.append(document)
            await self.become(
                owner=document.owner,
                generation=document.generation,
                desired_version=document.weights.version if document.weights else BASE_VERSION,
            )
            task = asyncio.create_task(self._obey(document))
            self._tasks.add(task)
        return web.json_response(text=self.state.model_dump_json())

    async def _get(self, request: web.Request) -> web.Response:
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        after, timeout = request.query.get("after"), float(request.query["timeout"])
        async with self._changed:
            try:
                async with asyncio.timeout(timeout):
                    while after == f"{self.state.boot_id}:{self.state.revision}":
                        await self._changed.wait()
            except TimeoutError:
                pass
        return web.json_response(text=self.state.model_dump_json())

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        bearer = request.headers.get("Authorization")
        self.bearers.add(bearer)
        own = f"Bearer {request.headers.get(TOKEN_HEADER)}"
        if f"Bearer {self.token}" in (bearer, own):
            return None
        return _problem(401, "unauthorized", "wrong token")

    async def _obey(self, document: DesiredDocument) -> None:
        await self._resize(document.sleep)
        target = document.weights or WeightsRef(version=BASE_VERSION)
        if self.state.weight_version != target.version:
            update = UpdateState(target=target.version, phase=UpdatePhase.WAITING)
            if target.version in self.missing:
                message = f"{target.source.path if target.source else ''}: no such folder"
                await self.become(update=update.model_copy(update={"message": message}))
                return
            if self.prefetched is not None:
                fetching = update.model_copy(update={"phase": UpdatePhase.PREFETCHING})
                await self.become(update=fetching)
                await self.prefetched.wait()
            await self.become(
                phase=PodPhase.UPDATING,
                gate=GateState.CLOSED,
                update=update.model_copy(update={"phase": UpdatePhase.TRANSFERRING, "attempt": 1}),
            )
            if self.hold is not None:
                await self.hold.wait()
            if document is not self.documents[-1]:
                return
            await self.become(
                weight_version=target.version,
                weight_step=target.step,
                committed=target,
                update=update.model_copy(
                    update={"phase": UpdatePhase.COMMITTED, "attempt": 1, "bytes": 4096}
                ),
                phase=PodPhase.PAUSED if document.paused else PodPhase.SERVING,
                gate=GateState.CLOSED if document.paused else GateState.OPEN,
                ready=True,
            )
            return
        phase = PodPhase.PAUSED if document.paused else PodPhase.SERVING
        if document.sleep is not None:
            phase = PodPhase.SLEEPING
        if self.state.phase is not phase:
            gate = GateState.OPEN if phase is PodPhase.SERVING else GateState.CLOSED
            await self.become(phase=phase, gate=gate)

    async def _resize(self, sleep: SleepSpec | None) -> None:
        """As on CPU: nothing is released, and all else is as if it were."""
        tags = sleep.tags if sleep else ()
        if set(tags) == set(SleepTag) - set(self.state.resident):
            return
        slept = SleepState(level=sleep.level, tags=tags, released=False) if sleep else None
        await self.become(
            phase=PodPhase.SLEEPING, gate=GateState.CLOSED, sleep=slept,
            resident=tuple(tag for tag in SleepTag if tag not in tags),
        )  # fmt: skip


def _problem(status: int, code: str, detail: str) -> web.Response:
    body = {"title": code, "status": status, "code": code, "detail": detail}
    return web.json_response(body, status=status)

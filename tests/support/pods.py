"""A whole pod around the fakes, in this process."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_pod.generation import Generation
from rollout_pod.protocol import (
    DesiredDocument,
    GenerateRequest,
    GenerateResponse,
    PushOffer,
    PushStatus,
    StateDocument,
    WeightsRef,
    WeightsSource,
)
from rollout_pod.supervisor.store import Store
from rollout_pod.supervisor.supervisor import PodFailed, Supervisor
from tests.support.fakes import FakeAgent, FakeEngine, fake_token

WAIT_S = 10.0
PROMPT = [1, 2, 3]
LONG = 3000


def ref(version: str, *, path: str | None = None, step: int | None = None) -> WeightsRef:
    return WeightsRef(
        version=version, step=step, source=WeightsSource(path=path or f"/w/{version}")
    )


def pushed(version: str, *, step: int | None = None) -> WeightsRef:
    source = WeightsSource.model_validate({"push": {}})
    return WeightsRef(version=version, step=step, source=source)


def check_tokens(
    prompt: list[int], answer: GenerateResponse, before: list[int] | None = None
) -> None:
    """Every token was sampled by the version its span names, and by nothing else."""
    history = [*prompt, *(before or [])]
    assert len(answer.token_ids) == len(answer.log_probs)
    covered = 0
    for span in answer.weight_versions:
        assert span.start == covered
        for token in answer.token_ids[span.start : span.end]:
            assert token == fake_token(span.version, history), f"not of {span.version}"
            history.append(token)
        covered = span.end
    assert covered == len(answer.token_ids)


@dataclass
class Pod:
    engine: FakeEngine
    agent: FakeAgent
    supervisor: Supervisor
    generation: Generation
    task: asyncio.Task[None]
    _serial: "itertools.count[int]" = field(default_factory=itertools.count)
    _generation: int = 0

    @property
    def state(self) -> StateDocument:
        return self.supervisor.board.document()

    def want(self, weights: WeightsRef | None = None, **more: object) -> DesiredDocument:
        """Put a document with the next generation."""
        self._generation += 1
        document = DesiredDocument.model_validate(
            {"owner": "o", "generation": self._generation, "weights": weights, **more}
        )
        self.supervisor.put_desired(document)
        return document

    def offer(self, version: str, session: str = "p", **more: Any) -> PushStatus:
        """A trainer's offer; ``push`` of the agent says what becomes of it."""
        body = {
            "session": session, "boot_id": self.state.boot_id, "version": version, "bytes": 4096,
            "tensors": 3, "transport": "shared_memory", "mode": "bucketed", **more,
        }  # fmt: skip
        return self.supervisor.pushes.offer(PushOffer.model_validate(body))

    async def until(self, done: Callable[[StateDocument], bool]) -> StateDocument:
        """Follow the state; fails with the last one after ten seconds."""
        state = self.state
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not done(state):
            remaining = deadline - asyncio.get_running_loop().time()
            assert remaining > 0, f"still {state}"
            if self.task.done():
                self.task.result()
            state = await self.supervisor.board.wait_news(
                after=f"{state.boot_id}:{state.revision}", timeout_s=min(0.2, remaining)
            )
        return state

    async def serving(self, version: str) -> StateDocument:
        return await self.until(lambda s: s.phase == "Serving" and s.weight_version == version)

    async def ask(self, prompt: list[int], n: int, **more: object) -> GenerateResponse:
        """One generate call; its tokens are checked against its spans."""
        request = GenerateRequest.model_validate(
            {
                "request_id": f"r{next(self._serial)}",
                "prompt_token_ids": prompt,
                "sampling_params": {"max_tokens": n},
                **more,
            }
        )
        answer = await self.generation.generate(request)
        check_tokens(prompt, answer, request.generated_token_ids)
        return answer


async def start_long(pod: Pod, n: int = 4) -> list["asyncio.Task[GenerateResponse]"]:
    """Start rollouts that nobody waits out, and return when the engine has them all."""
    tasks = [asyncio.create_task(pod.ask([*PROMPT, i], LONG)) for i in range(n)]
    while pod.engine.running < n:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    return tasks


@asynccontextmanager
async def running_pod(
    folder: Path, *, engine: FakeEngine | None = None, agent: FakeAgent | None = None,
    first: DesiredDocument | None = None, drain_timeout_s: float = 5.0, **more: Any,
) -> AsyncIterator[Pod]:  # fmt: skip
    """A pod that runs; nothing of it is left behind."""
    engine, agent = engine or FakeEngine(), agent or FakeAgent()
    engine.agent = agent
    supervisor = Supervisor(
        engine,
        agent,
        Store(folder),
        default_desired=first,
        drain_timeout_s=drain_timeout_s,
        **more,
    )
    generation = Generation(engine, supervisor.gate, max_model_len=lambda: engine.max_model_len)
    task = asyncio.create_task(supervisor.run())
    pod = Pod(engine, agent, supervisor, generation, task)
    if supervisor.board.desired:
        pod._generation = supervisor.board.desired.generation
    try:
        yield pod
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, PodFailed):
            await task
        await engine.shutdown()
        assert supervisor.gate.unfinished == 0 or engine.dead

"""Cancel with many requests in flight: until the last partial reached its HTTP caller.

The reference, in the same run and on the same engine: the moment at which the last bare
``generate()`` of vLLM ends after ``pause_generation(mode="abort")``.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks.report import Result, percentile
from examples.tiny_models import make
from rollout_pod.engine.base import EngineRequest, EngineSettings
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.protocol import DesiredDocument
from rollout_pod.serve import _Server
from rollout_pod.server.data_app import make_data_app
from rollout_pod.supervisor.store import Store
from rollout_pod.supervisor.supervisor import Supervisor
from rollout_pod.weights.agent_client import AgentClient
from tests.support.process import free_port

MAX_TOKENS = 200
GOAL = 1.2


@dataclass
class Round:
    """One cancel."""

    seconds: float
    tokens: int
    lost: int


def run(quick: bool) -> Result:
    """Measure."""
    return asyncio.run(_measure(rounds=3 if quick else 10, sizes=(64,) if quick else (64, 256)))


async def _measure(*, rounds: int, sizes: tuple[int, ...]) -> Result:
    rows = []
    worst = 0.0
    with TemporaryDirectory(prefix="cancel-") as folder:
        make(Path(folder) / "model", seed=0)
        engine = VllmEngine(
            EngineSettings(
                model=str(Path(folder) / "model"), run_dir=Path(folder) / "run",
                args=("--dtype=float32", "--max-model-len=2048", "--max-num-seqs=256"),
            )
        )  # fmt: skip
        port = free_port()
        agent = AgentClient(Path(folder) / "run" / "agent.sock")
        supervisor = Supervisor(
            engine, agent, Store(Path(folder)),
            default_desired=DesiredDocument(owner="bench", generation=0),
        )  # fmt: skip
        server = _Server(make_data_app(supervisor), ("127.0.0.1", port))
        tasks = [asyncio.create_task(supervisor.run()), asyncio.create_task(server.serve())]
        try:
            while not (supervisor.is_ready and server.started):
                await asyncio.sleep(0.1)
            for size in sizes:
                bare = [await _bare(engine, supervisor, size) for _ in range(rounds)]
                ours = [await _http(supervisor, port, size) for _ in range(rounds)]
                mine = percentile([r.seconds for r in ours], 0.5)
                base = percentile([r.seconds for r in bare], 0.5)
                worst = max(worst, mine / base)
                rows.append(
                    {
                        "in flight": size, "ours ms": mine * 1e3, "bare ms": base * 1e3,
                        "ratio": mine / base, "tokens": sum(r.tokens for r in ours),
                        "lost": sum(r.lost for r in ours),
                    }
                )  # fmt: skip
        finally:
            supervisor.begin_drain()
            server.should_exit = True
            await asyncio.gather(*tasks)
            await agent.close()
            await engine.shutdown()
    lost = sum(int(row["lost"]) for row in rows)
    last = rows[-1]
    return Result(
        name="cancel", figure=float(last["ours ms"]), unit=f"ms with {last['in flight']} in flight",
        reference=float(last["bare ms"]), ratio=worst, goal=f"<= {GOAL} x bare, 0 tokens lost",
        holds=worst <= GOAL and lost == 0, rows=rows,
    )  # fmt: skip


async def _bare(engine: VllmEngine, supervisor: Supervisor, size: int) -> Round:
    """vLLM alone, in the same process."""
    params = engine.sampling_params({"temperature": 0, "ignore_eos": True}, max_tokens=MAX_TOKENS)
    runs = [
        asyncio.create_task(
            engine.generate(
                EngineRequest(f"bare{i}-{time.monotonic_ns()}", [3 + i % 900, 5, 7], params)
            )
        )
        for i in range(size)
    ]
    await asyncio.sleep(0.3)
    started = time.perf_counter()
    pause = asyncio.create_task(engine.pause())
    outputs = await asyncio.gather(*runs)
    seconds = time.perf_counter() - started
    await pause
    await engine.resume()
    return Round(seconds, sum(len(o.token_ids) for o in outputs), 0)


async def _http(supervisor: Supervisor, port: int, size: int) -> Round:
    """Through the data port: every caller has its partial."""
    limits = httpx.Limits(max_connections=size)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=60
    ) as client:

        async def call(i: int) -> tuple[float, int]:
            answer = await client.post(
                "/v1/rollout/generate",
                json={
                    "request_id": f"r{i}-{time.monotonic_ns()}",
                    "prompt_token_ids": [3 + i % 900, 5, 7],
                    "sampling_params": {
                        "temperature": 0, "ignore_eos": True, "max_tokens": MAX_TOKENS,
                    },
                },
            )  # fmt: skip
            answer.raise_for_status()
            return time.perf_counter(), len(answer.json()["token_ids"])

        calls = [asyncio.create_task(call(i)) for i in range(size)]
        await asyncio.sleep(0.3)
        before = supervisor.metrics.registry.get_sample_value("rollout_generated_tokens_total",
                                                              {"cut": "true"}) or 0.0  # fmt: skip
        document = supervisor.board.desired
        assert document
        started = time.perf_counter()
        supervisor.put_desired(
            document.model_copy(update={"paused": True, "generation": document.generation + 1})
        )
        answers = await asyncio.gather(*calls)
        seconds = max(at for at, _ in answers) - started
        while not supervisor.board.state.idle:
            await asyncio.sleep(0.005)
        returned = sum(n for _, n in answers)
        counted = supervisor.metrics.registry.get_sample_value("rollout_generated_tokens_total",
                                                               {"cut": "true"}) or 0.0  # fmt: skip
        supervisor.put_desired(
            document.model_copy(update={"paused": False, "generation": document.generation + 2})
        )
        while not supervisor.gate.is_open:
            await asyncio.sleep(0.005)
    lost = max(0, int(counted - before) - returned)
    return Round(seconds, returned, lost)

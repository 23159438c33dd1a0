"""A pod without Kubernetes, in this process: engine, supervisor and data port, to be measured."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from examples.tiny_models import make
from rollout_pod.engine.base import EngineSettings
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.front_ends.fleet import Fleet
from rollout_pod.front_ends.settings import FrontEndSettings
from rollout_pod.front_ends.shared_gate import SharedGate
from rollout_pod.gate import Gate
from rollout_pod.logs import configure_logs
from rollout_pod.protocol import DesiredDocument
from rollout_pod.serve import Server, bind
from rollout_pod.server.data_app import make_data_app
from rollout_pod.supervisor.store import Store
from rollout_pod.supervisor.supervisor import Supervisor
from rollout_pod.weights.agent_client import AgentClient
from tests.support.process import free_port

CPU_ARGS = (
    "--dtype=float32",
    "--enforce-eager",  # the pod's default on a CPU, and not that of vLLM's own server
    "--max-model-len=2048",
    "--max-num-seqs=256",
    # vLLM's own server would take most of the machine's memory
    f"--kv-cache-memory-bytes={256 << 20}",
)
GPU_ARGS = (
    "--dtype=bfloat16",
    "--max-model-len=2048",
    "--max-num-seqs=1024",
    # two of them start side by side: neither may size its cache by what is free just now
    "--gpu-memory-utilization=0.4",
    f"--kv-cache-memory-bytes={32 << 30}",
    "--load-format=dummy",
    # no compilation, which takes minutes; each step is a graph, those with a prompt too
    '--compilation-config={"mode": 0, "cudagraph_mode": "FULL"}',
)
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
SMALL = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32768,
}
"""About 0.1 billion parameters: a GPU is so fast with them that the server is what is measured."""
Shape = Literal["8b", "0.1b"]
SAMPLING = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class MeasuredModel:
    """A checkpoint, and what an engine is started with for it."""

    path: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class MeasuredPod:
    """Serves ``base``."""

    engine: VllmEngine
    supervisor: Supervisor
    url: str


@contextmanager
def measured_model(shape: Shape = "8b") -> Iterator[MeasuredModel]:
    """Of random weights: a tiny one on the CPU, one of Qwen3-8B's or of a small shape on a GPU."""
    on_gpu = torch.cuda.is_available()
    with TemporaryDirectory(prefix="bench-") as name:
        path = Path(name) / "model"
        make(path, dtype="bfloat16" if on_gpu else "float32")
        if on_gpu:
            config = path / "config.json"
            document = json.loads(config.read_text()) | (QWEN3_8B if shape == "8b" else SMALL)
            document.pop("layer_types", None)  # of the tiny model's layers
            config.write_text(json.dumps(document))
        yield MeasuredModel(str(path), GPU_ARGS if on_gpu else CPU_ARGS)


@asynccontextmanager
async def measured_pod(model: MeasuredModel, *, front_ends: int = 1) -> AsyncIterator[MeasuredPod]:
    """A pod with its data port. One front end is in this process; several are processes of their
    own, as in ``serve``.
    """
    configure_logs(level="WARNING")
    with TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        engine = VllmEngine(
            EngineSettings(model=model.path, run_dir=folder / "run", args=model.args)
        )
        agent = AgentClient(folder / "run" / "agent.sock")
        gate = SharedGate(engine) if front_ends > 1 else Gate(engine)
        supervisor = Supervisor(
            engine, agent, Store(folder), gate=gate,
            default_desired=DesiredDocument(owner="bench", generation=0),
        )  # fmt: skip
        port = free_port()
        server: Server | None = None
        if isinstance(gate, SharedGate):
            settings = [
                FrontEndSettings(
                    engine="vllm", model=model.path, args=tuple(model.args),
                    run_dir=str(folder / "run"), shm_dir="/dev/shm", host="127.0.0.1",
                    port=port, log_level="WARNING", share=share,
                )
                for share in engine.share(front_ends)
            ]  # fmt: skip
            serving = asyncio.create_task(Fleet(supervisor, gate, settings).run())
        else:
            server = Server(make_data_app(supervisor), bind(("127.0.0.1", port)))
            serving = asyncio.create_task(server.run_until_exit())
        brain = asyncio.create_task(supervisor.run())
        try:
            while not gate.is_open:
                for task in (brain, serving):
                    if task.done():
                        task.result()
                await asyncio.sleep(0.1)
            yield MeasuredPod(engine, supervisor, f"http://127.0.0.1:{port}")
        finally:
            supervisor.begin_drain()
            await asyncio.gather(brain, return_exceptions=True)
            if server is None:
                serving.cancel()
            else:
                server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            await agent.close()
            await engine.shutdown()


async def run_load(
    url: str, size: int, tokens: int, kind: str, *, processes: int = 1
) -> list[dict[str, Any]]:
    """What ``benchmarks.load`` prints, for each of the processes that share the callers."""
    sizes = [size // processes + (i < size % processes) for i in range(processes)]
    return await asyncio.gather(*(_load(url, each, tokens, kind) for each in sizes if each))


async def _load(url: str, size: int, tokens: int, kind: str) -> dict[str, Any]:
    load = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.load", url, str(size), str(tokens), kind),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await load.communicate()
    assert load.returncode == 0
    document: dict[str, Any] = json.loads(out)
    return document

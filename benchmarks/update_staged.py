"""An update that waited on the device, and what decoding notes of the waiting.

The switch is measured as in ``update``, on a bare rank; decoding on a real engine, while versions
come out of host memory one after the other without a pause: more than any trainer does.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.memory import MB, Memory
from benchmarks.pod import QWEN3_8B, SAMPLING
from benchmarks.rank import rank
from benchmarks.report import Result, tell
from benchmarks.synthetic import SHAPES, make_tensors, specs
from benchmarks.update import WHERE, copy_floor_ms, need_gpu, updates
from examples.tiny_models import make
from rollout_pod.engine.base import EngineRequest, EngineSettings
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.trainer import WeightSender

GOAL_MS, GOAL_SHARE = 10.0, 0.9
CONCURRENT = 64
ENGINE_ARGS = (
    "--dtype=bfloat16",
    "--max-model-len=2048",
    "--max-num-seqs=256",
    "--gpu-memory-utilization=0.5",
    '--compilation-config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
)

Tensors = Mapping[str, torch.Tensor]


def run(quick: bool) -> Result:
    """Measure; ``quick`` decodes with a model of 0.7 GB."""
    need_gpu()
    switch = _switch(5 if quick else 20)
    torch.cuda.empty_cache()
    share = asyncio.run(_decoding(quick))
    figure = switch["ms"]
    return Result(
        name="update-staged", figure=figure, unit="ms", reference=switch["floor"],
        ratio=figure / switch["floor"],
        goal=f"<= {GOAL_MS:g} ms, decoding at >= {GOAL_SHARE} (it is {share:.3f})",
        holds=figure <= GOAL_MS and share >= GOAL_SHARE,
    )  # fmt: skip


def _switch(count: int) -> dict[str, float]:
    """Of a bare rank: from the call to its answer."""
    took, staged = [], []
    with rank("qwen3-8b", WHERE) as there:
        tensors = make_tensors(SHAPES["qwen3-8b"], WHERE, 1)
        sender = WeightSender([there.socket], device=Cuda(0), mode="direct")
        updates(sender, there, tensors, 0)
        before = Memory.of([there.pid])
        for number in range(count + 2):
            for tensor in tensors.values():
                tensor.view(torch.int16).add_(1)
            there.expect(f"s{number}", "stage")
            sent = sender.send(f"s{number}", tensors, on_accepted=there.load, timeout_s=120)
            there.answer()
            staged.append(1000 * sent.seconds["total"])
            started = time.perf_counter()
            there.ask(f"switch s{number}")
            took.append(1000 * (time.perf_counter() - started))
        assert there.holds(tensors), "the rank holds something else"
        used = Memory.of([there.pid]).since(before, "extra")
        sender.close()
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        tell({"what": "a version beside the model", "model MB": nbytes / MB} | used)
        row = {
            "ms": statistics.median(took[2:]),
            "staging ms": statistics.median(staged[2:]),
            "floor": copy_floor_ms(tensors),
        }
    tell({"what": "qwen3-8b, switch", **row})
    return row


async def _decoding(quick: bool) -> float:
    """Tokens a second while versions are staged, as a share of those without."""
    shape = "half" if quick else "qwen3-8b"
    tokens = 512
    async with _engine(shape) as (engine, tensors, checkpoint):
        await _first_update(engine, tensors)
        tensors.clear()
        stager = await _Stager.start(engine, checkpoint)
        await stager.stage("warm")
        await _tokens_s(engine, 32)
        alone, beside = [], []
        for _ in range(2):
            alone.append(await _tokens_s(engine, tokens))
            staging = asyncio.create_task(stager.stage_on())
            try:
                beside.append(await _tokens_s(engine, tokens))
            finally:
                stager.stop = True
                await staging
        switches = []
        for _ in range(5):
            await engine.pause()
            started = time.perf_counter()
            (report,) = await engine.switch_weights(stager.version, timeout_s=60)
            switches.append((time.perf_counter() - started, report.seconds))
            assert report.ok, report
            assert (await engine.clear_caches()).is_complete
            await engine.resume()
        await _tokens_s(engine, 32)
        share = max(beside) / max(alone)
        seconds = statistics.median(stager.seconds)
        tell(
            {
                "what": f"{shape}, {CONCURRENT} decoding",
                "tokens/s alone": max(alone),
                "while staging": max(beside),
                "share": share,
                "versions staged": len(stager.seconds),
                "staging s": seconds,
                "GB/s": stager.nbytes / seconds / 1e9,
                "switch ms": 1000 * statistics.median(call for call, _ in switches),
                "in the rank": 1000 * statistics.median(rank for _, rank in switches),
            }
        )
        await stager.close()
        return share


async def _first_update(engine: VllmEngine, tensors: Tensors) -> None:
    """An ordinary one, which shows where each byte belongs."""
    loads: list[Any] = []
    loop = asyncio.get_running_loop()

    async def load(session: str) -> None:
        await engine.pause()
        reports = await engine.load_weights(session, version="first", flush=False, timeout_s=120)
        assert all(report.ok for report in reports), reports
        assert (await engine.clear_caches()).is_complete
        await engine.resume()

    def accepted(session: str) -> None:
        loads.append(asyncio.run_coroutine_threadsafe(load(session), loop))

    sender = WeightSender(engine.rank_sockets(), device=Cuda(0))
    await sender.send_async("first", tensors, timeout_s=120, on_accepted=accepted)
    await asyncio.wrap_future(loads[0])
    await asyncio.to_thread(sender.close)


class _Stager:
    """``benchmarks.stager``, which stages versions in an engine that serves."""

    def __init__(self, engine: VllmEngine, process: asyncio.subprocess.Process) -> None:
        self._engine = engine
        self._process = process
        self.nbytes = 0
        self.version = ""
        self.seconds: list[float] = []
        self.stop = False

    @classmethod
    async def start(cls, engine: VllmEngine, checkpoint: Path) -> "_Stager":
        """With the checkpoint in shared memory."""
        (socket,) = engine.rank_sockets()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.stager", str(socket), str(checkpoint),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        made = cls(engine, process)
        made.nbytes = (await made._hear())["bytes"]
        return made

    async def stage(self, version: str) -> float:
        """One version; the seconds it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{version}\n".encode())
        session = (await self._hear())["accepted"]
        await self._engine.stage_weights(session, version=version, timeout_s=60)
        done = await self._hear()
        assert done["path"] == "staged", done
        self.version = version
        return float(done["seconds"])

    async def stage_on(self) -> None:
        """One after the other, until ``stop``."""
        self.stop = False
        while not self.stop:
            self.seconds.append(await self.stage(f"staged-{len(self.seconds)}"))

    async def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(150):
            line = await self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _tokens_s(engine: VllmEngine, tokens: int) -> float:
    params = engine.sampling_params(SAMPLING, max_tokens=tokens)
    started = time.perf_counter()
    outputs = await asyncio.gather(
        *(
            engine.generate(
                EngineRequest(f"r{i}-{time.monotonic_ns()}", [3 + i % 900, 5, 7, 11], params)
            )
            for i in range(CONCURRENT)
        )
    )
    count = sum(len(output.token_ids) for output in outputs)
    assert count == tokens * CONCURRENT, f"{count} tokens instead of {tokens * CONCURRENT}"
    return count / (time.perf_counter() - started)


@asynccontextmanager
async def _engine(shape: str) -> AsyncIterator[tuple[VllmEngine, dict[str, torch.Tensor], Path]]:
    """With a slot on its device; the tensors that it was started with, and their file."""
    with tempfile.TemporaryDirectory(prefix="staged-") as name:
        folder = Path(name)
        make(folder / "model", dtype="bfloat16")
        size = SHAPES[shape]
        config = folder / "model" / "config.json"
        document = json.loads(config.read_text()) | QWEN3_8B
        document |= {
            "hidden_size": size.hidden, "intermediate_size": size.intermediate,
            "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads, "vocab_size": size.vocab,
            "head_dim": size.head_dim,
        }  # fmt: skip
        document.pop("layer_types", None)  # of the tiny model's layers
        config.write_text(json.dumps(document))
        tensors = _sane_tensors(shape)
        host = {name: tensor.cpu() for name, tensor in tensors.items()}
        checkpoint = folder / "model" / "model.safetensors"
        save_file(host, checkpoint, {"format": "pt"})
        del host
        engine = VllmEngine(
            EngineSettings(
                model=str(folder / "model"), run_dir=folder / "run", args=ENGINE_ARGS,
                staging="Device",
            )
        )  # fmt: skip
        try:
            await engine.start()
            yield engine, tensors, checkpoint
        finally:
            await engine.shutdown()


def _sane_tensors(shape: str) -> dict[str, torch.Tensor]:
    """Weights of which every log-prob is a number."""
    made = {}
    for spec in specs(SHAPES[shape]):
        tensor = torch.empty(spec.shape, dtype=torch.bfloat16, device=WHERE)
        if spec.name.endswith("norm.weight"):
            made[spec.name] = tensor.fill_(1.0)
        else:
            made[spec.name] = tensor.normal_(0.0, 0.02)
    return made

"""What the engine tests share: checkpoints, the reference of Hugging Face, and a sender."""

import asyncio
import atexit
import json
import random
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from examples.tiny_models import Kind, make
from rollout_pod.engine.base import (
    EngineOutput,
    EngineRequest,
    EngineSettings,
    OnDelta,
    RankReport,
)
from rollout_pod.engine.boot_record import spec_of
from rollout_pod.engine.vllm import VllmEngine, create
from rollout_pod.weights.buckets import make_plan
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.segment import Segment
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import SessionError
from tests.support.tiny_vision import make_vision

SHM = Path("/dev/shm")
GREEDY = {"temperature": 0, "ignore_eos": True}
BASE_ARGS = ("--dtype=float32", "--max-model-len=2048", "--max-num-seqs=64")


@lru_cache
def checkpoint(kind: Kind | Literal["vision"], seed: int) -> Path:
    """A tiny checkpoint; the same one every time it is asked for."""
    path = _temporary(f"tiny-{kind}-{seed}-")
    if kind == "vision":
        make_vision(path, seed=seed)
    else:
        make(path, kind=kind, seed=seed, shards=1 + seed)
    return path


LORA_RANK = 4
_LORA_SCALE = 2.0
_LORA_MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def _temporary(prefix: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _lora_of(base: Path, seed: int) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in sorted(tensors_of(base).items()):
        module = name.removesuffix(".weight")
        if module.endswith(_LORA_MODULES):
            for half, shape in (
                ("A", (LORA_RANK, weight.shape[1])),
                ("B", (weight.shape[0], LORA_RANK)),
            ):
                noise = torch.randn(shape, generator=dice) * (1.0 / shape[1] ** 0.5)
                weights[f"{module}.lora_{half}.weight"] = noise
    return weights


@lru_cache
def adapter(base: Path, seed: int) -> Path:
    """A tiny random LoRA adapter, in the files that PEFT writes."""
    path = _temporary(f"tiny-lora-{seed}-")
    weights = {f"base_model.model.{n}": w for n, w in _lora_of(base, seed).items()}
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": LORA_RANK,
        "lora_alpha": LORA_RANK * _LORA_SCALE, "lora_dropout": 0.0,
        "target_modules": sorted({module.split(".")[-1] for module in _LORA_MODULES}),
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def copy_of(folder: Path) -> Path:
    """One that a test may spoil."""
    path = _temporary("copy-")
    shutil.copytree(folder, path, dirs_exist_ok=True)
    return path


@lru_cache
def merged(base: Path, seed: int) -> Path:
    """The checkpoint that ``base`` with ``adapter(_, seed)`` is as good as."""
    path = _temporary(f"tiny-merged-{seed}-")
    for file in base.iterdir():
        if not file.name.startswith("model"):
            shutil.copy(file, path)
    tensors, lora = tensors_of(base), _lora_of(base, seed)
    for name in lora:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            change = lora[f"{module}.lora_B.weight"] @ lora[name]
            tensors[f"{module}.weight"] += _LORA_SCALE * change
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(path.glob("*.safetensors")) for k, v in load_file(f).items()}


def prompts(count: int, length: int = 24, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, 1024) for _ in range(length)] for _ in range(count)]


class Reference:
    """Hugging Face transformers with the same checkpoint, in float32."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, prompt: list[int], tokens: tuple[int, ...]) -> torch.Tensor:
        """One row for each of ``tokens``: what it was sampled from."""
        out = self._model(torch.tensor([[*prompt, *tokens]])).logits[0]
        return out[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]

    def agrees(self, prompt: list[int], output: EngineOutput) -> bool:
        """Every token is the greedy one, and has the right log-prob.

        If each token is the argmax after the ones before it, the whole is what greedy
        decoding gives.
        """
        logits = self.logits(prompt, output.token_ids)
        if logits.argmax(-1).tolist() != list(output.token_ids):
            return False
        picked = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        return bool((picked - torch.tensor(output.log_probs)).abs().max() < 1e-3)


@lru_cache(maxsize=4)
def reference(path: Path) -> Reference:
    return Reference(path)


@contextmanager
def settings(model: Path | str, *args: str) -> Iterator[EngineSettings]:
    """In a folder with a short name: the path of a socket has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="eng-") as run_dir:
        yield EngineSettings(
            model=str(model), args=(*BASE_ARGS, *args), run_dir=Path(run_dir), shm_dir=SHM
        )


def engine_of(given: EngineSettings) -> VllmEngine:
    return create(given)


@asynccontextmanager
async def running(model: Path, *args: str) -> AsyncIterator[VllmEngine]:
    """An engine that has started, and is shut down at the end."""
    with settings(model, *args) as given:
        engine = engine_of(given)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.shutdown()


async def run(
    engine: VllmEngine, prompt: list[int], max_tokens: int = 48, **sampling: object
) -> EngineOutput:
    params = engine.sampling_params({**GREEDY, **sampling}, max_tokens=max_tokens)
    return await engine.generate(
        EngineRequest(engine_id=uuid.uuid4().hex, prompt_token_ids=prompt, params=params)
    )


async def ask(
    engine: VllmEngine,
    prompt: list[int],
    sampling: dict[str, Any],
    *,
    generated: tuple[int, ...] = (),
    max_tokens: int = 32,
    on_delta: OnDelta | None = None,
    **more: Any,
) -> EngineOutput:
    """As one attempt of a rollout; ``more`` is what ``Engine.prepare`` takes."""
    prepared = await engine.prepare(prompt, **more) if more else None
    request = EngineRequest(
        engine_id=uuid.uuid4().hex,
        prompt_token_ids=[*prompt, *generated],
        params=engine.sampling_params(sampling, max_tokens=max_tokens),
        num_generated=len(generated),
        prepared=prepared,
    )
    return await engine.generate(request, on_delta)


async def run_all(engine: VllmEngine, count: int = 8, max_tokens: int = 48) -> list[EngineOutput]:
    return list(await asyncio.gather(*(run(engine, p, max_tokens) for p in prompts(count))))


async def serves(engine: VllmEngine, path: Path) -> bool:
    """The engine's outputs are those of this checkpoint, all of them, to the last token."""
    outputs = await run_all(engine)
    model = reference(path)
    return all(model.agrees(p, o) for p, o in zip(prompts(8), outputs, strict=True))


@dataclass(frozen=True)
class Sent:
    reports: tuple[RankReport, ...]
    buckets: int
    error: str
    """Why the sender failed; empty if it did not."""

    @property
    def ok(self) -> bool:
        return not self.error and all(report.ok for report in self.reports)


async def update(
    engine: VllmEngine,
    tensors: dict[str, torch.Tensor],
    *,
    version: str = "step-1",
    bucket_bytes: int = 40_000,
    flush: bool = False,
    stop_after: int | None = None,
    wrong_at: int | None = None,
    mute: bool = False,
    timeout_s: float = 30,
    aliases: tuple[tuple[str, str], ...] = (),
) -> Sent:
    """Pause, load by the real protocol in shuffled order, clear the caches, resume.

    Args:
        engine: running.
        tensors: the version.
        version: its name; also picks the order.
        bucket_bytes: small ones split tensors and spread a layer over many.
        flush: something failed before.
        stop_after: so many buckets are sent, then the sender vanishes.
        wrong_at: before this bucket, one is sent that was sent before.
        mute: nothing is sent at all.
        timeout_s: of the load.
        aliases: other names of tensors, under which the loaders get them once more.
    """
    session = uuid.uuid4().hex
    names = sorted(tensors)
    random.Random(version).shuffle(names)
    ordered = {n: tensors[n] for n in names}
    specs = tuple(spec_of(name, tensor) for name, tensor in ordered.items())
    manifest = Manifest(version, specs, aliases)
    sender = _Sender(engine, session, ordered, manifest, bucket_bytes)
    await asyncio.to_thread(sender.offer)
    try:
        await engine.pause()
        pushing = asyncio.ensure_future(asyncio.to_thread(sender.push, stop_after, wrong_at, mute))
        reports = await engine.load_weights(
            session, version=version, flush=flush, timeout_s=timeout_s
        )
        error = await pushing
    finally:
        await asyncio.to_thread(sender.close)
    if not error and all(r.ok for r in reports):
        assert (await engine.clear_caches()).is_complete
        await engine.publish_version(version)
        await engine.resume()
    return Sent(reports, sender.buckets, error)


class _Sender:
    def __init__(
        self,
        engine: VllmEngine,
        session: str,
        tensors: dict[str, torch.Tensor],
        manifest: Manifest,
        bucket_bytes: int,
    ) -> None:
        self._tensors = tensors
        self._manifest = manifest
        self._plan = make_plan(manifest.tensors, bucket_bytes)
        self.buckets = len(self._plan.buckets)
        self._session = Session(session, engine.rank_sockets(), SHM, threading.Event())
        # Two slots only, used in turn: what a loader keeps of them is overwritten.
        self._slot = max(bucket.length for bucket in self._plan.buckets)
        self._segment = Segment.create(SHM, f"test-{session}", 2 * self._slot)

    def offer(self) -> None:
        try:
            self._session.greet(5)
            self._session.offer(self._manifest, 5)
        except SessionError:
            self.close()
            raise

    def push(self, stop_after: int | None, wrong_at: int | None, mute: bool) -> str:
        if mute:
            return "sent nothing"
        values = list(self._tensors.values())
        deadline = time.monotonic() + 30
        try:
            for bucket in self._plan.buckets:
                if bucket.seq == stop_after:
                    self._session.close()
                    return "the sender vanished"
                self._session.reserve(deadline)
                base = self._slot * (bucket.seq % 2)
                for entry in bucket.entries:
                    raw = values[entry.tensor].contiguous().view(torch.uint8).numpy().tobytes()
                    at = base + entry.offset
                    piece = raw[entry.tensor_offset : entry.tensor_offset + entry.nbytes]
                    self._segment.map[at : at + entry.nbytes] = piece
                if bucket.seq == wrong_at:
                    first = self._plan.buckets[0]
                    self._session.push(first, segment=self._segment.name, base=0)
                self._session.push(bucket, segment=self._segment.name, base=base)
            self._session.finish(deadline)
        except SessionError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self._session.close()
        self._segment.close()


async def digests(engine: VllmEngine) -> list[dict[str, str]]:
    """Every rank's parameters, to the bit."""
    return list(await engine._on_ranks("rollout_digests", (), 60))


async def replay_is_the_reference(engine: VllmEngine, one: Path, two: Path) -> set[str]:
    """Load a version by the copies of the load before it, and by vLLM's loaders: all parameters
    are the same, and so is what the engine says. Returns the paths that the ranks took.
    """
    await engine._on_ranks("rollout_replay", (True,), 10)
    await update(engine, tensors_of(one), version="recorded")
    sent = await update(engine, tensors_of(two), version="replayed")
    assert sent.ok
    assert await serves(engine, two)
    replayed = await digests(engine)
    await engine._on_ranks("rollout_replay", (False,), 10)
    assert (await update(engine, tensors_of(one), version="between")).ok
    assert await digests(engine) != replayed
    reference = await update(engine, tensors_of(two), version="reference")
    assert {report.path for report in reference.reports} == {"reference"}
    assert await digests(engine) == replayed
    await engine._on_ranks("rollout_replay", (True,), 10)
    return {report.path for report in sent.reports}

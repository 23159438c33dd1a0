"""A model that is only its parameters, in the shapes of real ones, and a rank that holds it.

``python -m benchmarks.synthetic RUN SHM SHAPE DEVICE``: reads commands from stdin, one a line, and
answers each with one line of JSON. Nothing of an engine is in the figures.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout_pod.weights.buckets import ALIGN, align
from rollout_pod.weights.copies import Copy, CopyPlan, Piece, place
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.device import Device
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.loader import Expected
from rollout_pod.weights.loader import Path as LoadPath
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.receiver import Receiver
from rollout_pod.weights.recording import Recorder, checksum
from rollout_pod.weights.replay import HostReplayer, KernelReplayer, Replayer, UploadReplayer
from rollout_pod.weights.shadow import Shadow, ShadowError, StagingLoader
from rollout_pod.weights.shadow_plan import room_for
from rollout_pod.weights.spec import TensorSpec


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3; ``experts`` is 0 for a dense one. Everything is bfloat16."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    experts: int = 0
    head_dim: int = 128


SHAPES = {
    "qwen3-8b": Shape(4096, 36, 32, 8, 12288, 151936),
    "qwen3-0.25b": Shape(1024, 14, 16, 8, 3072, 16384),  # no model of theirs: half a gigabyte
    "qwen3-4b": Shape(2560, 36, 32, 8, 9728, 151936),
    "qwen3-14b": Shape(5120, 40, 40, 8, 17408, 151936),
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 3072, 151936),
    "qwen3-32b": Shape(5120, 64, 64, 8, 25600, 151936),
    # 18,432 tensors of experts, 58 GB
    "qwen3-30b-a3b": Shape(2048, 48, 32, 4, 768, 151936, experts=128),
    "half": Shape(1024, 24, 16, 8, 3072, 16384),  # 0.8 GB, no tensor larger than 34 MB
    "tiny": Shape(64, 2, 4, 2, 96, 512, head_dim=16),
    "tiny-moe": Shape(64, 2, 4, 2, 32, 512, experts=8, head_dim=16),
}

Slices = dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]
"""By checkpoint name: the parameter, and start and shape of the part of it."""


def layout(shape: Shape) -> tuple[dict[str, tuple[int, ...]], Slices]:
    """The parameters of a model as an engine fuses them, and where each tensor belongs."""
    s = shape
    parameters: dict[str, tuple[int, ...]] = {}
    slices: Slices = {}

    def whole(name: str, *size: int) -> None:
        parameters[name] = size
        slices[name] = (name, (0,) * len(size), size)

    def fused(parameter: str, columns: int, parts: Sequence[tuple[str, int]]) -> None:
        parameters[parameter] = (sum(rows for _, rows in parts), columns)
        at = 0
        for name, rows in parts:
            slices[name] = (parameter, (at, 0), (rows, columns))
            at += rows

    whole("model.embed_tokens.weight", s.vocab, s.hidden)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for i in range(s.layers):
        p = f"model.layers.{i}"
        a = f"{p}.self_attn"
        fused(
            f"{a}.qkv_proj.weight", s.hidden,
            [(f"{a}.q_proj.weight", q), (f"{a}.k_proj.weight", kv), (f"{a}.v_proj.weight", kv)],
        )  # fmt: skip
        whole(f"{a}.o_proj.weight", s.hidden, q)
        for norm in ("q_norm", "k_norm"):
            whole(f"{a}.{norm}.weight", s.head_dim)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            whole(f"{p}.{norm}.weight", s.hidden)
        if not s.experts:
            fused(
                f"{p}.mlp.gate_up_proj.weight", s.hidden,
                [(f"{p}.mlp.{w}_proj.weight", s.intermediate) for w in ("gate", "up")],
            )  # fmt: skip
            whole(f"{p}.mlp.down_proj.weight", s.hidden, s.intermediate)
            continue
        whole(f"{p}.mlp.gate.weight", s.experts, s.hidden)
        w13, w2 = f"{p}.mlp.experts.w13_weight", f"{p}.mlp.experts.w2_weight"
        parameters[w13] = (s.experts, 2 * s.intermediate, s.hidden)
        parameters[w2] = (s.experts, s.hidden, s.intermediate)
        for e in range(s.experts):
            for number, which in enumerate(("gate", "up")):
                slices[f"{p}.mlp.experts.{e}.{which}_proj.weight"] = (
                    w13, (e, number * s.intermediate, 0), (1, s.intermediate, s.hidden),
                )  # fmt: skip
            slices[f"{p}.mlp.experts.{e}.down_proj.weight"] = (
                w2, (e, 0, 0), (1, s.hidden, s.intermediate),
            )  # fmt: skip
    whole("model.norm.weight", s.hidden)
    whole("lm_head.weight", s.vocab, s.hidden)
    return parameters, slices


def specs(shape: Shape) -> tuple[TensorSpec, ...]:
    """The checkpoint."""
    _, slices = layout(shape)
    return tuple(
        spec_of(name, torch.empty(_squeezed(size), dtype=torch.bfloat16, device="meta"))
        for name, (_, _, size) in slices.items()
    )


def make_tensors(shape: Shape, where: str, seed: int) -> dict[str, torch.Tensor]:
    """A version: random bits, each tensor by itself as a trainer has them."""
    made = {}
    generator = torch.Generator(device=where).manual_seed(seed)
    for spec in specs(shape):
        made[spec.name] = torch.empty(spec.shape, dtype=torch.bfloat16, device=where)
        made[spec.name].view(torch.int16).random_(generator=generator)
    return made


def _squeezed(size: tuple[int, ...]) -> tuple[int, ...]:
    return size[1:] if len(size) == 3 else size


class SyntheticLoader:
    """A ``ReplayingLoader``; its reference is ``copy_`` into the parameters."""

    def __init__(self, shape: Shape, where: str, device: Device | None) -> None:
        sizes, self._slices = layout(shape)
        self.parameters = {
            name: torch.zeros(size, dtype=torch.bfloat16, device=where)
            for name, size in sizes.items()
        }
        self._near: Replayer = KernelReplayer(where) if device is not None else HostReplayer()
        self._far: Replayer = UploadReplayer(device) if device is not None else self._near
        self.replaying = True
        self._records = False
        self._plan: CopyPlan | None = None
        self._recorder: Recorder | None = None
        self._prepared: dict[Hashable, Any] = {}
        self._covered = ""

    def target(self, name: str) -> torch.Tensor:
        """Where a tensor of the checkpoint belongs."""
        parameter, start, size = self._slices[name]
        view = self.parameters[parameter]
        for dim, (at, length) in enumerate(zip(start, size, strict=True)):
            view = view.narrow(dim, at, length)
        return view.reshape(_squeezed(size))

    def prepare(self, manifest: Manifest) -> frozenset[str]:
        """See ``ReplayingLoader``."""
        self._records = self._plan is None and self.replaying
        self._recorder = Recorder() if self._records else None
        if self._plan is None or not self.replaying:
            return frozenset()
        if manifest.digest != self._covered:  # an engine's loader does not look twice either
            assert manifest.names == self._plan.copies.keys()
            self._covered = manifest.digest
        return manifest.names

    def begin(self) -> None:
        """See ``Loader``."""

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See ``Loader``."""
        with self._recorder or contextlib.nullcontext():
            for name, tensor in tensors:
                given = tensor
                if self._recorder is not None:
                    given = tensor.to(self.target(name).device, copy=True)
                    self._recorder.source(name, given)
                self.target(name).copy_(given)

    def replay(
        self, key: Hashable, pieces: Callable[[], Sequence[Piece]], *, on_device: bool
    ) -> None:
        """See ``ReplayingLoader``."""
        if self._plan is None or not self.replaying:
            return
        replayer = self._near if on_device else self._far
        prepared = self._prepared.get(key) if key is not None else None
        if prepared is None:
            prepared = replayer.prepare(place(self._plan, pieces()))
            if key is not None:
                self._prepared[key] = prepared
        replayer.run(prepared)

    def wait(self) -> None:
        """See ``ReplayingLoader``."""
        self._near.wait()

    def staging(self, device: Device | None) -> StagingLoader:
        """A loader into memory beside the parameters."""
        nbytes = room_for([t.numel() * t.element_size() for t in self.parameters.values()])
        self._aside = torch.empty(0)
        if device is not None:
            address = device.allocate(nbytes)
        else:
            self._aside = torch.zeros(nbytes + ALIGN, dtype=torch.uint8)
            address = align(self._aside.data_ptr())
        self.shadow = Shadow(address, nbytes)
        return StagingLoader(self.shadow, self._plan_aside, near=self._near, far=self._far)

    def _plan_aside(self, manifest: Manifest) -> CopyPlan:
        if self._plan is None or manifest.names != self._plan.copies.keys():
            raise ShadowError("nothing was recorded yet")
        return self._plan

    def switch(self, version: str) -> Manifest:
        """Take what waits beside the parameters."""
        assert self._plan is not None
        return self.shadow.switch(version, self._plan, self._near)

    def finish(self) -> None:
        """See ``Loader``."""
        if self._recorder is None:
            return
        copies: dict[str, tuple[Copy, ...]] = {}
        for tensor in self.parameters.values():
            base = tensor.data_ptr()
            for each in self._recorder.slices_in(tensor):
                moved = tuple(c._replace(target=c.target + base) for c in each.copies)
                copies[each.name] = copies.get(each.name, ()) + moved
        assert not self._recorder.impure, self._recorder.impure
        self._plan = CopyPlan(copies)
        self._recorder = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # as ``FastLoader``

    def flush(self) -> None:
        """See ``Loader``."""

    def summary(self) -> tuple[LoadPath, str]:
        """See ``ReplayingLoader``."""
        return ("recorded" if self._records else "replayed" if self.replaying else "reference"), ""


class NothingLoader:
    """Loads nothing: what is left is the transport."""

    def begin(self) -> None:
        """See ``Loader``."""

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See ``Loader``."""

    def finish(self) -> None:
        """See ``Loader``."""

    def flush(self) -> None:
        """See ``Loader``."""


def copy_ms(where: str, rounds: int, nbytes: int = 1 << 30) -> float:
    """Milliseconds of one copy of ``nbytes``, of ``rounds`` one after the other."""
    one = torch.zeros(nbytes, dtype=torch.uint8, device=where)
    two = torch.empty_like(one)
    two.copy_(one)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(rounds):
        two.copy_(one)
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / rounds


def main(run_dir: str, shm_dir: str, shape_name: str, where: str) -> None:
    """Commands: ``load SESSION VERSION``, ``nothing SESSION VERSION``, ``replay 0|1``, ``sums``,
    ``copy ROUNDS``, ``stage SESSION VERSION``, ``switch VERSION``.
    """
    shape = SHAPES[shape_name]
    device = Cuda(torch.device(where).index or 0) if where != "cpu" else None
    loader = SyntheticLoader(shape, where, device)
    expected = Expected({spec.name: spec for spec in specs(shape)})
    receiver = Receiver(
        rank=0,
        world=1,
        host="bench",
        socket_path=Path(run_dir) / "ranks" / "rank-0.sock",
        shm_dir=Path(shm_dir),
        expected=lambda: expected,
        device=device,
    )
    receiver.start()
    print(json.dumps("ready"), flush=True)
    aside: StagingLoader | None = None
    for line in _lines():
        what, *words = line.split()
        answer: object = None
        if what in ("load", "nothing"):
            report = receiver.load(
                words[0], loader if what == "load" else NothingLoader(), version=words[1],
                flush=False, timeout_s=120,
            )  # fmt: skip
            answer = report.as_dict()
        elif what == "stage":
            aside = aside or loader.staging(device)
            thread = threading.Thread(
                target=_stage, args=(receiver, aside, device, words[0], words[1])
            )
            thread.start()
        elif what == "switch":
            started = time.perf_counter()
            manifest = loader.switch(words[0])
            answer = {"bytes": manifest.nbytes, "seconds": time.perf_counter() - started}
        elif what == "replay":
            loader.replaying = words[0] == "1"
        elif what == "copy":
            answer = copy_ms(where, int(words[0]))
        elif what == "sums":
            answer = {name: int(checksum(loader.target(name))) for name in expected.tensors}
        print(json.dumps(answer), flush=True)
    receiver.close()


def _stage(
    receiver: Receiver, aside: StagingLoader, device: Cuda | None, session: str, version: str
) -> None:
    """On a thread and a stream of its own; the sender gets the report."""
    side = contextlib.nullcontext()
    if device is not None:
        torch.cuda.set_device(device.ordinal)
        side = torch.cuda.stream(torch.cuda.Stream(device.ordinal))
    with side:
        receiver.load(session, aside, version=version, flush=False, timeout_s=120, aside=True)


def _lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()


if __name__ == "__main__":
    main(*sys.argv[1:])

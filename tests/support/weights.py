"""Checkpoints, models and processes for the tests of the weight protocol."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from rollout_pod.weights.device import Device
from rollout_pod.weights.loader import Expected
from rollout_pod.weights.push import spec_of
from rollout_pod.weights.receiver import Receiver

Tensors = Mapping[str, torch.Tensor]


def mixed_tensors(seed: int) -> dict[str, torch.Tensor]:
    """All that is awkward: types, odd sizes, a scalar, empty ones, one that needs splitting."""
    g = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(257, 33, generator=g).to(torch.bfloat16),
        "layers.0.norm": torch.randn(7, generator=g),
        "layers.0.fp8": torch.randn(3, 5, generator=g).to(torch.float8_e4m3fn),
        "layers.0.ids": torch.randint(-(2**60), 2**60, (13,), generator=g),
        "layers.0.mask": torch.randint(0, 2, (11,), generator=g).to(torch.bool),
        "layers.0.scale": torch.randn((), generator=g),
        "layers.0.u8": torch.randint(0, 255, (1,), generator=g).to(torch.uint8),
        "layers.0.empty": torch.empty(0, 4),
        "layers.1.half": torch.randn(129, generator=g).to(torch.float16),
        "layers.1.big": torch.randn(300, 100, generator=g),
        "layers.1.double": torch.randn(3, generator=g).to(torch.float64),
    }


def write_checkpoint(folder: Path, tensors: Tensors, shards: int = 1) -> Path:
    """Safetensors files, with an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    names = list(tensors)
    where = {name: f"model-{i % shards + 1:05}.safetensors" for i, name in enumerate(names)}
    for shard in sorted(set(where.values())):
        part = {name: tensors[name] for name in names if where[name] == shard}
        save_file(part, folder / shard)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def expected_of(tensors: Tensors, optional: Sequence[str] = ()) -> Expected:
    specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
    return Expected(specs, frozenset(optional))


def same(one: Tensors, other: Tensors) -> bool:
    """Equal names, types, shapes and bits."""
    return one.keys() == other.keys() and all(
        a.dtype == (b := other[name]).dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()
        for name, a in one.items()
    )


class ModelLoader:
    """A model that is a dict. ``on_load(n)`` runs before the n-th call of ``load``."""

    def __init__(self, on_load: Callable[[int], None] | None = None) -> None:
        self.on_load = on_load
        self.model: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.loads = 0

    def begin(self) -> None:
        self.calls.append("begin")
        self.model.clear()

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self.on_load is not None:
            self.on_load(self.loads)
        self.loads += 1
        for name, tensor in tensors:
            assert name not in self.model
            self.model[name] = tensor.clone()

    def finish(self) -> None:
        self.calls.append("finish")

    def flush(self) -> None:
        self.calls.append("flush")


class RudeLoader(ModelLoader):
    """Changes what it was lent."""

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().load(tensors)
        for _, tensor in tensors:
            tensor.reshape(-1).view(torch.uint8).zero_()


class Gate:
    """Holds a loader before its n-th load, until it is opened."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, number: int) -> None:
        if number == self._at:
            self.reached.set()
            assert self.open.wait(30)


class Place:
    """A run directory and shared memory of one pod, with receivers and an agent."""

    def __init__(self, root: Path, shm_dir: Path) -> None:
        self.root = root
        self.run_dir = root / "run"
        self.shm_dir = shm_dir
        self.receivers: list[Receiver] = []
        self.agents: list[subprocess.Popen[bytes]] = []

    @property
    def agent_socket(self) -> Path:
        return self.run_dir / "agent.sock"

    @property
    def rank_sockets(self) -> list[Path]:
        return [receiver.socket_path for receiver in self.receivers]

    def start_receivers(
        self, *expected: Expected | None, device: Device | None = None
    ) -> list[Receiver]:
        for rank, yardstick in enumerate(expected):
            receiver = Receiver(
                rank=rank,
                world=len(expected),
                host="pod-0",
                socket_path=self.run_dir / "ranks" / f"rank-{rank}.sock",
                shm_dir=self.shm_dir,
                expected=lambda yardstick=yardstick: yardstick,
                device=device,
            )
            receiver.start()
            self.receivers.append(receiver)
        return self.receivers

    def start_agent(
        self, host_memory: int = 64 << 20, folder: Path | None = None
    ) -> "subprocess.Popen[bytes]":
        script = Path(__file__).with_name("weights_agent.py")
        process = subprocess.Popen(
            [sys.executable, str(script), str(self.run_dir), str(self.shm_dir), str(host_memory)],
            cwd=folder,
        )
        self.agents.append(process)
        until(self._agent_listens, 60)
        return process

    def _agent_listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.agent_socket)) == 0

    def segments(self) -> list[str]:
        return sorted(path.name for path in self.shm_dir.iterdir())

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
                try:
                    agent.wait(20)
                finally:
                    agent.kill()
                    agent.wait()


@contextmanager
def make_place() -> Iterator[Place]:
    """Short paths: pytest's own are too long for sockets."""
    root = Path(tempfile.mkdtemp(prefix="rw-"))
    shm_dir = Path(tempfile.mkdtemp(prefix="rw-", dir="/dev/shm"))
    place = Place(root, shm_dir)
    try:
        yield place
    finally:
        place.close()
        shutil.rmtree(root)
        shutil.rmtree(shm_dir)


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that no event tells."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)

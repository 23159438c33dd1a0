"""A trainer: ``python weights_pusher.py RUN_DIR VERSION SEED [GPU]``.

Pushes ``mixed_tensors(SEED)``. Prints a line before each step and goes on when a line comes back:
``offer``, ``tensor K``, ``finish``; at the end a JSON object. With the folder of a fake GPU the
tensors lie there, all of them from the beginning, and ``offer`` is the only step.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.push_errors import PushError
from rollout_pod.weights.pusher import Pusher
from tests.support.fake_device import FakeDevice
from tests.support.weights import mixed_tensors


def step(name: str) -> None:
    print(name, flush=True)
    sys.stdin.readline()


def tensors(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(mixed_tensors(seed).items()):
        step(f"tensor {number}")
        yield pair
    step("finish")


def main(run_dir: str, version: str, seed: str, gpu: str = "") -> None:
    device = FakeDevice(Path(gpu)) if gpu else None
    sent = device.give(mixed_tensors(int(seed))) if device else tensors(int(seed))
    specs = tuple(spec_of(name, tensor) for name, tensor in mixed_tensors(int(seed)).items())
    with Pusher(run_dir, bucket_bytes=4096, device=device) as pusher:
        try:
            pushed = pusher.push(
                version, sent, manifest=Manifest(version, specs), timeout_s=30,
                on_accepted=lambda _: step("offer"),
            )  # fmt: skip
            told = {"version": pushed.version, "committed": pushed.state.weight_version}
        except PushError as error:
            told = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A trainer: ``python -m tests.support.engine_trainer RUN_DIR VERSION CHECKPOINT [STOP_AT]``.

Pushes a checkpoint's tensors out of its own memory; before tensor STOP_AT it prints ``stopped`` and
stands there for good. Prints a JSON object at the end.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.push_errors import PushError
from rollout_pod.weights.pusher import Pusher


def main(run_dir: str, version: str, checkpoint: str, stop_at: str = "-1") -> None:
    held = {
        name: tensor
        for file in sorted(Path(checkpoint).glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(held.items()):
            if number == int(stop_at):
                print("stopped", flush=True)
                time.sleep(600)
            yield pair

    manifest = Manifest(version, tuple(spec_of(name, tensor) for name, tensor in held.items()))
    with Pusher(run_dir) as pusher:
        try:
            pushed = pusher.push(version, tensors(), manifest=manifest, timeout_s=60)
            told = {"version": pushed.version, "steps": dict(pushed.state.update.steps)}
        except PushError as error:
            told = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

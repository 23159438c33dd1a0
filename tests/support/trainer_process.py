"""A trainer: ``python trainer_process.py ADMIN_URL RUN_DIR VERSION CHECKPOINT``.

Begins to send the checkpoint, prints ``middle`` when half of its tensors are read, and waits for a
line, or for its death.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from rollout_client.trainer import PodTarget, SyncServerAdapter
from rollout_pod.weights.fill import spec_of
from tests.support.engine_kit import tensors_of


def main(url: str, run_dir: str, version: str, checkpoint: str) -> None:
    tensors = tensors_of(Path(checkpoint))

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                print("middle", flush=True)
                sys.stdin.readline()
            yield pair

    specs = [spec_of(*pair) for pair in tensors.items()]
    with SyncServerAdapter(PodTarget.of_run_dir(run_dir, url), timeout_s=60) as adapter:
        adapter.update_weights(slowly(), version=version, manifest=specs)


if __name__ == "__main__":
    main(*sys.argv[1:])

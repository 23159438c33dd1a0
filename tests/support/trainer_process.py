"""A trainer: ``python trainer_process.py URL RUN_DIR VERSION FOLDER [NAMESPACE/NAME]``.

Begins to send the safetensors files of the folder, prints ``middle`` when half of its tensors are read, and waits for a
line, or for its death. URL is the admin port of a pod that nobody owns, or, for a RolloutReplica, the API server.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollout_client.trainer import PodTarget, ReplicaTarget, SyncServerAdapter
from rollout_pod.weights.fill import spec_of


def main(url: str, run_dir: str, version: str, folder: str, replica: str = "") -> None:
    files = sorted(Path(folder).glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                print("middle", flush=True)
                sys.stdin.readline()
            yield pair

    specs = [spec_of(*pair) for pair in tensors.items()]
    if replica:
        namespace, _, name = replica.partition("/")
        owned = ReplicaTarget(name=name, namespace=namespace, run_dir=Path(run_dir))
        made = SyncServerAdapter(owned, timeout_s=60, server=url, manager="killed-trainer")
    else:
        made = SyncServerAdapter(PodTarget.of_run_dir(run_dir, url), timeout_s=60)
    with made as adapter:
        adapter.update_weights(slowly(), version=version, manifest=specs)


if __name__ == "__main__":
    main(*sys.argv[1:])

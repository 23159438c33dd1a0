"""A real rank process: ``python weights_rank.py RUN_DIR SHM_DIR CHECKPOINT SESSION VERSION``.

Accepts what looks like CHECKPOINT, then loads; prints a line before each call of the loader and
goes on when a line comes back; prints the report at the end.
"""

import json
import sys
from pathlib import Path

from rollout_pod.weights.loader import Expected
from rollout_pod.weights.receiver import Receiver
from rollout_pod.weights.sources import open_checkpoint
from tests.support.weights import ModelLoader


def ask(number: int) -> None:
    print(f"load {number}", flush=True)
    sys.stdin.readline()


def main(run_dir: str, shm_dir: str, checkpoint: str, session: str, version: str) -> None:
    specs = {t.spec.name: t.spec for t in open_checkpoint(Path(checkpoint)).tensors}
    receiver = Receiver(
        rank=0,
        world=1,
        host="pod-0",
        socket_path=Path(run_dir) / "ranks" / "rank-0.sock",
        shm_dir=Path(shm_dir),
        expected=lambda: Expected(specs),
    )
    receiver.start()
    print("ready", flush=True)
    sys.stdin.readline()
    report = receiver.load(session, ModelLoader(ask), version=version, flush=False, timeout_s=30)
    print(json.dumps(report.as_dict()), flush=True)
    receiver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

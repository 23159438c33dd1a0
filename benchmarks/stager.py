"""A weights agent that stages, as a process: ``python -m benchmarks.stager SOCKET CHECKPOINT``.

Holds the checkpoint in a slot of shared memory, as an agent does. For each line of stdin, a
version, it prints ``{"accepted": session}`` and, when the rank has it all, ``{"seconds", "path"}``.
"""

import json
import sys
import threading
import time
import uuid
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.rank import SHM
from rollout_pod.weights.buckets import make_plan
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.segment import Segment
from rollout_pod.weights.sender import Session

BUCKET = 256 << 20


def main(socket: str, checkpoint: str) -> None:
    """Until stdin ends."""
    with safe_open(checkpoint, framework="pt") as file:
        specs = tuple(spec_of(name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - no dict
        plan = make_plan(specs, BUCKET)
        slot = Segment.create(SHM, f"bench-{uuid.uuid4().hex}", plan.nbytes)
        for spec, offset in zip(specs, plan.offsets, strict=True):
            view = torch.frombuffer(slot.map, dtype=torch.uint8, count=spec.nbytes, offset=offset)
            view.copy_(file.get_tensor(spec.name).reshape(-1).view(torch.uint8))
            del view
    manifest = Manifest("-", specs)
    link = Session("first", [Path(socket)], SHM, threading.Event())
    try:
        print(json.dumps({"bytes": manifest.nbytes}), flush=True)
        for line in sys.stdin:
            version, session = line.strip(), uuid.uuid4().hex
            started = time.monotonic()
            link.renew(session)
            link.greet(30, slot)
            link.offer(manifest.renamed(version), 30)
            link.map(120, segments=[slot.name])
            print(json.dumps({"accepted": session}), flush=True)
            deadline = time.monotonic() + 120
            for bucket in plan.buckets:
                link.reserve(deadline)
                link.push(bucket, segment=slot.name, base=bucket.start)
            (report,) = link.finish(deadline)
            seconds = time.monotonic() - started
            print(json.dumps({"seconds": seconds, "path": report.path}), flush=True)
    finally:
        link.close()
        slot.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

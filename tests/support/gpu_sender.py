"""A trainer as a process, to be killed or to have other memory than the tests' own:
``python -m tests.support.gpu_sender SOCKET SHAPE SEED MODE HOW``.

HOW is ``plain``, ``cumem`` (tensors in vLLM's pool), or ``hangs`` (the third update's GPU work does
not end). Prints a line of JSON for each session that the rank accepted, and for each update.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.synthetic import SHAPES, make_tensors
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.trainer import WeightSender

WHERE = "cuda:0"
FOREVER = 1 << 36
"""Clock cycles: more than half a minute."""


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def pool(how: str) -> contextlib.AbstractContextManager[Any]:
    if how != "cumem":
        return contextlib.nullcontext()
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance().use_memory_pool("weights")


def late(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(tensors.items()):
        if number == len(tensors) // 2:
            torch.cuda._sleep(FOREVER)  # what fills the bucket is queued behind it
        yield pair


def main(socket: str, shape: str, seed: str, mode: str, how: str) -> None:
    with pool(how):
        tensors = make_tensors(SHAPES[shape], WHERE, int(seed))
    sender = WeightSender(
        [Path(socket)],
        device=Cuda(0),
        mode=mode,  # type: ignore[arg-type]  # from the command line
        bucket_bytes=1 << 16,
    )
    for number in range(3):
        given = late(tensors) if how == "hangs" and number == 2 else tensors
        sent = sender.send(
            f"v{number}",
            given,
            timeout_s=60,
            on_accepted=lambda session: say({"accepted": session}),
        )
        say({"transport": sent.transport, "mode": sent.mode, "reason": sent.reason})
    sys.stdin.readline()
    sender.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

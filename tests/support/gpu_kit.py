"""What the GPU tests of whole pods share. All of it in bfloat16, as such pods run."""

from pathlib import Path

import torch

from examples.tiny_models import Kind, make
from rollout_pod.protocol import GenerateResponse
from tests.support.process import serve_process

ENGINE_ARGS = (
    "--dtype=bfloat16",
    "--max-model-len=2048",
    "--enforce-eager",
    "--gpu-memory-utilization=0.3",
)
PROMPT = list(range(10, 40))
NEAR = 0.3
"""What a log-prob may change by where the same is computed in another order: a few per cent of a
logit. Other weights change it by one or more.
"""


def make_versions(folder: Path, kind: Kind, *, hidden: int = 512, **sizes: int) -> Path:
    """``base`` and ``step-1`` in ``folder``."""
    assert torch.cuda.is_available(), "this tier needs a GPU"
    for seed, version in enumerate(("base", "step-1")):
        make(folder / version, kind=kind, seed=seed, hidden=hidden, dtype="bfloat16", **sizes)
    return folder


def fresh_tokens_of(checkpoint: Path) -> list[int]:
    """What an engine says that was started with it."""
    with serve_process(checkpoint, engine_args=ENGINE_ARGS) as pod:
        pod.start()
        pod.serving("base")
        return pod.generate(PROMPT, 64).token_ids


def agreed(whole: GenerateResponse, other: GenerateResponse, *, start: int = 0) -> int:
    """How many greedy tokens ``other`` has as ``whole`` has them from ``start`` on, with near
    log-probs: up to its end, or to where ``whole`` could as well have taken what ``other`` took.
    Negative where they differ otherwise. ``whole`` asked for ``logprobs: 2``.
    """
    assert whole.top_log_probs is not None
    for i, (token, value) in enumerate(zip(other.token_ids, other.log_probs, strict=True)):
        at = start + i
        if at == len(whole.token_ids):
            return i
        if token == whole.token_ids[at]:
            if abs(value - whole.log_probs[at]) > NEAR:
                return -1
            continue
        near = {t.token_id for t in whole.top_log_probs[at]
                if whole.log_probs[at] - t.log_prob <= NEAR}  # fmt: skip
        return i if token in near else -1
    return len(other.token_ids)

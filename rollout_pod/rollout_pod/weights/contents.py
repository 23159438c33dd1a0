"""Whether two machines hold the same version: what can be told without reading all of it again."""

import hashlib
from collections.abc import Sequence
from typing import Final

from rollout_pod.weights.checkpoint import Checkpoint
from rollout_pod.weights.spec import TensorSpec

SPOTS: Final = 4
"""Of each tensor, evenly spread over it, its first and last bytes among them."""
SPOT_BYTES: Final = 1024


def sample(memory: memoryview, tensors: Sequence[TensorSpec], offsets: Sequence[int]) -> str:
    """A SHA-256 of the names, types, shapes and order of all tensors, and of some bytes of each.

    Versions of one training differ in some of these as good as always: a step changes values all
    over a tensor. It is no proof that all bytes are the same.

    Args:
        memory: That holds the tensors.
        tensors: In the order of the layout.
        offsets: Where each begins in ``memory``.
    """
    digest = hashlib.sha256()
    for tensor, offset in zip(tensors, offsets, strict=True):
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0{tensor.nbytes}\0".encode())
        for start in _starts(tensor.nbytes):
            end = offset + min(start + SPOT_BYTES, tensor.nbytes)
            with memory[offset + start : end] as spot:
                digest.update(spot)
    return digest.hexdigest()


def known_sums(checkpoint: Checkpoint) -> str:
    """A SHA-256 of the names of all files with the SHA-256 that is known of each, against which
    their bytes were checked; empty unless it is known of all.
    """
    if not checkpoint.sums or None in checkpoint.sums:
        return ""
    digest = hashlib.sha256()
    for name, known in zip(checkpoint.files, checkpoint.sums, strict=True):
        digest.update(f"{name}\0{known.sha256 if known else ''}\0".encode())
    return digest.hexdigest()


def _starts(nbytes: int) -> list[int]:
    if nbytes <= SPOTS * SPOT_BYTES:
        return list(range(0, nbytes, SPOT_BYTES))
    return [(nbytes - SPOT_BYTES) * spot // (SPOTS - 1) for spot in range(SPOTS)]

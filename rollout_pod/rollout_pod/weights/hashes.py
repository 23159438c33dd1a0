"""Optional hashes of tensors: what arrives is compared with what was sent, byte by byte.

XXH3, 64 bits: against memory that goes wrong and code that does, not against people. A sender has
to read every byte once more for it, and so has a rank, where the bytes lie in a bucket.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
import xxhash

from rollout_pod.weights.buckets import BucketError
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.memory import Source
from rollout_pod.weights.wire import BucketReady

_CHUNK: Final = 64 << 20
"""Bytes that are brought from a GPU at a time."""


class HashError(BucketError):
    """A tensor's bytes are not those that were sent."""


def hashed(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """The manifest with a hash of every tensor, as they are now. Reads all bytes; those of a GPU
    are brought to the host for it.

    Args:
        manifest: of ``tensors``.
        tensors: all that it names; any device.
    """
    found = []
    for spec in manifest.tensors:
        state = xxhash.xxh3_64()
        _add(state, tensors[spec.name].detach().contiguous().reshape(-1).view(torch.uint8))
        found.append(state.digest())
    return manifest.with_hashes(found)


class Verifier:
    """Follows the buckets of one load, in order.

    Args:
        manifest: with hashes.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._state = xxhash.xxh3_64()

    def check(self, bucket: BucketReady, source: Source) -> None:
        """Compare the tensors that this bucket completes.

        Raises:
            HashError: names the first one that differs.
        """
        for entry in bucket.pieces():
            spec = self._manifest.tensors[entry.tensor]
            if entry.tensor_offset == 0:
                self._state.reset()
            if entry.nbytes:
                _add(self._state, source.view(bucket.base + entry.offset, entry.nbytes))
            if entry.tensor_offset + entry.nbytes == spec.nbytes:
                wanted, found = self._manifest.hashes[entry.tensor], self._state.digest()
                if found != wanted:
                    raise HashError(
                        f"tensor {spec.name!r}: its bytes are not those that were sent (xxh3 "
                        f"{found.hex()}, the manifest says {wanted.hex()})"
                    )


def _add(state: "xxhash.xxh3_64", data: torch.Tensor) -> None:
    for at in range(0, len(data), _CHUNK):
        part = data[at : at + _CHUNK].cpu()
        state.update(np.asarray(part).data)

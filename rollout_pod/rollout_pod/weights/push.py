"""The sending end for whoever holds tensors, not files: two buffers of bucket size."""

import secrets
import time
from collections.abc import Iterable

import torch

from rollout_pod.weights.buckets import WINDOW, Entry, align, make_plan
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.segment import Segment
from rollout_pod.weights.sender import Session, TransferFailed
from rollout_pod.weights.spec import TensorSpec


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a manifest says of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size())


def send_weights(
    session: Session,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    manifest: Manifest,
    bucket_bytes: int,
    timeout_s: float,
) -> tuple[LoadReport, ...]:
    """Send tensors that come one after another, in the order of ``manifest``, which ``session``
    has offered already. Takes two buckets of shared memory, however large the model is; both
    session and memory are ended when this returns or raises.

    Raises:
        TransferFailed: a rank reports an error, is lost or late, or ``tensors`` differ from the
            manifest. Whatever the iterator raises passes through, after the ranks were told.
        RoomError: not enough shared memory for two buckets.
    """
    deadline = time.monotonic() + timeout_s
    plan = make_plan(manifest.tensors, bucket_bytes)
    size = align(max((bucket.length for bucket in plan.buckets), default=0))
    source = _Source(tensors, manifest)
    buffers: Segment | None = None
    try:
        name = f"{session.prefix}{secrets.token_hex(8)}"
        buffers = Segment.create(session.shm_dir, name, WINDOW * size)
        for bucket in plan.buckets:
            base = bucket.seq % WINDOW * size
            session.reserve(deadline)
            for entry in bucket.entries:
                source.copy(entry, buffers, base)
            session.push(bucket, segment=name, base=base)
        source.end()
        return session.finish(deadline)
    except BaseException as error:
        session.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        session.close()
        if buffers is not None:
            buffers.close()


class _Source:
    """Takes tensors off the iterator when the first piece of one is needed."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: Manifest) -> None:
        self._tensors = iter(tensors)
        self._manifest = manifest
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copy(self, entry: Entry, buffers: Segment, base: int) -> None:
        if entry.tensor_offset == 0:
            want = self._manifest.tensors[entry.tensor]
            name, tensor = next(self._tensors, ("(no more tensors)", torch.empty(0)))
            if spec_of(name, tensor) != want:
                raise TransferFailed(f"the tensor is {spec_of(name, tensor)}, manifest: {want}")
            self._bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if entry.nbytes:
            target = torch.frombuffer(
                buffers.map, dtype=torch.uint8, count=entry.nbytes, offset=base + entry.offset
            )
            end = entry.tensor_offset + entry.nbytes
            target.copy_(self._bytes[entry.tensor_offset : end])

    def end(self) -> None:
        for name, _ in self._tensors:
            raise TransferFailed(f"tensor {name!r} comes after all of the manifest")

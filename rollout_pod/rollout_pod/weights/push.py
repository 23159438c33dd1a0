"""One update for whoever holds tensors, not files. ``trainer`` keeps what this makes each time."""

import time
from collections.abc import Iterable

import torch

from rollout_pod.weights.buckets import WINDOW
from rollout_pod.weights.fill import Filler, Ring, SegmentRing, SourceChangedError, spec_of
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.sender import Session
from rollout_pod.weights.session_errors import TransferFailed

__all__ = ["send_weights", "spec_of", "stream"]


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
    ring: SegmentRing | None = None
    try:
        plan = manifest.plan(bucket_bytes)
        longest = max((bucket.length for bucket in plan.buckets), default=0)
        ring = SegmentRing(session.shm_dir, session.prefix, longest)
        return stream(session, tensors, manifest, ring, bucket_bytes, deadline)
    except BaseException as error:
        session.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        session.close()
        if ring is not None:
            ring.close()


def stream(
    session: Session,
    tensors: Iterable[tuple[str, torch.Tensor]],
    manifest: Manifest,
    ring: Ring,
    bucket_bytes: int,
    deadline: float,
    steps: dict[str, float] | None = None,
    filler: Filler | None = None,
) -> tuple[LoadReport, ...]:
    """All buckets and the end; the caller ends session and ring. ``steps`` gets the seconds spent
    on waiting for room, on filling, and on the end. ``filler`` may have begun.

    Raises:
        TransferFailed: see ``send_weights``.
    """
    filler = filler or Filler(tensors, manifest, ring)
    clock = _Clock({} if steps is None else steps)
    try:
        plan = manifest.plan(bucket_bytes)
        clock.lap("plan")
        for bucket in plan.buckets:
            base = bucket.seq % WINDOW * ring.size
            session.reserve(deadline, ring.counters)
            clock.lap("room")
            filled = filler.fill(bucket, base)
            clock.lap("fill")
            session.push(bucket, segment=ring.name, base=base, filled=filled)
            clock.lap("push")
        filler.end()
        reports = session.finish(deadline)
    except SourceChangedError as error:
        raise TransferFailed(str(error)) from error
    finally:
        ring.wait()  # what queued copies read must not go before them
    clock.lap("end")
    return reports


class _Clock:
    def __init__(self, steps: dict[str, float]) -> None:
        self._steps = steps
        self._last = time.monotonic()

    def lap(self, step: str) -> None:
        now = time.monotonic()
        self._steps[step] = self._steps.get(step, 0.0) + now - self._last
        self._last = now

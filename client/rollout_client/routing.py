"""Which replica a request goes to: pure."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """What is known of one replica."""

    url: str
    is_ready: bool = True
    """False where it is known to serve nothing."""
    step: int | None = None
    """The trainer's counter of the weights it holds, where known."""
    in_flight: int = 0
    """This client's requests."""
    rests_until: float = 0.0
    """It failed a moment ago."""
    asked_until: float = 0.0
    """It asked not to be asked before."""


@dataclass(frozen=True, kw_only=True)
class NoReplica:
    """None can be asked now."""

    why: str
    wait_s: float | None = None
    """After so long there is one; None where nobody knows."""


def choose(
    replicas: Sequence[ReplicaView],
    *,
    key: str,
    sticky: str | None,
    avoid: Collection[str],
    min_step: int | None,
    now: float,
) -> ReplicaView | NoReplica:
    """Pick a replica.

    Only those that are ready and hold ``min_step`` or a later step. Of these the one that the
    session used last, unless it failed a moment ago; else that with the fewest requests in flight,
    and of equals the one that every client picks for this ``key``.

    Args:
        replicas: All that are known.
        key: The session.
        sticky: The replica that the session used last.
        avoid: Those that failed this rollout since its last token.
        min_step: The oldest weights that will do; None for any.
        now: The clock of ``rests_until``.
    """
    able = [r for r in replicas if r.is_ready and _holds(r, min_step)]
    if not able:
        return NoReplica(why=_why_none(replicas, min_step))
    willing = [r for r in able if r.asked_until <= now]
    if not willing:
        wait = min(r.asked_until for r in able) - now
        return NoReplica(why="all replicas asked to wait", wait_s=wait)
    rested = [r for r in willing if r.rests_until <= now]
    fresh = [r for r in rested if r.url not in avoid]
    candidates = fresh or rested
    if not candidates:
        return min(willing, key=lambda r: (r.rests_until, _rank(key, r.url)))
    for replica in candidates:
        if replica.url == sticky:
            return replica
    return min(candidates, key=lambda r: (r.in_flight, _rank(key, r.url)))


def _holds(replica: ReplicaView, min_step: int | None) -> bool:
    return min_step is None or (replica.step is not None and replica.step >= min_step)


def _why_none(replicas: Sequence[ReplicaView], min_step: int | None) -> str:
    if not replicas:
        return "there is no replica"
    ready = [r for r in replicas if r.is_ready]
    if not ready:
        return f"none of {len(replicas)} replicas is ready"
    steps = sorted(r.step for r in ready if r.step is not None)
    newest = f"the newest holds step {steps[-1]}" if steps else "none tells its step"
    return f"none of {len(ready)} ready replicas holds step {min_step} or later ({newest})"


def _rank(key: str, url: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{url}".encode(), digest_size=8).digest()

"""Who may work: what follows from the Lease that two or more operators share."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

JsonObject = dict[str, Any]

API_VERSION: Final = "coordination.k8s.io/v1"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds, all from one: a holder stops a third of ``duration`` before another may start."""

    duration: int = 12
    """So long the others wait after they saw the holder renew last."""

    @property
    def renew_deadline(self) -> float:
        """So long after the request of its last renewal the holder may work."""
        return self.duration * 2 / 3

    @property
    def renew_every(self) -> float:
        """Between renewals that succeed."""
        return self.duration / 4

    @property
    def retry(self) -> float:
        """Between renewals that fail, and between looks at a Lease that another holds."""
        return self.duration / 12


@dataclass(frozen=True, kw_only=True)
class LeaseSeen:
    """A Lease as it was read."""

    version: str
    """Its resourceVersion: whoever writes next must have seen this one."""
    holder: str
    """Empty: released."""
    duration: float
    """What its holder promised: others wait so long."""
    acquired: str
    transitions: int
    raw: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "LeaseSeen":
        """Read a Lease; what is missing counts as never held."""
        spec = raw.get("spec") or {}
        return cls(
            version=raw["metadata"].get("resourceVersion", ""),
            holder=spec.get("holderIdentity") or "",
            duration=float(spec.get("leaseDurationSeconds") or 0),
            acquired=spec.get("acquireTime") or "",
            transitions=int(spec.get("leaseTransitions") or 0),
            raw=raw,
        )


class Move(Enum):
    """What a candidate does next."""

    CREATE = auto()
    TAKE = auto()
    RENEW = auto()
    WAIT = auto()


def next_move(known: LeaseSeen | None, *, exists: bool, me: str, unchanged_s: float) -> Move:
    """Return what ``me`` may do.

    ``known``: the Lease as it was read last, even where it is gone by now (not ``exists``).
    ``unchanged_s``: seconds since ``me`` first read this very resourceVersion, by a steady clock of
    its own. The times that stand in the Lease are other machines' and prove nothing.
    """
    if known is None:
        return Move.CREATE
    if known.holder != me and known.holder and unchanged_s < known.duration:
        # a Lease that somebody deleted does not stop its holder at once
        return Move.WAIT
    if not exists:
        return Move.CREATE
    return Move.RENEW if known.holder == me else Move.TAKE


def may_work(renewed_at: float | None, now: float, timing: Timing) -> bool:
    """Tell whether one may work whose last renewal that succeeded began at ``renewed_at``."""
    return renewed_at is not None and now < renewed_at + timing.renew_deadline


def held(
    lease: LeaseSeen | None, *, name: str, namespace: str, me: str, stamp: str, timing: Timing
) -> JsonObject:
    """Build the Lease that ``me`` holds from now on (``stamp``: now, with microseconds)."""
    acquired, transitions = stamp, 0
    if lease is not None:
        mine = lease.holder == me
        acquired = lease.acquired if mine and lease.acquired else stamp
        transitions = lease.transitions + (not mine)
    spec = {
        "holderIdentity": me,
        "leaseDurationSeconds": timing.duration,
        "acquireTime": acquired,
        "renewTime": stamp,
        "leaseTransitions": transitions,
    }
    return _written(lease, name, namespace, spec)


def released(lease: LeaseSeen, *, name: str, namespace: str, stamp: str) -> JsonObject:
    """Build the Lease that nobody holds: the next candidate need not wait."""
    spec = {
        # null, for an empty string may be refused
        "holderIdentity": None,
        "leaseDurationSeconds": 1,
        "acquireTime": lease.acquired or stamp,
        "renewTime": stamp,
        "leaseTransitions": lease.transitions,
    }
    return _written(lease, name, namespace, spec)


def _written(
    lease: LeaseSeen | None, name: str, namespace: str, spec: Mapping[str, Any]
) -> JsonObject:
    known = dict(lease.raw) if lease is not None else {}
    # what others put into metadata or spec stays; the resourceVersion is the precondition
    meta = {**(known.get("metadata") or {}), "name": name, "namespace": namespace}
    return {
        "apiVersion": API_VERSION,
        "kind": "Lease",
        "metadata": meta,
        "spec": {**(known.get("spec") or {}), **spec},
    }

"""What a worker remembers of its replica between passes. Losing it costs reads, nothing else."""

import base64
from dataclasses import dataclass, field, fields
from typing import Any, Self

from rollout_operator.api import names
from rollout_operator.control.pod_watch import PodWatch
from rollout_operator.plan.observed import ChildRefusal, Ownership, Refusal, ownership

JsonObject = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """What is read of the Secret with the pod's token."""

    name: str
    owner: Ownership
    text: str = field(repr=False)
    """Empty if it holds none, or is not ours."""

    @classmethod
    def read(cls, raw: JsonObject | None, *, replica: str, uid: str) -> Self | None:
        """Boil a raw Secret down; ``uid`` is the replica's. None: there is none."""
        if raw is None:
            return None
        owner, text = ownership(raw, name=replica, uid=uid), ""
        if owner is Ownership.OURS:
            try:
                text = base64.b64decode((raw.get("data") or {}).get(names.TOKEN_KEY) or "").decode()
            except ValueError:
                text = ""
        return cls(name=raw["metadata"]["name"], owner=owner, text=text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The document that a pod took (or refused) last."""

    pod_uid: str
    boot_id: str
    document: str
    """As JSON."""
    at: float
    """Monotonic."""
    refused: str = ""


@dataclass(kw_only=True, slots=True)
class Memory:
    """Belongs to one worker and one incarnation (uid) of the replica."""

    uid: str = ""
    token: Token | None = None
    """None: there is no Secret."""
    looked: bool = False
    """What is missing in the cache was looked for by name."""
    secret_due: float = 0.0
    """Monotonic time at which it is read again: nothing watches Secrets."""
    refusal: Refusal | None = None
    refused: dict[str, ChildRefusal] = field(default_factory=dict)
    """By the child's kind and name."""
    told: Told | None = None
    denied: bool = False
    """The pod did not take our token when it was told last."""
    fenced_uid: str = ""
    """The pod that refused us although the replica had been read afresh."""
    watch: PodWatch | None = None

    async def belong_to(self, uid: str) -> None:
        """Forget everything if the replica is another one of the same name."""
        if self.uid == uid:
            return
        await self.close()
        fresh = Memory(uid=uid)
        for one in fields(self):
            setattr(self, one.name, getattr(fresh, one.name))

    async def close(self) -> None:
        """Stop what runs for this replica."""
        if self.watch is not None:
            watch, self.watch = self.watch, None
            await watch.stop()

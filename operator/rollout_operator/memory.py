"""What a worker remembers of its replica between passes. Losing it costs reads, nothing else."""

from dataclasses import dataclass, field
from typing import Any

from rollout_operator.control.pod_watch import PodWatch
from rollout_operator.plan.observed import Refusal
from rollout_pod.protocol import DesiredDocument

JsonObject = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Told:
    """The document that a pod took (or refused) last."""

    pod_uid: str
    boot_id: str
    document: DesiredDocument
    at: float
    """Monotonic."""
    refused: str = ""


@dataclass(kw_only=True)
class Memory:
    """Belongs to one worker and one incarnation (uid) of the replica."""

    uid: str = ""
    secret: JsonObject | None = field(default=None, repr=False)
    looked: bool = False
    """What is missing in the cache was looked for by name."""
    secret_due: float = 0.0
    """Monotonic time at which it is read again: nothing watches Secrets."""
    refusal: Refusal | None = None
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
        vars(self).update(vars(Memory(uid=uid)))

    async def close(self) -> None:
        """Stop what runs for this replica."""
        if self.watch is not None:
            watch, self.watch = self.watch, None
            await watch.stop()

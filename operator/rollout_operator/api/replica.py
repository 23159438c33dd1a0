"""A whole RolloutReplica object."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from rollout_operator.api.spec import RolloutSpec
from rollout_operator.api.status import ReplicaStatus


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A RolloutReplica as the API server has it; ``spec`` is None where it cannot be understood."""

    name: str
    namespace: str
    uid: str
    generation: int
    deleting: bool
    spec: RolloutSpec | None
    status: ReplicaStatus
    invalid: str = ""
    """Why ``spec`` is None: the field and what is wrong with it."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read an object from the API server. Never raises for what a person may have written."""
        meta = body["metadata"]
        spec, invalid = None, ""
        try:
            spec = RolloutSpec.model_validate(body.get("spec") or {})
        except ValidationError as error:
            invalid = "; ".join(
                f"spec.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()
            )
        return cls(
            name=meta["name"],
            namespace=meta["namespace"],
            uid=meta["uid"],
            generation=meta.get("generation", 0),
            deleting=bool(meta.get("deletionTimestamp")),
            spec=spec,
            status=ReplicaStatus.parse(body.get("status")),
            invalid=invalid,
        )

    def same_as(self, other: "Replica") -> bool:
        """Tell whether both ask for the same."""
        return (self.uid, self.generation, self.deleting) == (
            other.uid,
            other.generation,
            other.deleting,
        )

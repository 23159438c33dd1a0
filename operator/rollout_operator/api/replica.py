"""A whole RolloutReplica object."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from pydantic import ValidationError

from rollout_operator.api.spec import RolloutSpec
from rollout_operator.api.status import ReplicaStatus

_VERSION_FIELD: Final[dict[str, Any]] = {"f:spec": {"f:weightVersion": {}}}


def slim_managed_fields(entries: Any) -> list[dict[str, Any]]:
    """Keep of ``metadata.managedFields`` only who owns ``spec.weightVersion``: the whole is a third
    of an object.
    """
    return [
        {
            "manager": entry.get("manager", ""),
            "time": entry.get("time", ""),
            "fieldsV1": _VERSION_FIELD,
        }
        for entry in entries or ()
        if "f:weightVersion" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]


def asked_by(entries: Any) -> str:
    """The field manager that set ``spec.weightVersion`` last; empty where nobody owns it."""
    owners = slim_managed_fields(entries)
    return str(max(owners, key=lambda entry: entry["time"])["manager"])[:128] if owners else ""


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
    asked_by: str = ""
    """The field manager of ``spec.weightVersion``; empty where nobody owns that field."""

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
            asked_by=asked_by(meta.get("managedFields")),
        )

    def same_as(self, other: "Replica") -> bool:
        """Tell whether both ask for the same."""
        return (self.uid, self.generation, self.deleting) == (
            other.uid,
            other.generation,
            other.deleting,
        )

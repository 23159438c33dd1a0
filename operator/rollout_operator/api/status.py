"""``status`` of a RolloutReplica. The CRD holds the same fields (a test compares)."""

from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from rollout_operator.api.conditions import MAX_MESSAGE, Condition, ConditionType

MAX_NOTE: Final = 1024
MAX_STEPS: Final = 32

Message = Annotated[str, Field(max_length=MAX_MESSAGE)]
Name = Annotated[str, Field(max_length=253)]


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )


class PushSource(_Part):
    """A trainer sent it."""


class CommittedSource(_Part):
    """Where the committed version came from."""

    path: Annotated[str | None, Field(max_length=4096)] = None
    url: Annotated[str | None, Field(max_length=4096)] = None
    push: PushSource | None = None


class LastCommitted(_Part):
    """The version that was committed last: what a new pod falls back to."""

    version: Name
    step: Annotated[int | None, Field(ge=0)] = None
    source: CommittedSource | None = None


class UpdateSeconds(_Part):
    """Seconds that the steps of an update took."""

    prefetch: float | None = None
    cancel: float | None = None
    transfer: float | None = None
    commit: float | None = None
    steps: Annotated[dict[str, float] | None, Field(max_length=MAX_STEPS)] = None
    """Of ``transfer``, on the slowest rank."""


class WeightUpdate(_Part):
    """The newest weight update."""

    target: Name
    phase: Annotated[str, Field(max_length=64)]
    attempt: Annotated[int, Field(ge=0)] = 0
    started_at: str | None = None
    finished_at: str | None = None
    paused_seconds: float | None = None
    seconds: UpdateSeconds | None = None
    bytes: Annotated[int | None, Field(ge=0)] = None
    transport: Annotated[str | None, Field(max_length=64)] = None
    mode: Annotated[str | None, Field(max_length=64)] = None
    path: Annotated[str | None, Field(max_length=64)] = None
    """How the ranks put the bytes in place."""
    note: Annotated[str | None, Field(max_length=MAX_NOTE)] = None
    """Why transport, mode or path are not the fastest ones."""
    message: Message = ""
    by: Annotated[str | None, Field(max_length=128)] = None
    """The field manager of ``spec.weightVersion`` when the operator first saw this update."""


MAX_HISTORY: Final = 10


class FinishedUpdate(_Part):
    """One line of the history."""

    version: Name
    step: Annotated[int | None, Field(ge=0)] = None
    source: CommittedSource | None = None
    phase: Annotated[str, Field(max_length=64)]
    """``Committed`` or ``Rejected``."""
    started_at: str | None = None
    finished_at: str | None = None
    paused_seconds: float | None = None
    by: Annotated[str | None, Field(max_length=128)] = None


class PodStatus(_Part):
    """One pod of the replica."""

    name: Name
    rank: Annotated[int, Field(ge=0)] = 0
    node: Name = ""
    ready: bool = False
    boot_id: Annotated[str, Field(alias="bootID", max_length=128)] = ""
    phase: Annotated[str, Field(max_length=64)] = ""
    weight_version: Name = ""
    message: Message = ""


class RestartCount(_Part):
    """How often something ended the replica's pod or its engine."""

    reason: Annotated[str, Field(max_length=128)]
    count: Annotated[int, Field(ge=0)] = 0


class Restarts(_Part):
    """What ended the replica so far. The operator's only memory of it: it is written before a pod
    that failed is replaced.
    """

    total: Annotated[int, Field(ge=0)] = 0
    consecutive: Annotated[int, Field(ge=0)] = 0
    """Failures in a row, none of which ``resetAfterSeconds`` of availability followed."""
    by_reason: Annotated[tuple[RestartCount, ...], Field(max_length=32)] = ()
    last_at: str | None = None
    last_reason: Annotated[str, Field(max_length=128)] = ""
    message: Message = ""
    pod_hash: Annotated[str, Field(max_length=64)] = ""
    """Of the spec that ``consecutive`` speaks of."""
    pod_uid: Annotated[str, Field(alias="podUID", max_length=128)] = ""
    """The pod that was counted last."""
    pod_ended: bool = False
    """Whether its own end was counted, which happens once."""
    engine_exits: Annotated[int, Field(ge=0)] = 0
    """Exits of its engine that were counted."""


class ReplicaStatus(_Part):
    """What the operator saw."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    phase: Annotated[str, Field(max_length=64)] = ""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16)] = ()
    weight_version: Name = ""
    last_committed: LastCommitted | None = None
    weight_update: WeightUpdate | None = None
    history: Annotated[tuple[FinishedUpdate, ...], Field(max_length=MAX_HISTORY)] = ()
    """The newest first."""
    endpoint: Annotated[str, Field(max_length=512)] = ""
    pods: Annotated[tuple[PodStatus, ...], Field(max_length=64)] = ()
    restarts: Restarts | None = None

    @classmethod
    def parse(cls, raw: Any) -> Self:
        """Return the status of a CR; what cannot be read counts as not there."""
        try:
            return cls.model_validate(raw or {})
        except ValidationError:
            return cls()

    def dump(self) -> dict[str, Any]:
        """Return the JSON object for the API server, without empty optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of that type, if there is one."""
        return next((c for c in self.conditions if c.type == kind), None)

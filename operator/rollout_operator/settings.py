"""The operator's settings, from environment variables that begin with ROLLOUT_OPERATOR_."""

import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rollout_operator.api.selector import Selector
from rollout_pod.protocol import ADMIN_PORT

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Settings(BaseSettings):
    """Read once, at the start."""

    model_config = SettingsConfigDict(
        env_prefix="ROLLOUT_OPERATOR_",
        frozen=True,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )

    watch_namespaces: Annotated[tuple[str, ...], NoDecode] = ()
    """Comma-separated; empty: the operator's own namespace."""
    cluster_wide: bool = False
    default_image: str = "localhost/rollout-pod:dev"
    """What pods run where neither ``spec.image`` nor the template names an image."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    replica_selector: str = ""
    """A label selector: replicas without these labels are another operator's."""
    leader_election: bool = True
    """Work only while this operator holds the Lease; others wait, with watches that are warm."""
    lease_name: str = "rollout-operator"
    lease_namespace: str = ""
    """Empty: the operator's own namespace, else the only one that it watches."""
    lease_seconds: Annotated[int, Field(ge=2, le=600)] = 12
    """So long after its last renewal a holder that died or is cut off is followed by another."""
    identity: str = ""
    """Who holds the Lease. In a cluster the pod's uid: its next container goes on at once. Empty:
    another at each start."""
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 9090
    """Serves /metrics; 0 takes any free port."""
    probe_port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """Serves /healthz and /readyz; 0 takes any free port."""
    probe_address: str = "0.0.0.0"  # noqa: S104 - kubelet asks from outside
    resync_seconds: Annotated[float, Field(ge=1, le=86400)] = 300.0
    """Everything is read afresh so often, give or take a tenth."""
    hang_seconds: Annotated[float, Field(ge=1, le=86400)] = 60.0
    """A pass that is overdue by so much makes the liveness probe fail."""
    pod_access: Literal["direct", "proxy"] = "direct"
    """How pods are reached: at their addresses, or from anywhere through the API server's proxy."""
    admin_port: Annotated[int, Field(ge=1, le=65535)] = ADMIN_PORT
    """Where pods are asked. They listen there; anything else has to forward to it."""

    @field_validator("watch_namespaces", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("replica_selector")
    @classmethod
    def _selects(cls, value: str) -> str:
        return Selector.parse(value).text

    @model_validator(mode="after")
    def _one_scope(self) -> Self:
        if self.cluster_wide and self.watch_namespaces:
            raise ValueError(
                "ROLLOUT_OPERATOR_CLUSTER_WIDE and ROLLOUT_OPERATOR_WATCH_NAMESPACES exclude each "
                "other: unset one of them"
            )
        return self

    def namespaces(self) -> tuple[str, ...]:
        """Return the namespaces to watch; empty means all.

        Raises:
            ValueError: none is named and the operator's own is not known.
        """
        if self.cluster_wide:
            return ()
        if self.watch_namespaces:
            return self.watch_namespaces
        own = _own_namespace()
        if not own:
            raise ValueError(
                "no namespace to watch: set ROLLOUT_OPERATOR_WATCH_NAMESPACES, POD_NAMESPACE or "
                "ROLLOUT_OPERATOR_CLUSTER_WIDE"
            )
        return (own,)

    def lease(self) -> tuple[str, str] | None:
        """Return namespace and name of the Lease; None where the operator works without one.

        Raises:
            ValueError: no namespace is named, and none follows from the others.
        """
        if not self.leader_election:
            return None
        namespace = self.lease_namespace or _own_namespace()
        if not namespace and len(self.watch_namespaces) == 1:
            (namespace,) = self.watch_namespaces
        if not namespace:
            raise ValueError(
                "no namespace for the Lease: set ROLLOUT_OPERATOR_LEASE_NAMESPACE or "
                "POD_NAMESPACE, or ROLLOUT_OPERATOR_LEADER_ELECTION=false where no other operator "
                "serves the same replicas"
            )
        return namespace, self.lease_name


def _own_namespace() -> str:
    own = os.environ.get("POD_NAMESPACE", "").strip()
    if not own and _NAMESPACE_FILE.exists():
        own = _NAMESPACE_FILE.read_text().strip()
    return own

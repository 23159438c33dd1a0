"""Names that stand in the cluster: the API group, labels, annotations, children."""

from typing import Final

GROUP: Final = "rollout.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "RolloutReplica"
PLURAL: Final = "rolloutreplicas"

MANAGER: Final = "rollout-operator"
"""Field manager, event source and the value of the managed-by label."""

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
REPLICA_LABEL: Final = f"{GROUP}/replica"
RANK_LABEL: Final = f"{GROUP}/rank"
ROLE_LABEL: Final = f"{GROUP}/role"
ROLE_HEAD: Final = "head"
ROLE_NODE: Final = "node"
GROUP_LABEL: Final = f"{GROUP}/group"
"""Of a pod of rank 1 or more: the uid of the head's pod that it follows."""
HASH_ANNOTATION: Final = f"{GROUP}/pod-hash"

ENGINE: Final = "engine"
WEIGHTS: Final = "weights"

TOKEN_KEY: Final = "token"  # noqa: S105 - the key's name, not a token

MAX_NAME: Final = 52
"""Longest name of a replica: leaves room for the children's suffixes within 63 characters."""


MAX_NODES: Final = 64


def pod_name(replica: str, rank: int) -> str:
    """Return the name (and hostname) of the pod that holds ``rank``."""
    return f"{replica}-{rank}"


def secret_name(replica: str) -> str:
    """Return the name of the Secret with the admin port's token."""
    return f"{replica}-admin"


def service_name(replica: str) -> str:
    """Return the name of the Service that callers use."""
    return replica


def nodes_service_name(replica: str) -> str:
    """Return the name of the headless Service that gives the pods their DNS names."""
    return f"{replica}-nodes"


def labels(replica: str) -> dict[str, str]:
    """Return the labels that every child carries."""
    return {
        "app.kubernetes.io/name": "rollout-replica",
        "app.kubernetes.io/instance": replica,
        "app.kubernetes.io/part-of": "rollout-replica",
        MANAGED_BY_LABEL: MANAGER,
        REPLICA_LABEL: replica,
    }

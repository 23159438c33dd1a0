"""Builds the replica's children. The contract between containers is in docs and in this file."""

import hashlib
import json
from typing import Any, Final

from rollout_operator.api import names
from rollout_operator.api.quantity import parse_bytes
from rollout_operator.api.replica import Replica
from rollout_operator.api.spec import DEFAULT_ENGINE, RolloutSpec, StagingPlace
from rollout_operator.plan import containers
from rollout_operator.plan import template as merge
from rollout_pod.protocol import (
    ADMIN_PORT,
    DATA_PORT,
    DESIRED_ANNOTATION,
    DesiredDocument,
)

JsonObject = dict[str, Any]

USER: Final = 10001
GRACE_MARGIN_S: Final = 15
"""Beyond the drain: for aborting what is left and for the engine's own end."""
SHM_MARGIN: Final = 1 << 30
"""Bytes of the shared volume beyond ``weights.hostMemory``.

The agent may fill ``hostMemory`` to the last byte, and vLLM (its message rings, up to 240 MiB each)
and NCCL keep theirs in the same volume. A limit reserves nothing: too much of it costs nothing.
"""


def pod_hash(spec: RolloutSpec) -> str:
    """Return a digest of what a running pod cannot take on: a change replaces it.

    Covers only what a person wrote, never the operator's own defaults: upgrading the operator
    restarts nothing. A field that later versions add must be left out while it is not set.
    """
    hashed: JsonObject = {
        "model": spec.model,
        "image": spec.image,
        "engineArgs": list(spec.engine_args),
        "gpus": spec.gpus,
        "loadTimeoutSeconds": spec.load_timeout_seconds,
        "hostMemory": parse_bytes(spec.weights.host_memory),
        "drainTimeoutSeconds": spec.drain_timeout_seconds,
        "template": spec.template,
    }
    if spec.nodes != 1:
        hashed["nodes"] = spec.nodes
    if spec.engine != DEFAULT_ENGINE:
        hashed["engine"] = spec.engine
    if spec.weights.staging is not StagingPlace.HOST:
        hashed["staging"] = spec.weights.staging.value
    source = spec.weights.source
    if source is not None and source.secret_ref is not None:
        hashed["secretRef"] = source.secret_ref.name
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def secret(replica: Replica) -> JsonObject:
    """Build the Secret of the admin port, still without its token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _meta(replica, names.secret_name(replica.name)),
        "type": "Opaque",
    }


def services(replica: Replica) -> tuple[JsonObject, JsonObject]:
    """Build the Service for callers and the headless one for the pods' DNS names."""
    # by number: a name would lead to the first container that has a port of that name
    data = {"name": "data", "port": DATA_PORT, "protocol": "TCP", "targetPort": DATA_PORT}
    admin = {"name": "admin", "port": ADMIN_PORT, "protocol": "TCP", "targetPort": ADMIN_PORT}
    ours = {names.REPLICA_LABEL: replica.name, names.MANAGED_BY_LABEL: names.MANAGER}
    return (
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _meta(replica, names.service_name(replica.name)),
            "spec": {"selector": {**ours, names.ROLE_LABEL: names.ROLE_HEAD}, "ports": [data]},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _meta(replica, names.nodes_service_name(replica.name)),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": ours,
                "ports": [data, admin],
            },
        },
    )


def pod(
    replica: Replica,
    spec: RolloutSpec,
    document: DesiredDocument,
    *,
    default_image: str,
    image_pull_policy: str,
    rank: int = 0,
    group: str = "",
) -> JsonObject:
    """Build the pod of ``rank``; of one that is not 0, ``group`` is the uid of the head's pod.

    Raises:
        TemplateError: ``spec.template`` has the wrong shape.
    """
    labels, annotations, pod_spec = merge.pod_template(spec.template)
    name = names.pod_name(replica.name, rank)
    engine = merge.take(pod_spec["containers"], names.ENGINE)
    weights = merge.take(pod_spec["initContainers"], names.WEIGHTS)
    # a template may name the image once, for the engine
    image = spec.image or engine.get("image") or default_image
    place = containers.Place(rank=rank, nodes=spec.nodes, group=group, head=_admin_of_head(replica))
    engine = containers.engine(
        spec, engine, image=image, pull_policy=image_pull_policy, place=place
    )
    weights = containers.weights(
        spec,
        weights,
        image=spec.image or weights.get("image") or image,
        pull_policy=image_pull_policy,
    )
    env = _env(replica)
    pod_spec |= {
        "hostname": name,
        "subdomain": names.nodes_service_name(replica.name),
        # a rank that comes back alone finds an engine that does not know it
        "restartPolicy": "Always" if spec.nodes == 1 else "Never",
        "terminationGracePeriodSeconds": spec.drain_timeout_seconds + GRACE_MARGIN_S,
        "initContainers": [
            _inside(c, env, "initContainers")
            for c in merge.put(pod_spec["initContainers"], weights)
        ],
        "containers": [
            _inside(c, env, "containers") for c in merge.put(pod_spec["containers"], engine)
        ],
        "volumes": merge.override(
            pod_spec["volumes"],
            _volumes(replica, spec),
            key="name",
            where="template.spec.volumes",
        ),
        "securityContext": merge.defaulted(
            pod_spec.get("securityContext"),
            {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "template.spec.securityContext",
        ),
    }
    pod_spec.setdefault("automountServiceAccountToken", False)
    pod_spec.setdefault("enableServiceLinks", False)
    meta = _meta(replica, name)
    meta["labels"] = {
        **labels,
        **meta["labels"],
        names.RANK_LABEL: str(rank),
        names.ROLE_LABEL: names.ROLE_NODE if rank else names.ROLE_HEAD,
        **({names.GROUP_LABEL: group} if rank else {}),
    }
    meta["annotations"] = {
        **annotations,
        names.HASH_ANNOTATION: pod_hash(spec),
        **({} if rank else {DESIRED_ANNOTATION: document.model_dump_json()}),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod_spec}


def _admin_of_head(replica: Replica) -> str:
    head, service = names.pod_name(replica.name, 0), names.nodes_service_name(replica.name)
    return f"{head}.{service}.{replica.namespace}.svc:{ADMIN_PORT}"


def _env(replica: Replica) -> list[JsonObject]:
    def field(path: str) -> JsonObject:
        return {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}

    return [
        {"name": "ROLLOUT_RUN_DIR", "value": containers.RUN_DIR},
        {"name": "ROLLOUT_SHM_DIR", "value": containers.SHM_DIR},
        {"name": "ROLLOUT_REPLICA", "value": replica.name},
        {"name": "ROLLOUT_NAMESPACE", "value": replica.namespace},
        {"name": "POD_NAME", "valueFrom": field("metadata.name")},
        {"name": "POD_UID", "valueFrom": field("metadata.uid")},
        {"name": "POD_IP", "valueFrom": field("status.podIP")},
    ]


def _inside(container: JsonObject, env: list[JsonObject], kind: str) -> JsonObject:
    """With all that a trainer needs to find the engine's ranks and to share memory with them.

    A folder that the template mounts something else at is left to it.
    """
    where = f"template.spec.{kind}[{container['name']}]"
    theirs = merge.override(
        container.get("volumeMounts"), [], key="mountPath", where=f"{where}.volumeMounts"
    )
    taken = {merge.same_path(mount["mountPath"]) for mount in theirs}
    ours = [m for m in containers.shared_memory() if m["mountPath"] not in taken]
    return {
        **container,
        "env": merge.override(container.get("env"), env, key="name", where=f"{where}.env"),
        "volumeMounts": [*theirs, *ours],
    }


def _volumes(replica: Replica, spec: RolloutSpec) -> list[JsonObject]:
    size = str(parse_bytes(spec.weights.host_memory) + SHM_MARGIN)
    field = {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{DESIRED_ANNOTATION}']"}
    secret_source = {"secretName": names.secret_name(replica.name), "defaultMode": 0o440}
    return [
        {"name": "run", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        {"name": "admin", "secret": secret_source},
        {"name": "podinfo", "downwardAPI": {"items": [{"path": "desired", "fieldRef": field}]}},
        {"name": "tmp", "emptyDir": {}},
    ]


def _meta(replica: Replica, name: str) -> JsonObject:
    return {
        "name": name,
        "namespace": replica.namespace,
        "labels": names.labels(replica.name),
        "ownerReferences": [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": replica.name,
                "uid": replica.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }

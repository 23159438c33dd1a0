"""Builds the two containers that every replica has. They are the contract with rollout_pod."""

import math
from dataclasses import dataclass
from typing import Any, Final

from rollout_operator.api import names
from rollout_operator.api.quantity import parse_bytes
from rollout_operator.api.spec import DEFAULT_ENGINE, RolloutSpec, StagingPlace
from rollout_operator.plan import template as merge
from rollout_pod.protocol import ADMIN_PORT, DATA_PORT

JsonObject = dict[str, Any]

RUN_DIR: Final = "/run/rollout"
SHM_DIR: Final = "/dev/shm"
TOKEN_DIR: Final = "/etc/rollout/admin"  # noqa: S105 - a folder
PODINFO_DIR: Final = "/etc/rollout/podinfo"
TMP_DIR: Final = "/tmp"  # noqa: S108 - a volume of the pod
STARTUP_PERIOD_S: Final = 5
GPU_RESOURCE: Final = "nvidia.com/gpu"
_PARALLEL_FLAGS: Final = (
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
    "--data-parallel-size",
    "-dp",
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Of a pod among those of its replica."""

    rank: int = 0
    nodes: int = 1
    group: str = ""
    """The uid of the head's pod; empty at the head."""
    head: str = ""
    """The head's admin port."""


def engine(
    spec: RolloutSpec, theirs: JsonObject, *, image: str, pull_policy: str, place: Place
) -> JsonObject:
    """Build the engine's container over the template's entry of that name.

    Raises:
        TemplateError: a field of ``theirs`` has the wrong shape.
    """
    where = f"template.spec.containers[{names.ENGINE}]"
    resources = merge.defaulted(theirs.get("resources"), {}, f"{where}.resources")
    if spec.gpus:
        limits = merge.defaulted(resources.get("limits"), {}, f"{where}.resources.limits")
        resources["limits"] = {**limits, GPU_RESOURCE: str(spec.gpus)}
        requests = resources.get("requests")
        if isinstance(requests, dict) and GPU_RESOURCE in requests:
            resources["requests"] = {**requests, GPU_RESOURCE: str(spec.gpus)}
    args = [
        *("--model", spec.model),
        *("--engine", spec.engine),
        *("--data-address", f"0.0.0.0:{DATA_PORT}"),
        *("--admin-address", f"0.0.0.0:{ADMIN_PORT}"),
        *("--run-dir", RUN_DIR),
        *("--token-dir", TOKEN_DIR),
        *(() if place.rank else ("--desired-file", f"{PODINFO_DIR}/desired")),
        *("--agent", "external"),
        *("--drain-timeout", str(spec.drain_timeout_seconds)),
        # left out where it is the default: an image of an older release knows no such option
        *(
            ("--staging", spec.weights.staging.value)
            if spec.weights.staging is not StagingPlace.HOST
            else ()
        ),
        *_among_others(spec, place),
        "--",
        *engine_args(spec),
    ]
    ports = [
        {"name": "data", "containerPort": DATA_PORT, "protocol": "TCP"},
        {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
    ]
    mounts = [
        *_shared_mounts(),
        {"name": "admin", "mountPath": TOKEN_DIR, "readOnly": True},
        {"name": "podinfo", "mountPath": PODINFO_DIR, "readOnly": True},
    ]
    return {
        **_common(theirs, where, image=image, pull_policy=pull_policy),
        "command": ["rollout-pod", "follow" if place.rank else "serve"],
        "args": args,
        "ports": merge.override(
            theirs.get("ports"), ports, key="containerPort", where=f"{where}.ports"
        ),
        "resources": resources,
        "volumeMounts": merge.override(
            theirs.get("volumeMounts"),
            mounts,
            key="mountPath",
            where=f"{where}.volumeMounts",
            alike=merge.same_path,
        ),
        "startupProbe": _probe(
            "/startupz",
            periodSeconds=STARTUP_PERIOD_S,
            failureThreshold=max(1, math.ceil(spec.load_timeout_seconds / STARTUP_PERIOD_S)),
        ),
        "readinessProbe": _probe("/readyz", periodSeconds=2, failureThreshold=2),
        "livenessProbe": _probe("/healthz", periodSeconds=10, failureThreshold=3),
    }


def weights(spec: RolloutSpec, theirs: JsonObject, *, image: str, pull_policy: str) -> JsonObject:
    """Build the weights agent, a native sidecar, over the template's entry of that name.

    Raises:
        TemplateError: a field of ``theirs`` has the wrong shape.
    """
    where = f"template.spec.initContainers[{names.WEIGHTS}]"
    memory = parse_bytes(spec.weights.host_memory)
    resources = merge.defaulted(theirs.get("resources"), {}, f"{where}.resources")
    limits = merge.defaulted(resources.get("limits"), {}, f"{where}.resources.limits")
    if "memory" in limits:
        # tmpfs is charged to its writer
        try:
            limit = parse_bytes(limits["memory"])
        except ValueError as error:
            raise merge.TemplateError(f"{where}.resources.limits.memory: {error}") from error
        resources["limits"] = {**limits, "memory": str(limit + memory)}
    source = spec.weights.source
    credentials = {}
    if source is not None and source.secret_ref is not None:
        given = theirs.get("envFrom")
        if not isinstance(given, list | None):
            raise merge.TemplateError(f"{where}.envFrom: must be a list")
        # of two sources of a variable the later one counts
        secret = {"secretRef": {"name": source.secret_ref.name}}
        credentials["envFrom"] = [*(given or ()), secret]
    return {
        **_common(theirs, where, image=image, pull_policy=pull_policy),
        "command": ["rollout-pod", "weights"],
        "args": [
            *("--run-dir", RUN_DIR),
            *("--shm-dir", SHM_DIR),
            *("--host-memory", str(memory)),
        ],
        "restartPolicy": "Always",
        "resources": resources,
        **credentials,
        "volumeMounts": merge.override(
            theirs.get("volumeMounts"),
            _shared_mounts(),
            key="mountPath",
            where=f"{where}.volumeMounts",
            alike=merge.same_path,
        ),
    }


def engine_args(spec: RolloutSpec) -> list[str]:
    """Return the engine's arguments.

    vLLM gets one tensor-parallel rank a GPU, unless the person says otherwise; how another engine
    is told of its GPUs only the person knows.
    """
    args = list(spec.engine_args)
    if spec.engine != DEFAULT_ENGINE:
        return args
    flags = {arg.split("=", 1)[0].replace("_", "-") for arg in args}
    if (spec.gpus or spec.nodes > 1) and flags.isdisjoint(_PARALLEL_FLAGS):
        args += ["--tensor-parallel-size", str(max(spec.gpus, 1) * spec.nodes)]
    return args


def join_timeout_s(spec: RolloutSpec) -> int:
    """Return how long the pods of one engine wait for each other: their error is to come before
    the startup probe gives up, whose words say less.
    """
    return max(1, spec.load_timeout_seconds * 9 // 10)


def _among_others(spec: RolloutSpec, place: Place) -> list[str]:
    """What a pod has to know to find the others of its engine."""
    if place.nodes == 1:
        return []
    own = ("--node-rank", str(place.rank), "--head", place.head) if place.rank else ()
    # of variables that every container of ours has
    return [
        *("--nodes", str(place.nodes)),
        *own,
        *("--group", place.group or "$(POD_UID)"),
        *("--advertise", "$(POD_IP)"),
        *("--join-timeout", str(join_timeout_s(spec))),
    ]


def _common(theirs: JsonObject, where: str, *, image: str, pull_policy: str) -> JsonObject:
    return {
        **theirs,
        "image": image,
        "imagePullPolicy": theirs.get("imagePullPolicy") or pull_policy,
        "env": merge.override(
            theirs.get("env"),
            [] if _sets_home(theirs) else [{"name": "HOME", "value": TMP_DIR}],
            key="name",
            where=f"{where}.env",
        ),
        "securityContext": merge.defaulted(
            theirs.get("securityContext"),
            {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            f"{where}.securityContext",
        ),
        # what a process printed last says more than its exit code
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _sets_home(container: JsonObject) -> bool:
    env = container.get("env")
    return isinstance(env, list) and any(
        isinstance(item, dict) and item.get("name") == "HOME" for item in env
    )


def shared_memory() -> list[JsonObject]:
    """Return the mounts by which a container reaches the engine's ranks."""
    return [{"name": "run", "mountPath": RUN_DIR}, {"name": "shm", "mountPath": SHM_DIR}]


def _shared_mounts() -> list[JsonObject]:
    return [*shared_memory(), {"name": "tmp", "mountPath": TMP_DIR}]


def _probe(path: str, **timing: int) -> JsonObject:
    return {"httpGet": {"path": path, "port": "data"}, "timeoutSeconds": 5, **timing}

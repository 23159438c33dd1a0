"""The children, field by field."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_operator.plan import manifests
from rollout_operator.plan.containers import engine_args
from rollout_operator.plan.document import render_document
from rollout_operator.plan.template import TemplateError
from tests.support.operator_objects import UID, replica

OWNER = {
    "apiVersion": "rollout.dev/v1alpha1",
    "kind": "RolloutReplica",
    "name": "qwen",
    "uid": UID,
    "controller": True,
    "blockOwnerDeletion": True,
}
LABELS = {
    "app.kubernetes.io/name": "rollout-replica",
    "app.kubernetes.io/instance": "qwen",
    "app.kubernetes.io/part-of": "rollout-replica",
    "app.kubernetes.io/managed-by": "rollout-operator",
    "rollout.dev/replica": "qwen",
}
ENV = [
    {"name": "ROLLOUT_RUN_DIR", "value": "/run/rollout"},
    {"name": "ROLLOUT_SHM_DIR", "value": "/dev/shm"},
    {"name": "ROLLOUT_REPLICA", "value": "qwen"},
    {"name": "ROLLOUT_NAMESPACE", "value": "ns"},
    {
        "name": "POD_NAME",
        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}},
    },
    {
        "name": "POD_UID",
        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}},
    },
    {
        "name": "POD_IP",
        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}},
    },
]
HOME = {"name": "HOME", "value": "/tmp"}
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
SHARED = [
    {"name": "run", "mountPath": "/run/rollout"},
    {"name": "shm", "mountPath": "/dev/shm"},
    {"name": "tmp", "mountPath": "/tmp"},
]


def build(**spec: Any) -> dict[str, Any]:
    wanted = replica(**spec)
    assert wanted.spec is not None
    return manifests.pod(
        wanted,
        wanted.spec,
        render_document(wanted, wanted.spec),
        default_image="pod:1",
        image_pull_policy="IfNotPresent",
    )


def by_name(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def test_the_smallest_pod_exactly():
    made = build(loadTimeoutSeconds=601, engineArgs=["--max-model-len=64"])
    wanted = replica(loadTimeoutSeconds=601, engineArgs=["--max-model-len=64"])
    annotations = made["metadata"].pop("annotations")
    assert annotations.keys() == {"rollout.dev/pod-hash", "rollout.dev/desired"}
    assert annotations["rollout.dev/pod-hash"] == manifests.pod_hash(wanted.spec)
    assert json.loads(annotations["rollout.dev/desired"]) == {
        "owner": UID,
        "generation": 3,
        "paused": False,
        "weights": None,
        "fallback": None,
        "interruption": {"mode": "abort", "timeout_s": 60.0},
        "sleep": None,
        "bucket_bytes": 268435456,
        "update_timeout_s": 600.0,
        "max_attempts": 3,
        "transport": "auto",
    }
    field = {"apiVersion": "v1", "fieldPath": "metadata.annotations['rollout.dev/desired']"}
    assert made == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "qwen-0",
            "namespace": "ns",
            "labels": {**LABELS, "rollout.dev/rank": "0", "rollout.dev/role": "head"},
            "ownerReferences": [OWNER],
        },
        "spec": {
            "hostname": "qwen-0",
            "subdomain": "qwen-nodes",
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 45,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "runAsGroup": 10001,
                "fsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "initContainers": [
                {
                    "name": "weights",
                    "image": "pod:1",
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["rollout-pod", "weights"],
                    "args": [
                        *("--run-dir", "/run/rollout"),
                        *("--shm-dir", "/dev/shm"),
                        *("--host-memory", str(16 << 30)),
                    ],
                    "restartPolicy": "Always",
                    "resources": {},
                    "env": [*ENV, HOME],
                    "securityContext": RESTRICTED,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": SHARED,
                }
            ],
            "containers": [
                {
                    "name": "engine",
                    "image": "pod:1",
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["rollout-pod", "serve"],
                    "args": [
                        *("--model", "m"),
                        *("--engine", "vllm"),
                        *("--data-address", "0.0.0.0:8000"),
                        *("--admin-address", "0.0.0.0:8001"),
                        *("--run-dir", "/run/rollout"),
                        *("--token-dir", "/etc/rollout/admin"),
                        *("--desired-file", "/etc/rollout/podinfo/desired"),
                        *("--agent", "external"),
                        *("--drain-timeout", "30"),
                        "--",
                        "--max-model-len=64",
                    ],
                    "ports": [
                        {"name": "data", "containerPort": 8000, "protocol": "TCP"},
                        {"name": "admin", "containerPort": 8001, "protocol": "TCP"},
                    ],
                    "resources": {},
                    "env": [*ENV, HOME],
                    "securityContext": RESTRICTED,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": [
                        *SHARED,
                        {"name": "admin", "mountPath": "/etc/rollout/admin", "readOnly": True},
                        {"name": "podinfo", "mountPath": "/etc/rollout/podinfo", "readOnly": True},
                    ],
                    "startupProbe": {
                        "httpGet": {"path": "/startupz", "port": "data"},
                        "timeoutSeconds": 5,
                        "periodSeconds": 5,
                        "failureThreshold": 121,
                    },
                    "readinessProbe": {
                        "httpGet": {"path": "/readyz", "port": "data"},
                        "timeoutSeconds": 5,
                        "periodSeconds": 2,
                        "failureThreshold": 2,
                    },
                    "livenessProbe": {
                        "httpGet": {"path": "/healthz", "port": "data"},
                        "timeoutSeconds": 5,
                        "periodSeconds": 10,
                        "failureThreshold": 3,
                    },
                }
            ],
            "volumes": [
                {"name": "run", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(17 << 30)}},
                {"name": "admin", "secret": {"secretName": "qwen-admin", "defaultMode": 0o440}},
                {
                    "name": "podinfo",
                    "downwardAPI": {"items": [{"path": "desired", "fieldRef": field}]},
                },
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


def test_secret_and_services_exactly():
    data = {"name": "data", "port": 8000, "protocol": "TCP", "targetPort": 8000}
    admin = {"name": "admin", "port": 8001, "protocol": "TCP", "targetPort": 8001}
    ours = {"rollout.dev/replica": "qwen", "app.kubernetes.io/managed-by": "rollout-operator"}

    def meta(name: str) -> dict[str, Any]:
        return {"name": name, "namespace": "ns", "labels": LABELS, "ownerReferences": [OWNER]}

    assert manifests.secret(replica()) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta("qwen-admin"),
        "type": "Opaque",
    }
    assert manifests.services(replica()) == (
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta("qwen"),
            "spec": {"selector": {**ours, "rollout.dev/role": "head"}, "ports": [data]},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta("qwen-nodes"),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": ours,
                "ports": [data, admin],
            },
        },
    )


TEMPLATE = {
    "metadata": {
        "labels": {"team": "rl", "rollout.dev/role": "mine"},
        "annotations": {"note": "x", "rollout.dev/desired": "mine"},
    },
    "spec": {
        "nodeSelector": {"gpu": "yes"},
        "restartPolicy": "Never",
        "automountServiceAccountToken": True,
        "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
        "volumes": [
            {"name": "ckpt", "hostPath": {"path": "/ckpt"}},
            {"name": "shm", "emptyDir": {}},
        ],
        "initContainers": [
            {"name": "fetch", "image": "fetch:1"},
            {"name": "weights", "resources": {"limits": {"memory": "1Gi"}}},
        ],
        "containers": [
            {"name": "trainer", "image": "trainer:1"},
            {
                "name": "engine",
                "command": ["sh"],
                "args": ["-c", "sleep 1"],
                "env": [
                    {"name": "OMP_NUM_THREADS", "value": "1"},
                    {"name": "POD_IP", "value": "mine"},
                    {"name": "HOME", "value": "/root"},
                ],
                "ports": [{"containerPort": 8000, "name": "mine"}, {"containerPort": 9999}],
                "volumeMounts": [
                    {"name": "ckpt", "mountPath": "/ckpt"},
                    {"name": "ckpt", "mountPath": "/dev/shm"},
                ],
                "resources": {"limits": {"cpu": "4", "nvidia.com/gpu": "8"}},
                "securityContext": {"readOnlyRootFilesystem": False},
                "livenessProbe": {"exec": {"command": ["true"]}},
                "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
            },
        ],
    },
}


def test_a_template_is_merged_by_name():
    made = build(template=TEMPLATE, gpus=2, weights={"hostMemory": "2Gi"})
    spec, meta = made["spec"], made["metadata"]
    assert meta["labels"]["team"] == "rl"
    assert meta["labels"]["rollout.dev/role"] == "head"
    assert meta["annotations"]["note"] == "x"
    assert meta["annotations"]["rollout.dev/desired"].startswith("{")
    assert spec["nodeSelector"] == {"gpu": "yes"}
    assert spec["restartPolicy"] == "Always"
    assert spec["automountServiceAccountToken"] is True
    assert spec["securityContext"]["runAsUser"] == 0
    assert spec["securityContext"]["fsGroup"] == 10001
    assert [v["name"] for v in spec["volumes"]] == ["run", "shm", "admin", "podinfo", "tmp", "ckpt"]
    assert by_name(spec["volumes"], "shm")["emptyDir"]["sizeLimit"] == str(3 << 30)
    # order is kept, and every container gets the variables
    assert [c["name"] for c in spec["initContainers"]] == ["fetch", "weights"]
    assert [c["name"] for c in spec["containers"]] == ["trainer", "engine"]
    assert spec["containers"][0]["env"] == ENV
    assert spec["initContainers"][0]["env"] == ENV
    assert spec["containers"][0]["image"] == "trainer:1"
    engine = spec["containers"][1]
    assert engine["command"] == ["rollout-pod", "serve"]
    assert engine["args"][0] == "--model"
    assert engine["env"] == [
        *ENV,
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {"name": "HOME", "value": "/root"},
    ]
    assert [p["containerPort"] for p in engine["ports"]] == [8000, 8001, 9999]
    assert engine["ports"][0]["name"] == "data"
    mounts = {m["mountPath"]: m["name"] for m in engine["volumeMounts"]}
    assert mounts["/ckpt"] == "ckpt"
    assert mounts["/dev/shm"] == "shm"
    assert engine["resources"]["limits"] == {"cpu": "4", "nvidia.com/gpu": "2"}
    assert engine["securityContext"]["readOnlyRootFilesystem"] is False
    assert engine["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "exec" not in engine["livenessProbe"]
    assert engine["lifecycle"] == {"preStop": {"sleep": {"seconds": 1}}}
    # tmpfs is charged to its writer
    assert spec["initContainers"][1]["resources"]["limits"]["memory"] == str(3 << 30)


def test_a_trainer_beside_the_engine_finds_its_ranks():
    """Also one whose container shares other folders already; what it mounts there is its own."""
    own = [{"name": "mine", "mountPath": "/dev//shm/"}, {"name": "mine", "mountPath": "/data"}]
    template = {
        "spec": {
            "containers": [{"name": "trainer"}, {"name": "apart", "volumeMounts": own}],
            "initContainers": [{"name": "first"}],
        }
    }
    spec = build(template=template, weights={"source": {"push": {}}})["spec"]
    run, shm = (
        {"name": "run", "mountPath": "/run/rollout"},
        {"name": "shm", "mountPath": "/dev/shm"},
    )
    everyone = [*spec["containers"], *spec["initContainers"]]
    assert len(everyone) == 5
    for made in everyone:
        assert {e["name"]: e.get("value") for e in made["env"]}["ROLLOUT_SHM_DIR"] == "/dev/shm"
        assert run in made["volumeMounts"]
    assert by_name(spec["containers"], "trainer")["volumeMounts"] == [run, shm]
    assert by_name(spec["initContainers"], "first")["volumeMounts"] == [run, shm]
    assert by_name(spec["containers"], "apart")["volumeMounts"] == [*own, run]
    with pytest.raises(TemplateError, match=r"containers\[trainer\].volumeMounts\[0\]"):
        build(template={"spec": {"containers": [{"name": "trainer", "volumeMounts": [1]}]}})


@pytest.mark.parametrize(
    "path",
    ["/run/rollout/", "/run//rollout", "//run/rollout", "/run/x/../rollout/.", "run/rollout"],
)
def test_no_way_to_write_a_mount_path_evades_ours(path: str):
    mounts = [{"name": "mine", "mountPath": path}, {"name": "mine", "mountPath": "/run/other/"}]
    for kind, name in (("containers", "engine"), ("initContainers", "weights")):
        template = {"spec": {kind: [{"name": name, "volumeMounts": mounts}]}}
        made = by_name(build(template=template)["spec"][kind], name)["volumeMounts"]
        assert [m["mountPath"] for m in made if m["name"] == "mine"] == ["/run/other/"]


def test_credentials_are_the_agents_alone():
    theirs = [{"configMapRef": {"name": "proxy"}}]
    made = build(
        weights={"source": {"url": "s3://b/{version}", "secretRef": {"name": "creds"}}},
        template={
            "spec": {"initContainers": [{"name": "weights", "envFrom": theirs}, {"name": "x"}]}
        },
    )["spec"]
    weights = by_name(made["initContainers"], "weights")
    assert weights["envFrom"] == [*theirs, {"secretRef": {"name": "creds"}}]
    others = [*made["containers"], by_name(made["initContainers"], "x")]
    assert all("envFrom" not in container for container in others)
    with pytest.raises(TemplateError, match=r"initContainers\[weights\].envFrom: must be a list"):
        build(
            weights={"source": {"url": "s3://b/v", "secretRef": {"name": "creds"}}},
            template={"spec": {"initContainers": [{"name": "weights", "envFrom": {}}]}},
        )


def test_building_changes_no_template():
    before = json.dumps(TEMPLATE, sort_keys=True)
    build(template=TEMPLATE, gpus=1)
    assert json.dumps(TEMPLATE, sort_keys=True) == before


@pytest.mark.parametrize(
    ("spec", "engine", "weights"),
    [
        ({}, "pod:1", "pod:1"),
        ({"image": "mine:2"}, "mine:2", "mine:2"),
        (
            {"template": {"spec": {"containers": [{"name": "engine", "image": "t:3"}]}}},
            "t:3",
            "t:3",
        ),
        (
            {"template": {"spec": {"initContainers": [{"name": "weights", "image": "w:4"}]}}},
            "pod:1",
            "w:4",
        ),
        (
            {
                "image": "mine:2",
                "template": {"spec": {"containers": [{"name": "engine", "image": "t:3"}]}},
            },
            "mine:2",
            "mine:2",
        ),
    ],
)
def test_which_image_runs(spec: dict[str, Any], engine: str, weights: str):
    made = build(**spec)["spec"]
    assert by_name(made["containers"], "engine")["image"] == engine
    assert by_name(made["initContainers"], "weights")["image"] == weights


@pytest.mark.parametrize(
    ("gpus", "given", "expected"),
    [
        (0, [], []),
        (1, [], ["--tensor-parallel-size", "1"]),
        (4, ["--seed=1"], ["--seed=1", "--tensor-parallel-size", "4"]),
        (4, ["--tensor-parallel-size=2"], ["--tensor-parallel-size=2"]),
        (4, ["--tensor_parallel_size", "2"], ["--tensor_parallel_size", "2"]),
        (4, ["-tp", "2"], ["-tp", "2"]),
        (4, ["--pipeline-parallel-size=4"], ["--pipeline-parallel-size=4"]),
        (4, ["--data-parallel-size", "4"], ["--data-parallel-size", "4"]),
    ],
)
def test_tensor_parallel_follows_the_gpus(gpus: int, given: list[str], expected: list[str]):
    spec = replica(gpus=gpus, engineArgs=given).spec
    assert spec is not None
    assert engine_args(spec) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"sepc": {}}, "template.sepc: unknown field"),
        ({"spec": []}, "template.spec: an object is expected"),
        ({"metadata": {"name": "x"}}, "template.metadata.name: not supported"),
        ({"spec": {"containers": {}}}, "template.spec.containers: a list is expected"),
        ({"spec": {"containers": [{}]}}, "template.spec.containers[0].name: required"),
        ({"spec": {"volumes": ["x"]}}, "template.spec.volumes[0].name: required"),
        ({"spec": {"securityContext": 1}}, "template.spec.securityContext: an object"),
        (
            {"spec": {"containers": [{"name": "engine", "env": {}}]}},
            "template.spec.containers[engine].env: a list is expected",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "volumeMounts": [1]}]}},
            "template.spec.containers[engine].volumeMounts[0]: an object is expected",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"mountPath": ["a"]}]}]}},
            "template.spec.containers[engine].volumeMounts[0].mountPath: a string is expected",
        ),
        (
            {"spec": {"containers": [{"name": "other", "env": [{"name": []}]}]}},
            "template.spec.containers[other].env[0].name: a string is expected",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "ports": [{"containerPort": {}}]}]}},
            "template.spec.containers[engine].ports[0].containerPort: a whole number is expected",
        ),
        (
            {
                "spec": {
                    "initContainers": [
                        {"name": "weights", "resources": {"limits": {"memory": "lots"}}}
                    ]
                }
            },
            "template.spec.initContainers[weights].resources.limits.memory: 'lots'",
        ),
    ],
)
def test_a_wrong_template_names_its_field(template: Any, words: str):
    with pytest.raises(TemplateError, match="template") as caught:
        build(template=template)
    assert words in str(caught.value)


values: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, 1.5, "", "engine", "/dev/shm", [], ["a"], {}, {"limits": {"memory": []}}, [{}]]
)


def lists_of(key: str) -> st.SearchStrategy[Any]:
    return values | st.lists(st.fixed_dictionaries({key: values}), min_size=1, max_size=2)


containers = st.fixed_dictionaries(
    {"name": st.sampled_from(["engine", "weights", "other"])},
    optional={
        "env": lists_of("name"),
        "ports": lists_of("containerPort"),
        "volumeMounts": lists_of("mountPath"),
        "resources": values,
        "securityContext": values,
        "image": values,
    },
)
parts = values | st.lists(containers, min_size=1, max_size=2)
pod_specs = st.fixed_dictionaries(
    {},
    optional={
        "containers": parts,
        "initContainers": parts,
        "volumes": lists_of("name"),
        "securityContext": values,
        "hostname": values,
    },
)
metas = st.fixed_dictionaries({"labels": values, "annotations": values})
templates = st.fixed_dictionaries({"spec": values | pod_specs}) | st.fixed_dictionaries(
    {"metadata": values | metas}
)


@settings(max_examples=500)
@given(template=templates, gpus=st.sampled_from([0, 1]))
def test_whatever_a_template_holds_there_is_a_pod_or_a_reason(template: Any, gpus: int):
    try:
        made = build(template=template, gpus=gpus)
    except TemplateError as error:
        reason = str(error)
    else:
        reason = ""
        assert by_name(made["spec"]["containers"], "engine")["command"][0] == "rollout-pod"
    assert not reason or reason.startswith("template.")


def test_another_engine_gets_its_own_arguments_only():
    made = build(engine="other", gpus=2, engineArgs=["--tp=2"])
    engine = by_name(made["spec"]["containers"], "engine")
    args = engine["args"]
    assert args[args.index("--engine") + 1] == "other"
    assert args[args.index("--") :] == ["--", "--tp=2"]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def hashed(**spec: Any) -> str:
    parsed = replica(**spec).spec
    assert parsed is not None
    return manifests.pod_hash(parsed)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"image": "mine:2"},
        {"engine": "other"},
        {"engineArgs": ["--seed=1"]},
        {"gpus": 1},
        {"loadTimeoutSeconds": 5},
        {"weights": {"hostMemory": "1Gi"}},
        {"gpus": 0, "weights": {"staging": "Device"}},
        {"weights": {"source": {"url": "s3://b/v", "secretRef": {"name": "s"}}}},
        {"drainTimeoutSeconds": 5},
        {"template": {"spec": {"nodeSelector": {"a": "b"}}}},
    ],
)
def test_these_fields_replace_the_pod(change: dict[str, Any]):
    assert hashed(**change) != hashed()


@pytest.mark.parametrize(
    "change",
    [
        {"paused": True},
        {"weightVersion": "a", "weightStep": 1},
        {"interruption": {"timeoutSeconds": 5}},
        {"sleep": {"level": 2, "tags": ["kv_cache"]}},
        {"weights": {"transport": "SharedMemory", "bucketSize": "1Mi", "maxAttempts": 9}},
        {"weights": {"source": {"path": "/x/{version}"}, "timeoutSeconds": 5}},
        {"weights": {"hostMemory": "16384Mi"}},
        {"weights": {"staging": "Host"}},
        {"weights": {"source": {"url": "s3://b/{version}"}}},
        {"engine": "vllm"},
        {"aFieldOfALaterVersion": 1},
    ],
)
def test_these_fields_reach_the_running_pod(change: dict[str, Any]):
    assert hashed(**change) == hashed()


def test_the_hash_stays_the_same_between_releases():
    # a changed value here restarts every pod of every user on the next upgrade
    assert hashed() == "48fdce79c0dbf0cd"


def test_staging_is_told_only_where_it_is_not_the_default():
    def args(**weights: Any) -> list[str]:
        engine = by_name(build(gpus=1, weights=weights)["spec"]["containers"], "engine")
        return engine["args"][: engine["args"].index("--")]

    assert "--staging" not in args()
    assert args(staging="Device")[-2:] == ["--staging", "Device"]

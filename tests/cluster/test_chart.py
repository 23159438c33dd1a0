"""The chart as helm renders it: what is installed, with which rights, and what is refused."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from devcluster.client import Cluster, CommandError
from devcluster.settings import kubernetes_version

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "rollout-operator"
VERSION = kubernetes_version((ROOT / "devcluster" / "go.mod").read_text())


@pytest.fixture(scope="module")
def helm(cluster: Cluster) -> str:
    return cluster.helm_path


def run(helm: str, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *args], input=stdin, capture_output=True, text=True, timeout=120)


def render(helm: str, values: dict | None = None, *, name="ro", namespace="ns") -> dict:
    """All objects, and each by kind and name."""
    done = run(
        *(helm, "template", name, str(CHART), "-n", namespace, "--kube-version", VERSION),
        *("-f", "-"),
        stdin=json.dumps(values or {}),
    )
    assert done.returncode == 0, done.stderr
    objects = [o for o in yaml.safe_load_all(done.stdout) if o]
    return {"all": objects} | {(o["kind"], o["metadata"]["name"]): o for o in objects}


def deployment(objects: dict) -> dict:
    (found,) = [o for o in objects["all"] if o["kind"] == "Deployment"]
    return found


def test_lint_finds_nothing(helm):
    done = run(helm, "lint", "--strict", str(CHART), "--kube-version", VERSION)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


def test_installs_exactly_this(helm):
    objects = render(helm)
    assert sorted((o["kind"], o["metadata"]["name"]) for o in objects["all"]) == [
        ("ClusterRole", "ns-ro-rollout-operator-editor"),
        ("ClusterRole", "ns-ro-rollout-operator-nodes"),
        ("ClusterRole", "ns-ro-rollout-operator-viewer"),
        ("ClusterRoleBinding", "ns-ro-rollout-operator-nodes"),
        ("CustomResourceDefinition", "rolloutreplicas.rollout.dev"),
        ("Deployment", "ro-rollout-operator"),
        ("PodDisruptionBudget", "ro-rollout-operator"),
        ("Role", "ro-rollout-operator"),
        ("Role", "ro-rollout-operator-lease"),
        ("RoleBinding", "ro-rollout-operator"),
        ("RoleBinding", "ro-rollout-operator-lease"),
        ("Service", "ro-rollout-operator-metrics"),
        ("ServiceAccount", "ro-rollout-operator"),
    ]


def test_the_crd_is_whole_and_is_kept(helm):
    crd = render(helm)["CustomResourceDefinition", "rolloutreplicas.rollout.dev"]
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == yaml.safe_load((ROOT / "crds" / "rolloutreplica.yaml").read_text())


def test_the_crd_may_go_with_the_release_or_not_come_at_all(helm):
    gone = render(helm, {"crds": {"keep": False}})
    crd = gone["CustomResourceDefinition", "rolloutreplicas.rollout.dev"]
    assert "annotations" not in crd["metadata"]
    without = render(helm, {"crds": {"install": False}})
    assert "CustomResourceDefinition" not in {o["kind"] for o in without["all"]}


RIGHTS = {
    ("rollout.dev", "rolloutreplicas"): {"get", "list", "watch"},
    ("rollout.dev", "rolloutreplicas/status"): {"patch"},
    ("rollout.dev", "rolloutreplicas/finalizers"): {"update"},
    ("", "pods"): {"get", "list", "watch", "create", "delete"},
    ("", "services"): {"get", "list", "watch", "create", "patch"},
    ("", "secrets"): {"create", "get", "patch"},
    ("", "events"): {"create"},
}


def rights(role: dict) -> dict:
    return {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def for_lease(o: dict) -> bool:
    return o["metadata"]["name"].endswith("-lease")


@pytest.mark.parametrize(
    "values", [{}, {"watchNamespaces": ["a", "b"]}, {"clusterWide": True}, {"replicas": 1}]
)
def test_the_lease_of_the_release_is_all_that_is_written_beside(helm, values):
    objects = render(helm, values)
    role = objects["Role", "ro-rollout-operator-lease"]
    create, rest = role["rules"]
    lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    assert create == {**lease, "verbs": ["create"]}
    assert rest == {**lease, "resourceNames": ["ro-rollout-operator"], "verbs": ["get", "update"]}
    binding = objects["RoleBinding", "ro-rollout-operator-lease"]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "ns"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert environment(objects)["ROLLOUT_OPERATOR_LEASE_NAME"] == "ro-rollout-operator"
    assert environment(objects)["ROLLOUT_OPERATOR_LEASE_NAMESPACE"] == "ns"


def test_two_operators_that_a_drain_does_not_take_at_once(helm):
    objects = render(helm)
    spec = deployment(objects)["spec"]
    assert spec["replicas"] == 2
    labels = spec["template"]["metadata"]["labels"].items()
    budget = objects["PodDisruptionBudget", "ro-rollout-operator"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= labels
    affinity = spec["template"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels
    alone = render(helm, {"replicas": 1})
    assert "PodDisruptionBudget" not in {o["kind"] for o in alone["all"]}


@pytest.mark.parametrize(
    ("values", "namespaces"),
    [({}, ["ns"]), ({"watchNamespaces": ["a", "123"]}, ["a", "123"])],
)
def test_rights_end_at_the_watched_namespaces(helm, values, namespaces):
    objects = render(helm, values)["all"]
    roles = [o for o in objects if o["kind"] == "Role" and not for_lease(o)]
    bindings = [o for o in objects if o["kind"] == "RoleBinding" and not for_lease(o)]
    assert [r["metadata"]["namespace"] for r in roles] == namespaces
    assert [b["metadata"]["namespace"] for b in bindings] == namespaces
    assert all(rights(role) == RIGHTS for role in roles)
    account = {"kind": "ServiceAccount", "name": "ro-rollout-operator", "namespace": "ns"}
    assert all(b["subjects"] == [account] for b in bindings)
    # the aggregated roles give nothing to the operator: beyond its namespaces it may look at a node
    (beyond,) = [o for o in objects if o["kind"] == "ClusterRoleBinding"]
    (nodes,) = [
        o
        for o in objects
        if o["kind"] == "ClusterRole" and o["metadata"]["name"] == beyond["roleRef"]["name"]
    ]
    assert rights(nodes) == {("", "nodes"): {"get"}}
    assert beyond["subjects"] == [account]


def test_a_look_at_nodes_is_a_choice(helm):
    objects = render(helm, {"rbac": {"readNodes": False}})["all"]
    assert not [o for o in objects if o["kind"] == "ClusterRoleBinding"]
    assert "nodes" not in {
        r for o in objects for rule in o.get("rules", ()) for r in rule["resources"]
    }


def test_cluster_wide_is_a_choice(helm):
    objects = render(helm, {"clusterWide": True})
    name = "ns-ro-rollout-operator"
    assert rights(objects["ClusterRole", name]) == RIGHTS
    assert objects["ClusterRoleBinding", name]["roleRef"]["name"] == name
    assert all(for_lease(o) for o in objects["all"] if o["kind"] == "Role")
    assert environment(objects)["ROLLOUT_OPERATOR_CLUSTER_WIDE"] == "true"


def environment(objects: dict) -> dict:
    (container,) = deployment(objects)["spec"]["template"]["spec"]["containers"]
    return {e["name"]: e.get("value") for e in container["env"]}


def test_the_operators_own_settings_accept_what_the_chart_sets(helm, monkeypatch):
    from rollout_operator.settings import Settings

    for values, namespaces, wide in [
        ({}, ("ns",), False),
        ({"watchNamespaces": ["a", "b"]}, ("a", "b"), False),
        ({"replicaSelector": "shard=a,!test"}, ("ns",), False),
        ({"clusterWide": True, "log": {"format": "console", "level": "debug"}}, (), True),
    ]:
        for name, value in environment(render(helm, values)).items():
            if value is not None:  # else by the downward API
                monkeypatch.setenv(name, value)
        settings = Settings()
        assert tuple(settings.watch_namespaces) == namespaces
        assert settings.cluster_wide is wide
        assert settings.default_image == "localhost/rollout-pod:dev"
        assert settings.lease() == ("ns", "ro-rollout-operator")
        assert settings.replica_selector == values.get("replicaSelector", "")


def test_users_of_the_cluster_get_the_kind_by_aggregation(helm):
    objects = render(helm)
    viewer = objects["ClusterRole", "ns-ro-rollout-operator-viewer"]
    editor = objects["ClusterRole", "ns-ro-rollout-operator-editor"]
    to = "rbac.authorization.k8s.io/aggregate-to-"
    assert viewer["metadata"]["labels"][f"{to}view"] == "true"
    assert {f"{to}edit", f"{to}admin"} <= set(editor["metadata"]["labels"])
    verbs = {verb for rule in viewer["rules"] for verb in rule["verbs"]}
    assert verbs == {"get", "list", "watch"}
    # nobody writes a status by hand
    assert rights(editor)["rollout.dev", "rolloutreplicas/status"] == {"get"}


def test_the_pod_is_restricted(helm):
    spec = deployment(render(helm))["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    probes = {p: container[p]["httpGet"] for p in ("livenessProbe", "readinessProbe")}
    assert probes == {
        "livenessProbe": {"path": "/healthz", "port": "probes"},
        "readinessProbe": {"path": "/readyz", "port": "probes"},
    }


def test_everything_extra_reaches_the_pod(helm):
    values = {
        "image": {"repository": "example/op", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "pull"}],
        "args": ["--x"],
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "v", "hostPath": {"path": "/v"}}],
        "extraVolumeMounts": [{"name": "v", "mountPath": "/v", "readOnly": True}],
        "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "podAnnotations": {"c": "d"},
        "podLabels": {"e": "f"},
        "serviceAccount": {"create": False, "name": "mine"},
        "metrics": {"port": 9191},
    }
    objects = render(helm, values)
    template = deployment(objects)["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "example/op@sha256:" + "0" * 64
    assert (container["command"], container["args"]) == (["rollout-operator"], ["--x"])
    assert {"name": "A", "value": "b"} in container["env"]
    assert values["extraVolumes"][0] in pod["volumes"]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]
    for name in ("imagePullSecrets", "nodeSelector", "tolerations", "affinity"):
        assert pod[name] == values[name]
    assert pod["priorityClassName"] == "high"
    assert template["metadata"]["annotations"] == {"c": "d"}
    assert template["metadata"]["labels"]["e"] == "f"
    assert pod["serviceAccountName"] == "mine"
    assert "ServiceAccount" not in {o["kind"] for o in objects["all"]}
    assert environment(objects)["ROLLOUT_OPERATOR_METRICS_PORT"] == "9191"
    service = objects["Service", "ro-rollout-operator-metrics"]
    assert service["spec"]["ports"][0]["port"] == 9191
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"watchNamespace": ["a"]}, "watchNamespace"),
        ({"image": {"pullPolicy": "No"}}, "/image/pullPolicy"),
        ({"watchNamespaces": ["A_b"]}, "/watchNamespaces/0"),
        ({"metrics": {"port": 8080}}, "/metrics/port"),
        ({"log": {"format": "xml"}}, "/log/format"),
        ({"replicas": -1}, "/replicas"),
        ({"leaseSeconds": 1}, "/leaseSeconds"),
        ({"clusterWide": True, "watchNamespaces": ["a"]}, "exclude each other"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name is needed"),
    ],
)
def test_a_wrong_value_is_named(helm, values, said):
    done = run(
        *(helm, "template", "ro", str(CHART), "--kube-version", VERSION, "-f", "-"),
        stdin=json.dumps(values),
    )
    assert done.returncode != 0
    assert said in done.stderr


def test_a_cluster_without_native_sidecars_is_refused(helm):
    done = run(helm, "template", "ro", str(CHART), "--kube-version", "1.28.0")
    assert done.returncode != 0
    assert "1.29.0" in done.stderr


def install(cluster: Cluster, namespace: str, *args: str) -> str:
    return cluster.helm(
        *("install", "ro", str(CHART), "-n", namespace, "--take-ownership", "--timeout", "100s"),
        *args,
    )


def test_notes_name_the_namespace_and_the_fate_of_the_crd(cluster):
    def notes(*args: str) -> str:
        return install(cluster, "ns", "--dry-run=server", *args).split("NOTES:")[1]

    assert "kubectl -n ns patch rr" in notes()
    assert "stay when this release is uninstalled" in notes()
    assert "EVERY RolloutReplica" in notes("--set", "crds.keep=false")
    assert "serves RolloutReplicas in a, b." in notes("--set", "watchNamespaces={a,b}")


def test_an_installed_operator_runs_with_these_rights_and_no_more(cluster, namespace):
    install(cluster, namespace, "--wait")
    account = f"--as=system:serviceaccount:{namespace}:ro-rollout-operator"

    def can(verb: str, resource: str, place: str, group: str = "", name: str = "") -> bool:
        kind, _, part = resource.partition("/")
        asked = [
            verb,
            (f"{kind}.{group}" if group else kind) + (f"/{name}" if name else ""),
            *([f"--subresource={part}"] * bool(part)),
        ]
        try:
            return cluster.kubectl("auth", "can-i", *asked, account, "-n", place) == "yes\n"
        except CommandError as error:
            if error.output.splitlines()[:1] == ["no"]:
                return False
            raise

    for (group, resource), verbs in RIGHTS.items():
        for verb in verbs:
            assert can(verb, resource, namespace, group), (verb, resource)
            assert not can(verb, resource, "default", group), (verb, resource)
    assert can("get", "nodes", namespace)
    assert not can("list", "nodes", namespace)
    assert can("create", "leases", namespace, "coordination.k8s.io")
    assert can("update", "leases", namespace, "coordination.k8s.io", "ro-rollout-operator")
    assert not can("update", "leases", namespace, "coordination.k8s.io")
    assert not can("list", "secrets", namespace)
    assert not can("delete", "secrets", namespace)
    assert not can("delete", "services", namespace)
    assert not can("create", "pods/exec", namespace)

    cluster.helm("uninstall", "ro", "-n", namespace, "--wait", "--timeout", "100s")
    kept = cluster.kubectl("get", "crd", "rolloutreplicas.rollout.dev", "-o", "name")
    assert kept.strip().endswith("/rolloutreplicas.rollout.dev")

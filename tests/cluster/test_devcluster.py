"""The running dev cluster: its parts, what listens where, who may ask, and what pods find."""

import ipaddress
import json
import os
import signal
import socket
import ssl
import sys

import httpx
import psutil
import pytest
import yaml

from devcluster import processes
from devcluster.build import bin_folder
from devcluster.certs import admin_token
from devcluster.client import WaitTimeoutError
from devcluster.parts import PART_NAMES
from devcluster.settings import FIRST, NODE_IP, SECOND
from tests.support.devcluster import devcluster, must, traces

pytestmark = pytest.mark.cluster

SECURITY = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.fixture
def own(settings, cluster):
    """The settings of a cluster that is ours to look into."""
    if settings.external:
        pytest.skip("DEVCLUSTER=external: the parts are not ours")
    return settings


def pod(name, *command, volumes=(), mounts=(), port=None):
    container = {
        "name": "main",
        "image": "localhost/rollout-pod:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "securityContext": SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],
    }
    if port is not None:
        container["readinessProbe"] = {"tcpSocket": {"port": port}, "periodSeconds": 1}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True},
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
        },
    }


def apply(cluster, namespace, *objects):
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    cluster.kubectl("apply", "-n", namespace, "-f", "-", input=document)


def wait_ready(cluster, namespace, name):
    def ready():
        status = cluster.get("pod", name, namespace)["status"]
        return any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ())
        )

    cluster.wait(ready, 60, f"pod {name} ready", namespace=namespace)


def pids(settings):
    records = {
        part: processes.read_record(settings.part_folder(part) / "record.json")
        for part in PART_NAMES
    }
    return {part: record.pid for part, record in records.items()}


def test_up_again_changes_nothing_and_says_how_to_use_it(own):
    before = pids(own)
    assert must("up").splitlines()[-1] == f"export KUBECONFIG={own.kubeconfig}"
    assert pids(own) == before


def test_status_shows_what_is_down_and_up_mends_just_that(own):
    before = pids(own)
    done = devcluster("status")
    assert done.returncode == 0, done.stdout
    for part in PART_NAMES:
        (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == [part]]
        assert line.split() == [part, str(before[part]), "ok", str(own.log(part))]
    os.kill(before["coredns"], signal.SIGKILL)
    done = devcluster("status")
    assert done.returncode == 1
    assert "coredns" in next(line for line in done.stdout.splitlines() if "not running" in line)
    must("up")
    after = pids(own)
    assert after.pop("coredns") != before.pop("coredns")
    assert after == before


def test_pods_survive_the_death_of_kubelet_and_containerd(own, cluster, namespace):
    apply(cluster, namespace, pod("steady", "sleep", "600"))
    wait_ready(cluster, namespace, "steady")

    def container():
        (status,) = cluster.get("pod", "steady", namespace)["status"]["containerStatuses"]
        return status["containerID"], status["restartCount"]

    before = container()
    for part in ("kubelet", "containerd"):
        os.kill(pids(own)[part], signal.SIGKILL)
    must("up")
    # the new kubelet knows its pods once it has listed them
    run = ("exec", "-n", namespace, "steady", "--", "echo", "hi")
    assert cluster.wait(lambda: cluster.kubectl(*run), 30, "exec", namespace=namespace) == "hi\n"
    assert container() == before


def test_a_second_node_runs_pods_and_goes_without_a_trace(own, cluster, namespace):
    home = pod("home", "sleep", "600")
    home["spec"]["nodeName"] = FIRST.name
    apply(cluster, namespace, home)
    wait_ready(cluster, namespace, "home")

    def leases():
        return sorted(file.name for file in (own.cni / "leases").glob("*/*.*.*.*"))

    before = traces(own), leases()
    try:
        assert must("node", "add").split() == [SECOND.name]
        away = pod("away", "python", "-m", "http.server", "8080", port=8080)
        away["spec"]["nodeName"] = SECOND.name
        apply(cluster, namespace, away)
        wait_ready(cluster, namespace, "away")
        found = cluster.get("pod", "away", namespace)["status"]
        url = f"http://{found['podIP']}:8080"
        script = f"import urllib.request as u; print(u.urlopen('{url}', timeout=5).status)"
        run = ("exec", "-n", namespace, "home", "--", "python", "-c", script)
        assert cluster.kubectl(*run) == "200\n"
        assert "GET / " in cluster.kubectl("logs", "away", "-n", namespace)

        record = processes.read_record(own.part_folder(SECOND.kubelet) / "record.json")
        os.kill(record.pid, signal.SIGKILL)
        done = devcluster("status")
        assert done.returncode == 1 and SECOND.kubelet in done.stdout
        must("up")
        assert devcluster("status").returncode == 0
        # neither kubelet touches what is the other one's
        assert (
            cluster.get("pod", "away", namespace)["status"]["containerStatuses"]
            == (found["containerStatuses"])
        )
    finally:
        must("node", "remove")
    assert (traces(own), leases()) == before
    nodes = cluster.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}")
    assert nodes.split() == [FIRST.name]
    must("node", "remove")  # twice does no harm
    cluster.kubectl("delete", "pod", "away", "-n", namespace, "--force", "--grace-period=0")


def test_nothing_listens_beyond_loopback_and_the_pod_bridge(own):
    heard = set()
    for pid, part in processes.ours(own.root).items():
        if not processes.shares_network(pid):
            continue  # a pod's own network
        for connection in psutil.Process(pid).net_connections(kind="inet"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens or (connection.type == socket.SOCK_DGRAM and not connection.raddr):
                heard.add((part, connection.laddr.ip, connection.laddr.port))
    for part, address, port in heard:
        inside = ipaddress.ip_address(address).is_loopback or address == NODE_IP
        assert inside, f"{part} listens on {address}:{port}"
    # the test sees what there is to see
    assert ("kube-apiserver", NODE_IP, 6443) in heard
    assert ("kubelet", NODE_IP, 10250) in heard
    assert ("coredns", NODE_IP, 53) in heard
    assert ("etcd", "127.0.0.1", 2379) in heard


def test_kubelet_and_api_server_ask_who_is_there(own, cluster, namespace):
    context = ssl.create_default_context(cafile=own.pki / "ca.crt")
    account = cluster.kubectl("create", "token", "default", "-n", namespace).strip()

    def ask(url, token):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.get(url, headers=headers, verify=context, trust_env=False).status_code

    kubelet, api = f"https://{NODE_IP}:10250/pods", f"https://{NODE_IP}:6443/api/v1/pods"
    tokens = (None, "guess", account, admin_token(own))
    assert [ask(kubelet, token) for token in tokens] == [401, 401, 403, 200]
    assert [ask(api, token) for token in tokens] == [403, 401, 403, 200]


def test_every_part_has_a_log_and_metrics(own):
    files = must("metrics").splitlines()
    assert {file.split("/")[-2] for file in files} == set(PART_NAMES)
    for file in files:
        with open(file) as text:
            assert any(line.startswith("# TYPE") for line in text)
    assert all(own.log(part).stat().st_size for part in PART_NAMES)


def test_pods_find_the_projects_code_and_the_scratch_folder(own, cluster, namespace):
    file = own.data / f"{namespace}.txt"
    file.write_text("from the host")
    script = (
        "import json, os, shutil, sys, rollout_pod;"
        "print(json.dumps({'uid': os.getuid(), 'file': rollout_pod.__path__[0],"
        f"'data': open('/data/{file.name}').read(), 'version': list(sys.version_info[:2]),"
        "'cli': shutil.which('rollout-pod'), 'operator': shutil.which('rollout-operator')}))"
    )
    volumes = [{"name": "data", "hostPath": {"path": str(own.data), "type": "Directory"}}]
    mounts = [{"name": "data", "mountPath": "/data", "readOnly": True}]
    try:
        apply(
            cluster,
            namespace,
            pod("look", "python", "-c", script, volumes=volumes, mounts=mounts),
        )
        cluster.wait(
            lambda: cluster.get("pod", "look", namespace)["status"]["phase"] == "Succeeded",
            60,
            "the pod to end well",
            namespace=namespace,
        )
    finally:
        file.unlink()
    seen = json.loads(cluster.kubectl("logs", "look", "-n", namespace))
    assert seen == {
        "uid": 10001,
        "file": "/opt/rollout/src/rollout_pod/rollout_pod",
        "data": "from the host",
        "version": [*sys.version_info[:2]],
        "cli": "/opt/rollout/bin/rollout-pod",
        "operator": "/opt/rollout/bin/rollout-operator",
    }


def test_services_names_and_the_api_server_from_a_pod(own, cluster, namespace):
    server = pod(
        "server", "python", "-m", "http.server", "8080", "--directory", "/opt/rollout", port=8080
    )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server"},
        "spec": {"type": "NodePort", "selector": {"app": "server"}, "ports": [{"port": 80}]},
    }
    service["spec"]["ports"][0]["targetPort"] = 8080
    headless = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "direct"},
        "spec": {"clusterIP": "None", "selector": {"app": "server"}},
    }
    apply(cluster, namespace, server, pod("client", "sleep", "600"), service, headless)
    for name in ("server", "client"):
        wait_ready(cluster, namespace, name)
    script = (
        "import socket, ssl, urllib.request as u\n"
        "token = open('/var/run/secrets/kubernetes.io/serviceaccount/token').read()\n"
        "ca = '/var/run/secrets/kubernetes.io/serviceaccount/ca.crt'\n"
        f"print(u.urlopen('http://server.{namespace}', timeout=5).status)\n"
        "print(u.urlopen('http://direct:8080', timeout=5).status)\n"
        "r = u.Request('https://kubernetes.default.svc/version',"
        " headers={'Authorization': 'Bearer ' + token})\n"
        "print(u.urlopen(r, timeout=5, context=ssl.create_default_context(cafile=ca)).status)\n"
    )
    run = ("exec", "-n", namespace, "client", "--", "python", "-c", script)
    # a Service's rules and names reach the node a moment after the pod is ready
    assert cluster.wait(lambda: cluster.kubectl(*run), 30, "services", namespace=namespace) == (
        "200\n200\n200\n"
    )
    port = cluster.get("service", "server", namespace)["spec"]["ports"][0]["nodePort"]
    with socket.create_connection((NODE_IP, port), timeout=5):
        pass
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            outer = address.family == socket.AF_INET and address.address not in (
                NODE_IP,
                "127.0.0.1",
            )
            if outer:
                with pytest.raises(OSError):
                    socket.create_connection((address.address, port), timeout=2)


def test_a_wait_that_fails_shows_the_namespace(cluster, namespace):
    apply(cluster, namespace, pod("talker", "sh", "-c", "echo the last words; exit 3"))
    with pytest.raises(WaitTimeoutError) as failed:
        cluster.wait(
            lambda: cluster.get("pod", "talker", namespace)["status"]["phase"] == "Succeeded",
            8,
            "the talker to succeed",
            namespace=namespace,
        )
    message = str(failed.value)
    assert "the talker to succeed" in message
    assert "the last words" in message
    assert "Exit Code:" in message


@pytest.mark.parametrize(
    ("context", "allow", "refused"),
    [
        ("production", None, True),
        ("production", "staging", True),
        ("production", "production", False),
        ("kind-mine", None, False),
    ],
)
def test_foreign_contexts_are_refused_unless_named(own, tmp_path, context, allow, refused):
    config = yaml.safe_load(own.kubeconfig.read_text())
    config["contexts"][0]["name"] = config["current-context"] = context
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(config))
    env = {
        "DEVCLUSTER": "external",
        "KUBECONFIG": str(file),
        "PATH": f"{bin_folder(own)}:{os.environ['PATH']}",
        "DEVCLUSTER_ALLOW_CONTEXT": allow or "",
    }
    for arguments in (("up",), ("status",), ("kubectl", "get", "nodes")):
        done = devcluster(*arguments, env=env, timeout=60)
        assert done.returncode == (1 if refused else 0), done.stderr
        assert (f"DEVCLUSTER_ALLOW_CONTEXT={context}" in done.stderr) is refused
    # and `down` never touches a cluster that is not ours
    assert devcluster("down", env=env, timeout=60).returncode == 0
    assert own.kubeconfig.exists()

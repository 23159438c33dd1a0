"""What the dev cluster's parts are started with."""

import base64
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from devcluster import certs
from devcluster.node import (
    containerd_config,
    corefile,
    kube_proxy_config,
    kubelet_config,
    node,
    pod_network,
    second_node,
)
from devcluster.parts import PART_NAMES, control_plane
from devcluster.rights import BOOTSTRAP
from devcluster.settings import FIRST, NODES, load_settings

BINS = Path("/cache/bin")
INSIDE = ("127.0.0.1", "10.244.0.1")


@pytest.fixture
def settings(tmp_path):
    return replace(load_settings({}), root=Path("/r/dev"))


@pytest.fixture
def parts(settings):
    runtime = node(settings, BINS, snapshotter="overlayfs", base_spec="{}")
    return {part.name: part for part in (*control_plane(settings, BINS), *runtime)}


def flags(part):
    pairs = (word.removeprefix("--").partition("=") for word in part.argv[1:])
    return {name: value for name, _, value in pairs}


def test_names_and_order(parts):
    assert tuple(parts) == PART_NAMES


def test_api_server(parts):
    api = flags(parts["kube-apiserver"])
    assert api["bind-address"] == api["advertise-address"] == "10.244.0.1"
    assert api["authorization-mode"] == "Node,RBAC"
    assert api["kubelet-preferred-address-types"] == "InternalIP"
    assert api["token-auth-file"] == "/r/dev/pki/tokens.csv"
    assert "disable-admission-plugins" not in api
    assert api["service-cluster-ip-range"] == "10.96.0.0/16"


def test_every_address_a_part_is_told_to_listen_on_is_inside(settings, parts):
    for name in ("kube-controller-manager", "kube-scheduler"):
        assert flags(parts[name])["bind-address"] == "127.0.0.1"
    etcd = flags(parts["etcd"])
    for flag in ("listen-client-urls", "listen-peer-urls"):
        assert etcd[flag].startswith("http://127.0.0.1:")
    for each in NODES:
        kubelet = kubelet_config(settings, each)
        assert kubelet["address"] in INSIDE
        assert kubelet["healthzBindAddress"] in INSIDE
        assert kubelet["readOnlyPort"] == 0
    proxy = kube_proxy_config(settings)
    assert proxy["bindAddress"] in INSIDE
    assert proxy["nodePortAddresses"] == ["10.244.0.1/32"]
    for key in ("healthzBindAddress", "metricsBindAddress"):
        assert proxy[key].rpartition(":")[0] in INSIDE
    for each in NODES:
        config = tomllib.loads(
            containerd_config(settings, each, snapshotter="native", base_spec=Path("/b.json"))
        )
        assert config["metrics"]["address"].startswith("127.0.0.1:")
        cri = config["plugins"]["io.containerd.grpc.v1.cri"]
        assert cri["stream_server_address"] == "127.0.0.1"
    lines = [line.split() for line in corefile(settings).splitlines()]
    for words in lines:
        if words and words[0] in ("bind", "health", "ready", "prometheus"):
            assert words[1].partition(":")[0] in INSIDE
    assert ["bind", "10.244.0.1"] in lines


def test_kubelet_asks_the_api_server_who_may_call_it(settings):
    config = kubelet_config(settings, FIRST)
    assert config["authentication"]["anonymous"] == {"enabled": False}
    assert config["authentication"]["webhook"] == {"enabled": True}
    assert config["authorization"] == {"mode": "Webhook"}


def test_containerd_keeps_to_its_own_folders(settings):
    text = containerd_config(settings, FIRST, snapshotter="native", base_spec=Path("/b.json"))
    config = tomllib.loads(text)
    cri = config["plugins"]["io.containerd.grpc.v1.cri"]
    for path in (config["root"], config["state"], config["grpc"]["address"]):
        assert path.startswith("/r/dev/containerd/")
    assert cri["restrict_oom_score_adj"] is True
    assert cri["netns_mounts_under_state_dir"] is True
    assert cri["containerd"]["snapshotter"] == "native"
    runc = cri["containerd"]["runtimes"]["runc"]
    assert runc["base_runtime_spec"] == "/b.json"
    assert runc["options"]["Root"] == "/r/dev/containerd/runc"


def test_pods_have_no_host_ports_and_no_way_out(settings):
    (bridge,) = pod_network(settings)["plugins"]
    assert bridge["type"] == "bridge"
    assert bridge["ipMasq"] is False
    assert bridge["ipam"]["dataDir"].startswith("/r/dev/")


def test_all_state_is_below_the_root(settings, parts):
    for part in parts.values():
        for file in part.files:
            assert file.is_relative_to(settings.root)
    assert flags(parts["kubelet"])["root-dir"] == "/r/dev/kubelet"
    assert flags(parts["etcd"])["data-dir"] == "/r/dev/etcd"


def test_two_nodes_have_nothing_of_their_own_in_common(settings, parts):
    first = [parts[name] for name in ("containerd", "kubelet")]
    second = second_node(settings, BINS, snapshotter="overlayfs", base_spec="{}")
    assert [part.name for part in second] == ["containerd-2", "kubelet-2"]
    for one, other in zip(first, second, strict=True):
        assert one.health != other.health and one.metrics != other.metrics
        shared = set(one.files) & set(other.files)
        # pods of both are on one network, which hands out each address once
        assert shared <= {settings.cni / "net.d" / "10-bridge.conflist"}
        assert all(one.files[file] == other.files[file] for file in shared)
    pairs = [kubelet_config(settings, each) for each in NODES]
    for field in (
        *("port", "healthzPort", "cgroupRoot", "containerRuntimeEndpoint"),
        *("podLogsDir", "volumePluginDir"),
    ):
        assert pairs[0][field] != pairs[1][field], field
    for flag in ("kubeconfig", "root-dir", "cert-dir", "hostname-override"):
        assert flags(first[1])[flag] != flags(second[1])[flag], flag


def test_a_fingerprint_follows_arguments_and_files(settings):
    def containerd(spec):
        return node(settings, BINS, snapshotter="overlayfs", base_spec=spec)[0].fingerprint

    assert containerd("{}") == containerd("{}")
    assert containerd("{}") != containerd('{"mounts": []}')
    one, other = (control_plane(settings, Path(bins))[0].fingerprint for bins in ("/a", "/b"))
    assert one != other


def test_coredns_may_read_and_nothing_else():
    role = next(o for o in BOOTSTRAP if o["kind"] == "ClusterRole")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}


def test_kubeconfig():
    config = certs.kubeconfig(ca=b"PEM", user={"token": "t"}, context="rollout-dev")
    assert config["current-context"] == "rollout-dev"
    (context,) = config["contexts"]
    assert context["name"] == "rollout-dev"
    cluster = config["clusters"][0]["cluster"]
    assert base64.b64decode(cluster["certificate-authority-data"]) == b"PEM"
    assert cluster["server"] == "https://10.244.0.1:6443"


def test_certificates_tokens_and_their_modes(settings, tmp_path):
    made = [replace(settings, root=tmp_path / name) for name in ("a", "b")]
    for each in made:
        each.root.mkdir()
        certs.ensure_certificates(each)
    tokens = [certs.admin_token(each) for each in made]
    assert tokens[0] != tokens[1]
    assert min(map(len, tokens)) >= 32
    first = made[0]
    assert first.pki.stat().st_mode & 0o777 == 0o700
    assert first.kubeconfig.stat().st_mode & 0o777 == 0o600
    assert all(file.stat().st_mode & 0o077 == 0 for file in first.pki.iterdir())
    assert yaml.safe_load(first.kubeconfig.read_text())["users"][0]["user"]["token"] == tokens[0]
    server = x509.load_pem_x509_certificate((first.pki / "server.crt").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    assert addresses == {"127.0.0.1", "10.244.0.1", "10.96.0.1"}
    node_client = x509.load_pem_x509_certificate((first.pki / "kubelet.crt").read_bytes())
    assert "CN=system:node:dev-node" in node_client.subject.rfc4514_string()
    assert "O=system:nodes" in node_client.subject.rfc4514_string()
    certs.ensure_certificates(first)
    assert certs.admin_token(first) == tokens[0]


def test_the_pod_network_is_valid_json(parts, settings):
    text = parts["containerd"].files[settings.cni / "net.d" / "10-bridge.conflist"]
    assert json.loads(text) == pod_network(settings)

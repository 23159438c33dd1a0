"""What the nodes' parts are started with. Pure, as ``parts`` is."""

import json
from pathlib import Path
from typing import Any

import yaml

from devcluster.parts import Part
from devcluster.settings import (
    BRIDGE,
    CGROUP,
    CLUSTER_CIDR,
    CONTEXT,
    DOMAIN,
    FIRST,
    NODE_IP,
    PAUSE_IMAGE,
    POD_SUBNET,
    SECOND,
    Node,
    Settings,
)


def node(s: Settings, bins: Path, *, snapshotter: str, base_spec: str) -> tuple[Part, ...]:
    """Return containerd, kubelet, kube-proxy and CoreDNS in their order of start.

    ``base_spec`` is the OCI runtime spec (JSON) that every container begins with.
    """
    return (
        containerd(s, FIRST, snapshotter=snapshotter, base_spec=base_spec),
        _kubelet(s, FIRST, bins),
        _kube_proxy(s, bins),
        _coredns(s, bins),
    )


def second_node(s: Settings, bins: Path, *, snapshotter: str, base_spec: str) -> tuple[Part, ...]:
    """Return the containerd and the kubelet of the second node in their order of start."""
    return (
        containerd(s, SECOND, snapshotter=snapshotter, base_spec=base_spec),
        _kubelet(s, SECOND, bins),
    )


def pod_network(s: Settings) -> dict[str, Any]:
    """Return the CNI configuration: one bridge, no masquerade, no host ports.

    Host ports are left out on purpose: they would listen on every address of the machine.
    """
    return {
        "cniVersion": "0.4.0",
        "name": CONTEXT,
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": True,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": f"{s.cni}/leases",
                    "ranges": [[{"subnet": POD_SUBNET, "gateway": NODE_IP}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def containerd_config(s: Settings, node: Node, *, snapshotter: str, base_spec: Path) -> str:
    """Return the configuration (TOML) of a node's containerd."""
    folder = s.containerd(node)
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2
root = "{folder}/root"
state = "{folder}/state"

[grpc]
  address = "{s.containerd_socket(node)}"

[metrics]
  address = "127.0.0.1:{10262 + node.port_shift}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"

[{cri}]
  # without CAP_SYS_RESOURCE no process may lower its own score, and every sandbox would fail
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  sandbox_image = "{PAUSE_IMAGE}"
  stream_server_address = "127.0.0.1"

[{cri}.cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{s.cni}/net.d"

[{cri}.containerd]
  snapshotter = "{snapshotter}"

[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "{base_spec}"

[{cri}.containerd.runtimes.runc.options]
  Root = "{folder}/runc"
"""


def containerd(s: Settings, node: Node, *, snapshotter: str, base_spec: str) -> Part:
    """Return a containerd with a root, a state and a socket of its own."""
    folder = s.part_folder(node.containerd)
    spec = folder / "base-spec.json"
    config = folder / "config.toml"
    return Part(
        name=node.containerd,
        argv=("containerd", "--config", str(config)),
        files={
            config: containerd_config(s, node, snapshotter=snapshotter, base_spec=spec),
            spec: base_spec,
            s.cni / "net.d" / "10-bridge.conflist": json.dumps(pod_network(s), indent=1),
        },
        health=(
            *("ctr", "--address", str(s.containerd_socket(node))),
            *("--timeout", "5s", "--namespace", "k8s.io", "containers", "list", "--quiet"),
        ),
        metrics=f"http://127.0.0.1:{10262 + node.port_shift}/v1/metrics",
    )


def kubelet_config(s: Settings, node: Node) -> dict[str, Any]:
    """Return a node's KubeletConfiguration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{s.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "address": NODE_IP,
        "port": 10250 + node.port_shift,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": 10248 + node.port_shift,
        "readOnlyPort": 0,
        "tlsCertFile": f"{s.pki}/server.crt",
        "tlsPrivateKeyFile": f"{s.pki}/server.key",
        "cgroupDriver": "cgroupfs",
        **_cgroups(node),
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{s.containerd_socket(node)}",
        "podLogsDir": str(s.pod_logs(node)),
        "volumePluginDir": f"{s.kubelet(node)}/volume-plugins",
        "resolvConf": "/etc/resolv.conf",
        "clusterDomain": DOMAIN,
        "clusterDNS": [NODE_IP],
        "makeIPTablesUtilChains": False,
        "syncFrequency": "5s",
        "evictionHard": {
            "memory.available": "200Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        # our images exist nowhere else: they must never be collected
        "imageGCHighThresholdPercent": 100,
    }


def _cgroups(node: Node) -> dict[str, Any]:
    """A kubelet removes every pod's cgroup below its root that it does not know, so the second one
    has a root of its own, which the runtime makes; without levels between, kubelet needs none.
    """
    if node == FIRST:
        return {"cgroupRoot": "/"}
    root = f"/{CGROUP}{node.suffix}"
    return {"cgroupRoot": root, "cgroupsPerQOS": False, "enforceNodeAllocatable": ["none"]}


def _kubelet(s: Settings, node: Node, bins: Path) -> Part:
    config = s.part_folder(node.kubelet) / "config.yaml"
    return Part(
        name=node.kubelet,
        argv=(
            f"{bins}/kubelet",
            f"--config={config}",
            f"--kubeconfig={s.pki}/{node.kubelet}.kubeconfig",
            f"--root-dir={s.kubelet(node)}",
            f"--cert-dir={s.kubelet(node)}/pki",
            f"--hostname-override={node.name}",
            f"--node-ip={NODE_IP}",
        ),
        files={config: yaml.safe_dump(kubelet_config(s, node))},
        health=f"http://127.0.0.1:{10248 + node.port_shift}/healthz",
        metrics=f"https://{NODE_IP}:{10250 + node.port_shift}/metrics",
    )


def kube_proxy_config(s: Settings) -> dict[str, Any]:
    """Return the KubeProxyConfiguration."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": f"{s.pki}/kube-proxy.kubeconfig"},
        "bindAddress": NODE_IP,
        "clusterCIDR": CLUSTER_CIDR,
        "hostnameOverride": FIRST.name,
        # zero: leave the machine's own settings alone
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        # a pod that calls a Service whose endpoint is on the same bridge must get the answer from
        # the Service's address, also where bridged frames do not pass through iptables
        "iptables": {"masqueradeAll": True, "minSyncPeriod": "0s"},
        # node ports must not be open on the machine's outer addresses
        "nodePortAddresses": [f"{NODE_IP}/32"],
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }


def _kube_proxy(s: Settings, bins: Path) -> Part:
    config = s.part_folder("kube-proxy") / "config.yaml"
    return Part(
        name="kube-proxy",
        argv=(f"{bins}/kube-proxy", f"--config={config}"),
        files={config: yaml.safe_dump(kube_proxy_config(s))},
        health="http://127.0.0.1:10256/healthz",
        metrics="http://127.0.0.1:10249/metrics",
    )


def corefile(s: Settings) -> str:
    """Return CoreDNS' configuration: the cluster's names and nothing else."""
    return f"""\
.:53 {{
  bind {NODE_IP}
  errors
  health 127.0.0.1:10253
  ready 127.0.0.1:10254
  prometheus 127.0.0.1:10252
  kubernetes {DOMAIN} in-addr.arpa ip6.arpa {{
    kubeconfig {s.pki}/coredns.kubeconfig {CONTEXT}
    pods insecure
    ttl 5
  }}
  cache 5
}}
"""


def _coredns(s: Settings, bins: Path) -> Part:
    config = s.part_folder("coredns") / "Corefile"
    return Part(
        name="coredns",
        argv=(f"{bins}/coredns", "-conf", str(config)),
        files={config: corefile(s)},
        # ready once the API server's objects were listed
        health="http://127.0.0.1:10254/ready",
        metrics="http://127.0.0.1:10252/metrics",
    )

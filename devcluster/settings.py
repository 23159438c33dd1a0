"""Where everything is and what everything is called. Nothing here touches the machine."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HELM_VERSION = "v3.19.5"
COREDNS_VERSION = "v1.14.7"

CONTEXT = "rollout-dev"
BRIDGE = "rollout0"
CGROUP = "rollout-dev"
"""Of the pods of a node that has not the machine's root for itself; the node's suffix follows."""
NODE_IP = "10.244.0.1"
"""The pod bridge's own address: the nodes, the API server and the DNS live on it."""
POD_SUBNET = "10.244.0.0/24"
CLUSTER_CIDR = "10.244.0.0/16"
SERVICE_CIDR = "10.96.0.0/16"
SERVICE_IP = "10.96.0.1"
API_URL = f"https://{NODE_IP}:6443"
DOMAIN = "cluster.local"

PAUSE_IMAGE = "localhost/pause:dev"
PROJECT_IMAGES = ("localhost/rollout-operator:dev", "localhost/rollout-pod:dev")
USER_ID = 10001

ALLOWED_CONTEXTS = ("kind-", "k3d-", "minikube", CONTEXT)

# the API server's service account tokens and containerd's sockets live below the root; a
# socket's path has 107 bytes at most
MAX_ROOT_LENGTH = 60


@dataclass(frozen=True, kw_only=True)
class Node:
    """A kubelet with a containerd of its own; their ports and folders are all in which nodes
    differ. Address, bridge, DNS and kube-proxy are the machine's.
    """

    name: str
    suffix: str
    """Of the names of its parts and folders."""
    port_shift: int

    @property
    def kubelet(self) -> str:
        """The name of its kubelet's part."""
        return f"kubelet{self.suffix}"

    @property
    def containerd(self) -> str:
        """The name of its containerd's part."""
        return f"containerd{self.suffix}"

    @property
    def containers(self) -> str:
        """What processes in its containers are called among the parts."""
        return f"container{self.suffix}"


FIRST = Node(name="dev-node", suffix="", port_shift=0)
SECOND = Node(name="dev-node-2", suffix="-2", port_shift=100)
"""Joins by ``devcluster node add`` only."""
NODES = (FIRST, SECOND)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One dev cluster: its folders and the checkout and Python that its pods run."""

    root: Path
    """The state folder; `down` removes it whole."""
    cache: Path
    """Where built binaries are kept between clusters."""
    repo: Path
    """The checkout whose code the pods run."""
    prefix: Path
    """``sys.prefix`` of the Python whose packages the pods use."""
    base_prefix: Path
    """``sys.base_prefix`` of that Python: the interpreter and its standard library."""
    external: bool = False
    kubeconfig_env: str | None = None
    allow_context: str | None = None
    data_env: str | None = None

    @property
    def kubeconfig(self) -> Path:
        """The admin's kubeconfig."""
        return self.root / "kubeconfig"

    @property
    def marker(self) -> Path:
        """What was found on the machine before `up`; it also proves that the root is ours."""
        return self.root / "devcluster.json"

    @property
    def pki(self) -> Path:
        """Keys, certificates and tokens; only root can look inside."""
        return self.root / "pki"

    @property
    def data(self) -> Path:
        """Scratch space that pods may mount by hostPath: checkpoints."""
        return self.root / "data"

    @property
    def cni(self) -> Path:
        """The pod network's configuration and leases."""
        return self.root / "cni"

    def containerd(self, node: Node) -> Path:
        """The own root, state and socket of a node's containerd."""
        return self.root / node.containerd

    def containerd_socket(self, node: Node) -> Path:
        """The socket of a node's containerd."""
        return self.containerd(node) / "containerd.sock"

    def kubelet(self, node: Node) -> Path:
        """The root folder of a node's kubelet."""
        return self.root / node.kubelet

    def pod_logs(self, node: Node) -> Path:
        """The logs of a node's pods."""
        return self.root / f"pod-logs{node.suffix}"

    @property
    def project(self) -> Path:
        """The generated console scripts that pods see."""
        return self.root / "project"

    @property
    def go_folder(self) -> Path:
        """The folder of the pinned go.mod and go.sum."""
        return self.repo / "devcluster"

    def part_folder(self, part: str) -> Path:
        """The folder of one part: its configuration, log, metrics and process record."""
        return self.root / "parts" / part

    def log(self, part: str) -> Path:
        """The log of one part."""
        return self.part_folder(part) / f"{part}.log"


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Read ``DEVCLUSTER``, ``DEVCLUSTER_ROOT``, ``DEVCLUSTER_ALLOW_CONTEXT``,
    ``DEVCLUSTER_DATA_DIR``, ``KUBECONFIG`` and ``XDG_CACHE_HOME``.

    Raises:
        ValueError: a variable has a value that cannot work.
    """
    mode = environ.get("DEVCLUSTER", "")
    if mode not in ("", "local", "external"):
        raise ValueError(f"DEVCLUSTER={mode}: must be unset, 'local' or 'external'")
    kubeconfig = environ.get("KUBECONFIG")
    if mode == "external" and not kubeconfig:
        raise ValueError("DEVCLUSTER=external: set KUBECONFIG to your cluster's kubeconfig")
    root = Path(environ.get("DEVCLUSTER_ROOT") or "/var/lib/rollout-devcluster")
    if not root.is_absolute() or len(root.parts) < 3:
        raise ValueError(f"DEVCLUSTER_ROOT={root}: must be absolute and a folder of its own")
    if len(str(root)) > MAX_ROOT_LENGTH:
        raise ValueError(
            f"DEVCLUSTER_ROOT={root}: longer than {MAX_ROOT_LENGTH} characters, "
            "too long for the sockets below it"
        )
    home = Path(environ.get("HOME") or "/root")
    return Settings(
        root=root,
        cache=Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "rollout-devcluster",
        repo=Path(__file__).resolve().parent.parent,
        prefix=Path(sys.prefix),
        base_prefix=Path(sys.base_prefix),
        external=mode == "external",
        kubeconfig_env=kubeconfig,
        allow_context=environ.get("DEVCLUSTER_ALLOW_CONTEXT") or None,
        data_env=environ.get("DEVCLUSTER_DATA_DIR") or None,
    )


def context_allowed(context: str, allow: str | None) -> bool:
    """Whether a foreign kubeconfig's context looks like a throw-away cluster, or was named."""
    return context.startswith(ALLOWED_CONTEXTS) or context == allow


def kubernetes_version(go_mod: str) -> str:
    """Read the version of ``k8s.io/kubernetes`` out of a go.mod.

    Raises:
        ValueError: it requires none.
    """
    found = re.search(r"^\s*k8s\.io/kubernetes (v\d+\.\d+\.\d+)\b", go_mod, re.MULTILINE)
    if found is None:
        raise ValueError("go.mod requires no k8s.io/kubernetes")
    return found.group(1)

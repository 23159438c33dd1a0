"""What a part is, and what the control plane is started with. Pure: paths in, arguments and files
out.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from devcluster.settings import (
    CLUSTER_CIDR,
    DOMAIN,
    FIRST,
    NODE_IP,
    SERVICE_CIDR,
    Settings,
)

ETCD_URL = "http://127.0.0.1:2379"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process of the cluster."""

    name: str
    argv: tuple[str, ...]
    health: str | tuple[str, ...]
    """A URL that answers 200, or a command that exits 0, when the part works."""
    metrics: str | None = None
    files: Mapping[Path, str] = field(default_factory=dict)
    """Configuration, written before the start."""
    grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""

    @property
    def fingerprint(self) -> str:
        """What it is started with, in short: another one means that a restart is needed."""
        content = [self.argv, sorted((str(path), text) for path, text in self.files.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def control_plane(s: Settings, bins: Path) -> tuple[Part, ...]:
    """Return etcd, API server, controller manager and scheduler in their order of start."""
    return (_etcd(s, bins), _api_server(s, bins), _controllers(s, bins), _scheduler(s, bins))


def _etcd(s: Settings, bins: Path) -> Part:
    peers = "http://127.0.0.1:2380"
    return Part(
        name="etcd",
        argv=(
            f"{bins}/etcd",
            f"--data-dir={s.root}/etcd",
            f"--listen-client-urls={ETCD_URL}",
            f"--advertise-client-urls={ETCD_URL}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--unsafe-no-fsync",
        ),
        health=f"{ETCD_URL}/health",
        metrics=f"{ETCD_URL}/metrics",
    )


def _api_server(s: Settings, bins: Path) -> Part:
    return Part(
        name="kube-apiserver",
        argv=(
            f"{bins}/kube-apiserver",
            f"--etcd-servers={ETCD_URL}",
            f"--bind-address={NODE_IP}",
            f"--advertise-address={NODE_IP}",
            "--secure-port=6443",
            f"--cert-dir={s.pki}",
            f"--tls-cert-file={s.pki}/server.crt",
            f"--tls-private-key-file={s.pki}/server.key",
            f"--client-ca-file={s.pki}/ca.crt",
            f"--token-auth-file={s.pki}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
            f"--service-account-key-file={s.pki}/service-accounts.pub",
            f"--service-account-signing-key-file={s.pki}/service-accounts.key",
            "--allow-privileged=true",
            f"--kubelet-certificate-authority={s.pki}/ca.crt",
            f"--kubelet-client-certificate={s.pki}/kubelet-client.crt",
            f"--kubelet-client-key={s.pki}/kubelet-client.key",
            # the node's name does not resolve: exec and logs go by address
            "--kubelet-preferred-address-types=InternalIP",
        ),
        health=f"https://{NODE_IP}:6443/readyz",
        metrics=f"https://{NODE_IP}:6443/metrics",
        # it hangs on its way out when it cannot reach etcd
        grace_s=3.0,
    )


def _client_flags(s: Settings, name: str) -> tuple[str, ...]:
    config = f"{s.pki}/{name}.kubeconfig"
    return (
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        f"--tls-cert-file={s.pki}/server.crt",
        f"--tls-private-key-file={s.pki}/server.key",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    )


def _controllers(s: Settings, bins: Path) -> Part:
    return Part(
        name="kube-controller-manager",
        argv=(
            f"{bins}/kube-controller-manager",
            *_client_flags(s, "kube-controller-manager"),
            f"--root-ca-file={s.pki}/ca.crt",
            f"--service-account-private-key-file={s.pki}/service-accounts.key",
            "--use-service-account-credentials=true",
            "--allocate-node-cidrs=true",
            f"--cluster-cidr={CLUSTER_CIDR}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--flex-volume-plugin-dir={s.kubelet(FIRST)}/volume-plugins",
        ),
        health="https://127.0.0.1:10257/healthz",
        metrics="https://127.0.0.1:10257/metrics",
    )


def _scheduler(s: Settings, bins: Path) -> Part:
    return Part(
        name="kube-scheduler",
        argv=(f"{bins}/kube-scheduler", *_client_flags(s, "kube-scheduler")),
        health="https://127.0.0.1:10259/healthz",
        metrics="https://127.0.0.1:10259/metrics",
    )


PART_NAMES = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("containerd", "kubelet", "kube-proxy", "coredns"),
)

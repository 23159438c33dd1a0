"""The pod bridge, the kernel's settings and the iptables chains, and how they are taken away."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.settings import BRIDGE, CLUSTER_CIDR, NODE_IP, POD_SUBNET, SERVICE_CIDR

SYSCTLS = (
    "net/ipv4/ip_forward",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv6/conf/all/forwarding",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""What kubelet, kube-proxy and the CNI plugins change on a machine."""

INTERFACES = Path("/sys/class/net")
CHAIN_PREFIX = "KUBE-"
TIMEOUT_S = 30.0


def run(*argv: str, stdin: str | None = None) -> str:
    """Run a command and return its output.

    Raises:
        DevclusterError: it failed; the message holds its words.
    """
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DevclusterError(f"{' '.join(argv)}: no answer within {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise DevclusterError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done.stdout


def read_sysctls() -> dict[str, str]:
    """Return the present values of what the cluster will change."""
    files = {name: Path("/proc/sys", name) for name in SYSCTLS}
    return {name: file.read_text().strip() for name, file in files.items() if file.exists()}


def write_sysctls(values: Mapping[str, str]) -> None:
    """Put remembered values back, where they differ."""
    for name, value in values.items():
        file = Path("/proc/sys", name)
        if file.exists() and file.read_text().strip() != value:
            file.write_text(value)


def bridge_owner() -> str | None:
    """Return the state folder that the pod bridge was made for; None without a bridge."""
    if not Path(INTERFACES, BRIDGE).exists():
        return None
    return Path(INTERFACES, BRIDGE, "ifalias").read_text().strip()


def ensure_bridge(root: Path) -> None:
    """Make the pod bridge, with the node's address, named after the state folder.

    Raises:
        DevclusterError: its addresses are in use, or the bridge is another cluster's.
    """
    owner = bridge_owner()
    if owner is None:
        clash = overlapping_route(run("ip", "-json", "route", "show", "table", "all"))
        if clash is not None:
            raise DevclusterError(
                f"This machine already routes {clash}, which overlaps the pods' {CLUSTER_CIDR} or "
                f"the services' {SERVICE_CIDR}. Take that network down first."
            )
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "link", "set", BRIDGE, "alias", str(root))
    elif owner != str(root):
        raise DevclusterError(
            f"Another dev cluster runs on this machine (state in {owner or 'an unknown folder'}): "
            f"run `DEVCLUSTER_ROOT={owner or '…'} python -m devcluster down` first."
        )
    prefix = ip_network(POD_SUBNET).prefixlen
    run("ip", "address", "replace", f"{NODE_IP}/{prefix}", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


def overlapping_route(routes: str) -> str | None:
    """Find a route (``ip -json route``) that the cluster's networks would collide with."""
    networks = [ip_network(CLUSTER_CIDR), ip_network(SERVICE_CIDR)]
    for route in json.loads(routes):
        destination = str(route.get("dst", ""))
        try:
            target = ip_network(destination, strict=False)
        except ValueError:  # "default" and the like
            continue
        if target.version == 4 and target.prefixlen and any(target.overlaps(n) for n in networks):
            return destination
    return None


def remove_bridge() -> None:
    """Take the bridge away, with the pods' ends that still hang on it."""
    ports = Path(INTERFACES, BRIDGE, "brif")
    for port in sorted(ports.iterdir()) if ports.exists() else ():
        try:
            run("ip", "link", "delete", port.name)
        except DevclusterError:
            # the kernel takes it away by itself, some time after the last process of its pod
            if port.exists():
                raise
    if bridge_owner() is not None:
        run("ip", "link", "delete", BRIDGE)


def chains_removal(saved: str) -> str | None:
    """Turn the output of ``iptables-save`` into what ``iptables-restore --noflush`` needs to
    remove kube-proxy's chains and every jump into them, and nothing else; None if there is none.
    """
    lines: list[str] = []
    table: str | None = None
    chains: list[str] = []
    jumps: list[str] = []
    for line in saved.splitlines():
        if line.startswith("*"):
            table, chains, jumps = line, [], []
        elif line.startswith(f":{CHAIN_PREFIX}"):
            chains.append(line[1:].split()[0])
        elif line.startswith("-A "):
            words = line.split()
            into = words[words.index("-j") + 1] if "-j" in words else ""
            if into.startswith(CHAIN_PREFIX) and not words[1].startswith(CHAIN_PREFIX):
                jumps.append(f"-D {line[3:]}")
        elif line == "COMMIT" and table is not None and chains:
            # naming a chain flushes it, so that no rule holds another one any more
            lines += [table, *(f":{chain} - [0:0]" for chain in chains), *jumps]
            lines += [*(f"-X {chain}" for chain in chains), "COMMIT"]
    return "\n".join(lines) + "\n" if lines else None


def has_service_chains() -> bool:
    """Whether chains of a kube-proxy (not necessarily ours) exist."""
    return any(f":{CHAIN_PREFIX}SERVICES" in saved for saved in _saved().values())


def remove_chains() -> None:
    """Remove kube-proxy's chains from iptables and ip6tables."""
    for family, saved in _saved().items():
        removal = chains_removal(saved)
        if removal is not None:
            run(f"{family}-restore", "--noflush", stdin=removal)


def _saved() -> dict[str, str]:
    families = ("iptables", "ip6tables")
    return {f: run(f"{f}-save") for f in families if shutil.which(f"{f}-save") is not None}

"""The dev cluster's command line, and what can be seen of a cluster on the machine."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from devcluster import processes
from devcluster.leftovers import FIXED_FOLDERS, PODS_GROUP, SECOND_GROUP, groups, mounts_below
from devcluster.network import read_sysctls, run
from devcluster.settings import Node, Settings

REPO = Path(__file__).parent.parent.parent
# a cold build of all programs, on two cores
UP_TIMEOUT_S = 3600


def command(*arguments: str) -> list[str]:
    """Return the argv of a devcluster command."""
    return [sys.executable, "-m", "devcluster", *arguments]


def devcluster(
    *arguments: str, env: Mapping[str, str] | None = None, timeout: float = UP_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a devcluster command; its outcome is for the caller to judge."""
    return subprocess.run(
        command(*arguments),
        cwd=REPO,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def must(*arguments: str) -> str:
    """Run a devcluster command that has to succeed and return what it printed."""
    done = devcluster(*arguments)
    assert done.returncode == 0, f"devcluster {arguments}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def frozen(settings: Settings, node: Node) -> Iterator[None]:
    """Let a node hang, as a machine does: kubelet, containerd and all in its containers."""
    names = (node.kubelet, node.containerd, node.containers)
    held: set[int] = set()
    try:
        # kubelet first: what it starts meanwhile is found by the next look
        while (
            new := {p for p, part in processes.ours(settings.root).items() if part in names} - held
        ):
            for pid in sorted(new):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            held |= new
        yield
    finally:
        for pid in held:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def traces(settings: Settings) -> dict[str, object]:
    """Return everything on this machine that a cluster changes."""
    rules = [
        line
        for family in ("iptables", "ip6tables")
        for line in run(f"{family}-save").splitlines()
        if line.startswith("-A") or " - [" in line
    ]
    return {
        "processes": processes.ours(settings.root),
        "mounts": mounts_below(Path("/proc/self/mountinfo").read_text(), str(settings.root)),
        "interfaces": sorted(entry.name for entry in Path("/sys/class/net").iterdir()),
        "rules": rules,
        "groups": [str(g) for name in (PODS_GROUP, SECOND_GROUP) for g in groups(name)],
        "folders": [str(folder) for folder in FIXED_FOLDERS if folder.exists()],
        "root": settings.root.exists(),
        "sysctls": read_sysctls(),
    }

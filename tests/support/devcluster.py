"""The dev cluster's command line, and what can be seen of a cluster on the machine."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from devcluster import processes
from devcluster.leftovers import CGROUPS, FIXED_FOLDERS, PODS_GROUP, mounts_below
from devcluster.network import read_sysctls, run
from devcluster.settings import Settings

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


def traces(settings: Settings) -> dict[str, object]:
    """Return everything on this machine that a cluster changes."""
    rules = [
        line
        for family in ("iptables", "ip6tables")
        for line in run(f"{family}-save").splitlines()
        if line.startswith("-A") or " - [" in line
    ]
    groups = [str(g) for g in (CGROUPS, *CGROUPS.iterdir()) if (g / PODS_GROUP).exists()]
    return {
        "processes": processes.ours(settings.root),
        "mounts": mounts_below(Path("/proc/self/mountinfo").read_text(), str(settings.root)),
        "interfaces": sorted(entry.name for entry in Path("/sys/class/net").iterdir()),
        "rules": rules,
        "groups": groups,
        "folders": [str(folder) for folder in FIXED_FOLDERS if folder.exists()],
        "root": settings.root.exists(),
        "sysctls": read_sysctls(),
    }

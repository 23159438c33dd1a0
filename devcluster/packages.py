"""The Debian packages that the cluster stands on, installed only where a program is missing."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from devcluster.errors import DevclusterError
from devcluster.report import Reporter

PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables-save": "iptables",
    "ip": "iproute2",
    "mount": "mount",
    "conntrack": "conntrack",
    "socat": "socat",
    "gcc": "gcc",
}
FILES = {
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/include/stdio.h": "libc6-dev",
}
APT_TIMEOUT_S = 600.0


def missing_packages(
    has_program: Callable[[str], bool], has_file: Callable[[str], bool]
) -> tuple[str, ...]:
    """Name the packages, sorted, that provide what this machine lacks."""
    packages = {package for program, package in PROGRAMS.items() if not has_program(program)}
    packages |= {package for file, package in FILES.items() if not has_file(file)}
    return tuple(sorted(packages))


def ensure_packages(report: Reporter) -> None:
    """Install what is missing with apt-get.

    Raises:
        DevclusterError: there is no apt-get, or it failed, or it did not bring what is needed.
    """
    missing = _missing()
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise DevclusterError(
            f"Missing: {', '.join(missing)} (names of Debian packages), and this machine has no "
            "apt-get. Install them with your distribution's package manager."
        )
    with report.step(f"install {' '.join(missing)}"):
        _apt("update")
        _apt("install", "-y", "--no-install-recommends", *missing)
    still = _missing()
    if still:
        raise DevclusterError(f"apt-get installed {', '.join(still)}, but their files are missing")


def _missing() -> tuple[str, ...]:
    return missing_packages(
        lambda program: shutil.which(program) is not None, lambda file: Path(file).exists()
    )


def _apt(*arguments: str) -> None:
    command = ["apt-get", "-q", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=APT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise DevclusterError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")

"""Builds the cluster's programs from pinned Go modules, once a machine."""

import hashlib
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import DevclusterError, failed
from devcluster.report import Reporter, Step
from devcluster.settings import COREDNS_VERSION, HELM_VERSION, Settings, kubernetes_version

BINARIES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
    "helm",
    "coredns",
)
HELM = f"helm.sh/helm/v3/cmd/helm@{HELM_VERSION}"
COREDNS = f"github.com/coredns/coredns@{COREDNS_VERSION}"
BUILD_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class GoBuild:
    """One call of the Go tool."""

    title: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


def build_key(go_mod: bytes, go_sum: bytes) -> str:
    """Name the cache folder: another module set or helm or CoreDNS is another folder."""
    digest = hashlib.sha256()
    for piece in (go_mod, go_sum, HELM.encode(), COREDNS.encode()):
        digest.update(len(piece).to_bytes(8, "big") + piece)
    return digest.hexdigest()[:16]


def build_plan(out: Path, version: str) -> tuple[GoBuild, ...]:
    """Say how to build every program into ``out``; ``version`` is Kubernetes' own (``v1.34.4``).

    helm and CoreDNS want other versions of the libraries that Kubernetes uses and are therefore
    built apart, from their own modules.
    """
    major, minor, _ = version.removeprefix("v").split(".", 2)
    package = "k8s.io/component-base/version"
    flags = " ".join(
        (
            "-s -w",
            f"-X {package}.gitVersion={version}",
            f"-X {package}.gitMajor={major}",
            f"-X {package}.gitMinor={minor}",
            f"-X {package}.gitTreeState=clean",
        )
    )
    install = (("GOBIN", str(out)), ("GOFLAGS", ""))
    return (
        GoBuild(
            f"build Kubernetes {version} and etcd",
            ("go", "build", "-v", "-mod=readonly", "-ldflags", flags, "-o", f"{out}/", "tool"),
        ),
        GoBuild(
            f"build helm {HELM_VERSION}",
            ("go", "install", "-v", "-ldflags", "-s -w", HELM),
            install,
        ),
        GoBuild(
            f"build CoreDNS {COREDNS_VERSION}",
            ("go", "install", "-v", "-ldflags", "-s -w", COREDNS),
            install,
        ),
    )


def bin_folder(settings: Settings) -> Path:
    """Return the folder of this checkout's programs, built or not."""
    key = build_key(
        (settings.go_folder / "go.mod").read_bytes(), (settings.go_folder / "go.sum").read_bytes()
    )
    return settings.cache / key / "bin"


def ensure_binaries(settings: Settings, report: Reporter) -> Path:
    """Build what the cache lacks and return the folder of the programs.

    Raises:
        DevclusterError: Go is missing, or a build failed; the message names the build's log.
    """
    folder = bin_folder(settings)
    if all((folder / name).exists() for name in BINARIES):
        return folder
    if shutil.which("go") is None:
        raise DevclusterError("Go is missing: install Go 1.26 or newer and put `go` on PATH")
    version = kubernetes_version((settings.go_folder / "go.mod").read_text())
    new = folder.with_name("bin.new")
    new.mkdir(parents=True, exist_ok=True)
    log = folder.with_name("build.log")
    log.write_text("")
    for build in build_plan(new, version):
        with report.step(build.title) as step:
            _go(build, settings.go_folder, log, step)
    # Go names a program after its folder; etcd's is called server
    (new / "server").rename(new / "etcd")
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    return folder


def _go(build: GoBuild, folder: Path, log: Path, step: Step) -> None:
    env = {**os.environ, "CGO_ENABLED": "0", **dict(build.env)}
    with log.open("a") as out:
        process = subprocess.Popen(
            build.argv,
            cwd=folder,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        overdue = threading.Timer(BUILD_TIMEOUT_S, process.kill)
        overdue.start()
        try:
            assert process.stderr is not None  # noqa: S101 - asked for with PIPE above
            for packages, line in enumerate(process.stderr, start=1):
                out.write(line)
                out.flush()
                step.update(f"{packages} packages, now {line.strip()[:60]}")
            code = process.wait()
        finally:
            overdue.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0:
        raise failed(f"{build.title} failed (exit code {code})", log)

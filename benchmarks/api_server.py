"""The dev cluster's etcd and kube-apiserver alone, on loopback, in a folder of their own."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import yaml

from devcluster.build import ensure_binaries
from devcluster.certs import admin_token, ensure_certificates
from devcluster.parts import ETCD_URL, control_plane
from devcluster.report import Reporter
from devcluster.settings import API_URL, NODE_IP, load_settings
from tests.support.process import free_port

START_S = 120.0


@contextmanager
def api_server() -> Iterator[tuple[str, str, Path]]:
    """Yield the address, the admin's token, and a kubeconfig. No controller and no kubelet run."""
    # a socket's path is short
    root = Path(tempfile.mkdtemp(prefix="scale-", dir="/var/tmp"))
    settings = replace(load_settings(os.environ), root=root)
    bins = ensure_binaries(settings, Reporter())
    ensure_certificates(settings)
    etcd, peer, secure = free_port(), free_port(), free_port()
    url = f"https://127.0.0.1:{secure}"
    swaps = {
        ETCD_URL: f"http://127.0.0.1:{etcd}",
        "http://127.0.0.1:2380": f"http://127.0.0.1:{peer}",
        "--secure-port=6443": f"--secure-port={secure}",
        NODE_IP: "127.0.0.1",
    }
    started: list[subprocess.Popen[bytes]] = []
    try:
        for part in control_plane(settings, bins)[:2]:
            argv = [_swapped(word, swaps) for word in part.argv]
            if part.name == "kube-apiserver":
                # nothing else may find this one, and loopback is no endpoint
                argv.append("--endpoint-reconciler-type=none")
            with (root / f"{part.name}.log").open("wb") as log:
                started.append(subprocess.Popen(argv, cwd=root, stdout=log, stderr=log))
        kubeconfig = root / "local.kubeconfig"
        text = (root / "kubeconfig").read_text().replace(API_URL, url)
        kubeconfig.write_text(text)
        _wait(url, settings.pki / "ca.crt", started, root)
        yield url, admin_token(settings), kubeconfig
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(root)


def authority(kubeconfig: Path) -> str:
    """The CA's certificate, PEM."""
    import base64

    (cluster,) = yaml.safe_load(kubeconfig.read_text())["clusters"]
    return base64.b64decode(cluster["cluster"]["certificate-authority-data"]).decode()


def _swapped(word: str, swaps: dict[str, str]) -> str:
    for old, new in swaps.items():
        word = word.replace(old, new)
    return word


def _wait(url: str, ca: Path, started: list[subprocess.Popen[bytes]], root: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"{url}/readyz", verify=str(ca), timeout=2).is_success:
                return
        except httpx.HTTPError:
            pass
        ended = [p for p in started if p.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(p.read_text(errors="replace")[-1500:] for p in root.glob("*.log"))
            raise SystemExit(f"the API server did not start:\n{logs}")
        time.sleep(0.2)

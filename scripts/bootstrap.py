"""Make the environment (.venv) from uv.lock on a machine that has only Python and a network.

Run by ``make``; does nothing when .venv is as new as the lock. uv is taken from PATH, else it is
installed into a private folder, so that a Python managed by the distribution stays untouched.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV_VERSION = "0.13.9"
EXTRAS = ("cpu", "operator", "pod", "s3", "gs", "client", "dev")
OLDEST, NEWEST = (3, 11), (3, 13)


class BootstrapError(Exception):
    """What is missing, and how to get it."""


def main() -> int:
    """Make the environment; the exit status."""
    try:
        _check_python()
        stamp = ROOT / ".venv" / ".bootstrap"
        wanted = fingerprint(ROOT)
        if stamp.exists() and stamp.read_text() == wanted:
            return 0
        print("bootstrap: making .venv from uv.lock (about a minute, 7 GB)", flush=True)
        sync(find_uv())
        stamp.write_text(wanted)
    except BootstrapError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    return 0


def fingerprint(root: Path) -> str:
    """What the environment is made from: the lock, the project file, and the interpreter."""
    digest = hashlib.sha256()
    for part in (root / "uv.lock", root / "pyproject.toml"):
        digest.update(part.read_bytes())
    digest.update(f"{sys.base_prefix} {sys.version} {EXTRAS} {root}".encode())
    return digest.hexdigest()


def _check_python() -> None:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise BootstrapError(
            f"Python {sys.version.split()[0]} at {sys.executable}: 3.11, 3.12 or 3.13 is needed; "
            "name another one with `make PYTHON=python3.12 …`"
        )


def sync(uv: list[str]) -> None:
    """Install exactly what the lock says, compiled: imports dominate an engine's start."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    command = [*uv, "sync", "--frozen", *extras, "--compile-bytecode"]
    # The interpreter that runs this one: one that uv downloads would not be there for the pods.
    command += ["--python", sys.executable, "--no-python-downloads"]
    env = {
        k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    }
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
        raise BootstrapError(f"failed: {' '.join(command)}")


def find_uv() -> list[str]:
    """The command line of a uv that works: on PATH, installed earlier, or installed now.

    Raises:
        BootstrapError: there is none and neither pip nor venv could bring one.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "rollout-bootstrap" / f"uv-{UV_VERSION}-{sys.implementation.cache_tag}"
    private = folder / "bin" / "uv"
    on_path = shutil.which("uv")
    for candidate in (on_path, str(private)):
        if candidate and _works(candidate):
            return [candidate]
    print(f"bootstrap: installing uv {UV_VERSION} into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    for install in (_by_pip, _by_venv, _by_distribution):
        if install(folder) and _works(str(private)):
            return [str(private)]
    raise BootstrapError(
        "could not install uv. Install pip for this Python (Debian: apt-get install python3-pip) "
        "or put a uv on PATH, then run again"
    )


def _works(uv: str) -> bool:
    """A version manager's shim may stand on PATH and still run nothing."""
    try:
        return subprocess.run([uv, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _pip(python: str | Path, *args: str) -> bool:
    command = [str(python), "-m", "pip", "install", "--quiet", *args, f"uv=={UV_VERSION}"]
    return subprocess.run(command, check=False).returncode == 0


def _by_pip(folder: Path) -> bool:
    # --target needs no venv module and is allowed where the distribution manages its Python.
    return _pip(sys.executable, "--target", str(folder))


def _by_venv(folder: Path) -> bool:
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=False)
    return made.returncode == 0 and _pip(folder / "bin" / "python")


def _by_distribution(folder: Path) -> bool:
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    print("bootstrap: installing Debian's python3-pip", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for args in (["update", "-qq"], ["install", "-y", "-qq", "python3-pip"]):
        if subprocess.run(["apt-get", *args], env=env, check=False).returncode:
            return False
    return _by_pip(folder)


if __name__ == "__main__":
    sys.exit(main())

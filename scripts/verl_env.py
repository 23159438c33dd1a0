"""Make .venv-verl, where the tests of ``rollout_client.verl`` run: .venv, with verl laid over it.

verl's own requirements ask for other versions of torch, transformers and vLLM than ours. So only
verl and the few packages that it imports are installed, all pinned and without their requirements,
and everything else is that of .venv. Does nothing when it is as new as what it is made from.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import bootstrap

FOLDER = bootstrap.ROOT / ".venv-verl"
PYTHON = FOLDER / "bin" / "python"
REQUIREMENTS = bootstrap.ROOT / "tests" / "verl" / "requirements.txt"
NEWEST = (3, 12)
"""The newest Python that verl takes."""


def main() -> int:
    """Make the environment; the exit status."""
    try:
        if sys.version_info[:2] > NEWEST:
            raise bootstrap.BootstrapError(
                f"verl needs Python {NEWEST[0]}.{NEWEST[1]} or older, and .venv has "
                f"{sys.version.split()[0]}"
            )
        stamp = FOLDER / ".bootstrap"
        wanted = fingerprint()
        if stamp.exists() and stamp.read_text() == wanted:
            return 0
        print("verl_env: making .venv-verl (half a minute, 0.5 GB)", flush=True)
        make(bootstrap.find_uv())
        stamp.write_text(wanted)
    except bootstrap.BootstrapError as error:
        print(f"verl_env: {error}", file=sys.stderr)
        return 1
    return 0


def fingerprint() -> str:
    """What the environment is made from: the pins, and .venv."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes())
    digest.update(f"{below()} {sys.version}".encode())
    return digest.hexdigest()


def below() -> str:
    """The folder of .venv's packages. This program is run by .venv's interpreter."""
    return sysconfig.get_path("purelib")


def make(uv: list[str]) -> None:
    """Install the pins into a new environment that sees .venv's packages behind its own.

    Raises:
        BootstrapError: a step failed.
    """
    _run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(FOLDER)])
    _run(
        [*uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--compile-bytecode",
         "--python", str(PYTHON), "-r", str(REQUIREMENTS)]
    )  # fmt: skip
    own = Path(_run([str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))
    for stray in ("tests", "scripts"):
        # verl's wheel brings top-level packages of these names; ours have no __init__.py and lose
        shutil.rmtree(own / stray, ignore_errors=True)
    # A plain path would not bring the links to editable packages that .venv holds.
    (own / "below.pth").write_text(f"import site; site.addsitedir({json.dumps(below())})\n")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise bootstrap.BootstrapError(f"failed: {' '.join(command)}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

"""SIGTERM ends a container's first process while it still imports: no default action would."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import os, sys
os.getpid = lambda: {pid}
sys.argv = ["program"]
from {package}.__main__ import main
main()
"""
HANGS = "import time\nprint('imports', flush=True)\ntime.sleep(90)\n"


@pytest.mark.parametrize(
    ("package", "first"), [("rollout_pod", "typer"), ("rollout_operator", "pydantic")]
)
@pytest.mark.parametrize(
    ("pid", "ends"), [(1, 128 + signal.SIGTERM), (7, -signal.SIGTERM)], ids=["first", "another"]
)  # fmt: skip
def test_it_ends_while_it_imports(
    tmp_path: Path, package: str, first: str, pid: int, ends: int
) -> None:
    (tmp_path / f"{first}.py").write_text(HANGS)
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(pid=pid, package=package)],
        stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    with process:
        try:
            assert process.stdout and process.stdout.readline() == b"imports\n"
            process.terminate()
            assert process.wait(30) == ends
        finally:
            process.kill()


@pytest.mark.parametrize("package", ["rollout_pod", "rollout_operator"])
def test_nothing_that_takes_its_time_comes_before(package: str) -> None:
    code = f"import sys; before = set(sys.modules); import {package}.__main__; " + (
        "print(*sorted(m for m in set(sys.modules) - before if m.startswith('rollout')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        package, f"{package}.__main__", "rollout_pod", "rollout_pod.first_process"
    }  # fmt: skip

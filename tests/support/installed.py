"""Engines of the tests, installed for the processes that a test starts."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def installed_engines(engines: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment of a process that finds these engines (``{name: "module:function"}``) beside
    those that are there, as if another package had brought them.
    """
    with tempfile.TemporaryDirectory(prefix="site-") as folder:
        info = Path(folder) / "engines_of_the_tests-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: engines-of-the-tests\nVersion: 0\n"
        )
        entries = "\n".join(f"{name} = {target}" for name, target in engines.items())
        (info / "entry_points.txt").write_text(f"[rollout_pod.engines]\n{entries}\n")
        path = [folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

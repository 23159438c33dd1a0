"""Each extra names all that its part imports: what only an engine brings is not relied on."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement

OURS = "rollout-replica"
ENTRIES = {
    "operator": ("rollout_operator.__main__", "rollout_operator.cli"),
    "pod": ("rollout_pod.__main__", "rollout_pod.cli", "rollout_pod.serve", "rollout_pod.front_ends.front_end",
            "rollout_pod.weights.agent", "rollout_pod.nodes.ranks"),
    "client": ("rollout_client",),
    "kube": ("rollout_client.kube",),
    "kubectl": ("rollout_client.kubectl.__main__",),
    "trainer": ("rollout_client.trainer", "rollout_pod.weights.trainer"),
}  # fmt: skip
BROUGHT = {"trainer": {"torch"}}
"""By whoever uses the extra."""
BLOCKED = """
import importlib, sys
sys.modules.update(dict.fromkeys(blocked))  # as if it were not there
for name in entries:
    importlib.import_module(name)
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def reached(roots: list[tuple[str, frozenset[str]]]) -> set[str]:
    """Distributions that come with these, each with its extras."""
    seen: set[tuple[str, frozenset[str]]] = set()
    while roots:
        name, extras = roots.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            needed = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue  # of another platform
        roots += [
            (normal(each.name), frozenset(each.extras))
            for each in needed
            if each.marker is None
            or any(each.marker.evaluate({"extra": extra}) for extra in extras | {""})
        ]
    return {name for name, _ in seen}


@pytest.mark.parametrize("extra", ENTRIES)
def test_an_extra_names_what_its_part_imports(extra: str) -> None:
    there = reached(
        [(OURS, frozenset({extra})), *((n, frozenset()) for n in BROUGHT.get(extra, ()))]
    )
    blocked = {
        module
        for module, distributions in packages_distributions().items()
        if not {normal(name) for name in distributions} & there
    }
    assert "vllm" in blocked
    code = f"blocked, entries = {blocked!r}, {ENTRIES[extra]!r}\n{BLOCKED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]

"""docs/known-bugs.md names tests that exist, for each of the bugs."""

import ast
import re
from pathlib import Path

from tests.support.docs import FOLDER

ROOT = FOLDER.parent
BUGS = range(1, 26)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> dict[int, str]:
    found = {}
    for line in (FOLDER / "known-bugs.md").read_text().splitlines():
        if re.match(r"\| \d", line):
            number, *_, keeps = line.strip("|").split("|")
            assert int(number) not in found, number
            found[int(number)] = keeps.strip()
    return found


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_bug_has_a_test_that_exists():
    found = rows()
    assert list(found) == list(BUGS)
    for number, keeps in found.items():
        named = TEST.findall(keeps)
        assert named, f"bug {number} names no test"
        for file, name in named:
            assert (ROOT / file).exists(), f"bug {number}: {file}"
            assert name in functions(ROOT / file), f"bug {number}: {file} has no {name}"

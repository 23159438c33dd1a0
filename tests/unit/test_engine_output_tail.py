"""What is taken for the last error line, and that nothing printed is lost."""

import os
import subprocess
import sys

import pytest

from rollout_pod.engine.output_tail import OutputTail, last_error

LOGGED = "(EngineCore pid=28564) ERROR 11-30 18:21:18 [core.py:133] "
HEARSAY = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], None),
        (["all is well", "error: no", "the Error is mine"], None),
        (["ValueError: too small"], "ValueError: too small"),
        (["ValueError: first", "KeyError: 'second'"], "KeyError: 'second'"),
        (["  ValueError: in a frame", "done"], "ValueError: in a frame"),
        ([LOGGED + "ValueError: no room", HEARSAY], "ValueError: no room"),
        ([f"\x1b[0;36m{LOGGED}\x1b[0mOSError: gone"], "OSError: gone"),
        (["a.b.HeaderError: torn"], "a.b.HeaderError: torn"),
        (["ValueError:"], None),
        ([HEARSAY], None),
        (["Exception: WorkerProc initialization failed due to x. See root cause."], None),
    ],
)
def test_last_error(lines, expected):
    assert last_error(lines) == expected


def test_children_print_where_they_did_and_are_remembered(capfd):
    tail = OutputTail()
    program = "import sys; print('out', flush=True); sys.exit('ValueError: err')"
    with tail.inherited():
        child = subprocess.Popen([sys.executable, "-c", program])
    print("mine", flush=True)
    assert child.wait(30) == 1
    tail.close(10)
    seen = capfd.readouterr()
    assert sorted(seen.out.split()) == ["mine", "out"]
    assert "ValueError: err" in seen.err
    assert tail.last_error() == "ValueError: err"
    assert tail.last_error(within_s=60) == "ValueError: err"
    assert tail.last_error(within_s=0) is None


def test_a_child_that_prints_much_does_not_block(capfd):
    tail = OutputTail()
    size = 3 << 20
    program = f"import sys; sys.stdout.write('x' * {size} + '\\n'); sys.stderr.write('y')"
    with tail.inherited():
        child = subprocess.Popen([sys.executable, "-c", program])
    assert child.wait(60) == 0
    tail.close(10)
    seen = capfd.readouterr()
    assert seen.out.count("x") == size
    assert seen.err == "y"


def test_descriptors_are_given_back():
    before = len(os.listdir("/proc/self/fd"))
    tail = OutputTail()
    with tail.inherited():
        pass
    tail.close(10)
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the resource tracker's pipe
    again = OutputTail()
    with again.inherited():
        pass
    again.close(10)
    assert len(os.listdir("/proc/self/fd")) <= before + 1

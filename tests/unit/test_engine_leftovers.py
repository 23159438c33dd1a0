"""Of the files in /dev/shm, only those that nobody maps any more are removed."""

import mmap
import os
import subprocess
import sys
from multiprocessing import shared_memory

import psutil
import pytest

from rollout_pod.engine import leftovers

DIST = "vllm_dist_0-tp:0-[0-1]-cpushm_0"
MAPS = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    for name in (DIST, "sem.mp-abc", "psm_123", "rollout-segment", "other"):
        (tmp_path / name).write_bytes(b"x" * 32)
    return tmp_path


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    """Only this process and its children are looked at: another's init may hide what it maps."""
    me = psutil.Process()
    monkeypatch.setattr(
        psutil, "pids", lambda: [me.pid, *(child.pid for child in me.children(recursive=True))]
    )


@pytest.fixture
def mapper(folder):
    """Another process, which maps one of the files."""
    with subprocess.Popen(
        [sys.executable, "-c", MAPS, folder / DIST], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"mapped\n"
        yield process


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_killed_containers_files_are_removed_in_a_pod_only(folder):
    assert leftovers.sweep_pod({}, folder) == frozenset()
    assert len(names(folder)) == 5
    removed = leftovers.sweep_pod({leftovers.IN_POD: "uid"}, folder)
    assert removed == {DIST, "sem.mp-abc", "psm_123"}
    assert names(folder) == {"rollout-segment", "other"}


def test_a_file_that_another_process_maps_stays(folder, mapper):
    assert leftovers.mapped_by([psutil.Process(mapper.pid)], folder) == {DIST}
    assert leftovers.mapped_by([psutil.Process()], folder) == frozenset()
    leftovers.sweep_pod({leftovers.IN_POD: "uid"}, folder)
    assert names(folder) == {DIST, "rollout-segment", "other"}
    mapper.kill()
    mapper.wait(30)
    assert leftovers.mapped_by([psutil.Process()], folder) == frozenset()
    assert leftovers.remove_unused([DIST], folder) == {DIST}


def test_a_file_that_this_process_maps_stays(folder):
    with open(folder / DIST, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert leftovers.unused([DIST, "gone"], folder) == frozenset()
    assert leftovers.unused([DIST, "gone"], folder) == {DIST}


def test_only_what_was_named_is_removed(folder):
    assert leftovers.remove_unused([DIST, "rollout-segment"], folder) == {DIST}
    assert len(names(folder)) == 4


def test_no_leftovers_of_others_are_removed_where_a_process_hides_what_it_maps(folder, monkeypatch):
    def hides(pid):
        raise leftovers._UnreadableError(pid)

    monkeypatch.setattr(leftovers, "_maps", hides)
    assert leftovers.sweep_pod({leftovers.IN_POD: "uid"}, folder) == frozenset()
    assert leftovers.remove_unused([DIST], folder) == {DIST}


def test_the_resource_tracker_forgets_what_was_removed():
    program = (
        "import os; from multiprocessing import shared_memory as s;"
        "m = s.SharedMemory(create=True, size=64); name = m.name; m.close();"
        "from rollout_pod.engine import leftovers;"
        "print(leftovers.remove_unused([name]) == {name})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True\n"
    assert done.stderr == ""


def test_shared_memory_of_this_process_is_seen():
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        assert memory.name in leftovers.names_now()
        assert memory.name in leftovers.mapped_by([psutil.Process(os.getpid())])
        assert leftovers.unused([memory.name]) == frozenset()
    finally:
        memory.close()
        memory.unlink()

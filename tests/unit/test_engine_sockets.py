"""The folder of vLLM's own sockets."""

import socket
import stat
import tempfile
import uuid
from pathlib import Path

from rollout_pod.engine import sockets


def test_what_a_killed_engine_left_is_removed() -> None:
    with tempfile.TemporaryDirectory(prefix="run-") as name:  # a short one
        run_dir = Path(name)
        folder = sockets.folder_in(run_dir)
        assert folder is not None and folder.parent == run_dir
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "left").write_text("")
        (run_dir / "ranks").mkdir()
        assert sockets.folder_in(run_dir) == folder
        assert list(folder.iterdir()) == []
        sockets.remove(run_dir)
        sockets.remove(run_dir)
        assert [path.name for path in run_dir.iterdir()] == ["ranks"]


def test_a_path_that_is_too_long_for_a_socket_is_not_used() -> None:
    """By one byte, as the kernel counts."""
    room = 107 - len(f"/vllm/{uuid.uuid4()}")
    root = Path("/tmp")
    fits = root / ("x" * (room - len(str(root)) - 1))
    folder = sockets.folder_in(fits)
    try:
        assert folder is not None
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / str(uuid.uuid4())))
    finally:
        sockets.remove(fits)
        fits.rmdir()
    assert sockets.folder_in(fits.with_name(fits.name + "x")) is None
    assert not fits.with_name(fits.name + "x").exists()

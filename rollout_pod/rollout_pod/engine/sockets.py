"""Where vLLM's processes meet: sockets of random names, which none of them removes."""

import os
import shutil
from pathlib import Path

_LONGEST = 107
"""Bytes of a socket's path."""
_NAME = 36
"""A UUID."""


def folder_in(run_dir: Path) -> Path | None:
    """An empty folder for them, private to this user; None where their paths would be too long:
    they stay in the machine's temporary folder then.
    """
    folder = run_dir.absolute() / "vllm"
    if len(os.fsencode(folder)) + 1 + _NAME > _LONGEST:
        return None
    remove(run_dir)  # those of an engine that was killed
    folder.mkdir(parents=True, mode=0o700)
    return folder


def remove(run_dir: Path) -> None:
    """Remove what ``folder_in`` made, with all that is in it; nothing there is no error."""
    shutil.rmtree(run_dir.absolute() / "vllm", ignore_errors=True)

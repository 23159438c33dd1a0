"""Opening what lies in a source folder, whatever it is."""

import errno
import os
import stat
from pathlib import Path
from typing import Final

from rollout_pod.weights.headers import SourceError

NAME_BYTES: Final = 255
"""The longest file name of common file systems."""


def open_regular(file: Path) -> int:
    """A descriptor for reading. Never waits for the other end of a pipe, as a plain ``open`` does.

    Raises:
        SourceError: it is missing, no regular file, or cannot be opened.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise _not_opened(file, error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_regular(file)
        os.set_blocking(fd, True)
    except OSError as error:
        os.close(fd)
        raise _not_opened(file, error) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_folder(path: Path) -> bool:
    """Whether a folder is there.

    Raises:
        SourceError: something else is, or it cannot be looked at.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise _not_opened(path, error) from error
    if not stat.S_ISDIR(mode):
        raise SourceError(
            f"{path}: is no folder; give the folder that holds the safetensors files",
            retryable=True,
        )
    return True


def is_plain_name(name: object) -> bool:
    """Whether a file in a folder can have this name."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= NAME_BYTES
    except UnicodeEncodeError:
        return False


def _not_regular(file: Path) -> SourceError:
    return SourceError(
        f"{file}: is no regular file (a pipe, socket, device or folder); put the file itself there",
        retryable=True,
    )


def _not_opened(file: Path, error: OSError | ValueError) -> SourceError:
    if isinstance(error, ValueError):
        return SourceError(f"{str(file)!r} is no possible path ({error})", retryable=False)
    if error.errno == errno.ENXIO:  # a socket
        return _not_regular(file)
    if error.errno == errno.ENOENT:
        return SourceError(f"{file}: missing ({error.strerror}); copy it there", retryable=True)
    if error.errno == errno.ENAMETOOLONG:
        return SourceError(f"{file}: {error.strerror}; use a shorter path", retryable=False)
    return SourceError(f"{file}: {error.strerror}; make it readable", retryable=True)

"""The few ZMQ settings that every socket of this package has."""

import stat
from pathlib import Path
from typing import Any, Final

import zmq

PATH_BYTES: Final = 107
"""The longest path of a Unix socket on Linux."""

HEARTBEAT_S: Final = 0.5
SILENCE_S: Final = 2.0
"""A peer whose I/O thread is silent for this long (frozen; a dead one is noticed at once) is lost.
ZMQ sends these beats by itself: a busy main thread never looks dead."""

MESSAGE_BYTES: Final = 64 << 20
"""The largest control message; tensors never travel in messages."""

PEER_EVENTS: Final = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)


def ipc_address(path: Path) -> str:
    """The ZMQ address of a socket path.

    Raises:
        ValueError: the path is too long for a Unix socket.
    """
    size = len(str(path).encode())
    if size > PATH_BYTES:
        raise ValueError(
            f"socket path of {size} bytes, at most {PATH_BYTES} are possible: "
            f"use a shorter run directory ({path})"
        )
    return f"ipc://{path}"


def tune(socket: "zmq.Socket[Any]") -> None:
    """Beats, size limit, no waiting at close, no blocking send."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(SILENCE_S * 1000))


def bind(socket: "zmq.Socket[Any]", path: Path) -> int:
    """Bind to ``path``; a socket file that a dead process left there is removed.

    Returns:
        The inode of the new socket file, for ``remove_socket``.

    Raises:
        ValueError: the path is too long.
        FileExistsError: something that is no socket lies there.
    """
    address = ipc_address(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_socket(path)
    socket.bind(address)
    return path.lstat().st_ino


def remove_socket(path: Path, inode: int | None = None) -> None:
    """Remove a socket file, if there is one; with ``inode`` only that one, as another process may
    have bound there since.

    Raises:
        FileExistsError: something that is no socket lies there.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if inode is not None and found.st_ino != inode:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(f"{path} is no socket: remove it")
    path.unlink(missing_ok=True)

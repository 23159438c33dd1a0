"""What a pod needs where no operator gives it: a run folder of one's own, a token, an agent."""

import asyncio
import fcntl
import os
import secrets
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import structlog

from rollout_pod.protocol import LOCAL_OWNER, DesiredDocument

log = structlog.get_logger(__name__)

_RESPAWN_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_TERM_S = 5.0


class RunDirError(Exception):
    """This folder cannot be served from; the message says why."""


def default_run_dir() -> Path:
    """One folder a user; several pods on one machine name their own."""
    return Path(tempfile.gettempdir()) / f"rollout-pod-{os.getuid()}"


def claim_run_dir(run_dir: Path) -> int:
    """Make the folder and lock it for the life of this process; returns the lock's descriptor.

    Raises:
        RunDirError: it cannot be made, is not ours, or another process holds it.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(run_dir / "lock", flags, 0o600)
    except OSError as error:
        raise RunDirError(f"--run-dir {run_dir}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RunDirError(
            f"another pod runs in {run_dir}: end it, or give this one its own --run-dir"
        ) from None
    return lock


def make_token(run_dir: Path) -> Path:
    """A random token in a folder that only this user reads; returns the folder.

    Raises:
        RunDirError: the run folder is another user's.
    """
    owner = run_dir.lstat().st_uid
    if owner != os.getuid():  # in a shared folder for temporary files somebody may have been first
        raise RunDirError(f"--run-dir {run_dir} belongs to user {owner}: name another one")
    folder = run_dir / "admin"
    folder.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    fd = os.open(folder / "token", flags, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_urlsafe(32))
    return folder


def forget(run_dir: Path) -> None:
    """Begin as a new pod: without the documents of an earlier one."""
    for name in ("desired.json", "record.json"):
        with suppress(FileNotFoundError):
            (run_dir / name).unlink()


def first_document() -> DesiredDocument:
    """Serve the model's own checkpoint until somebody says otherwise."""
    return DesiredDocument(owner=LOCAL_OWNER, generation=0)


async def keep_agent(run_dir: Path, shm_dir: Path, host_memory: int) -> None:
    """Run the weights agent as a child and start it again when it ends, until cancelled."""
    failures = 0
    while True:
        started = asyncio.get_running_loop().time()
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollout_pod", "weights", f"--run-dir={run_dir}"),
            *(f"--shm-dir={shm_dir}", f"--host-memory={host_memory}", f"--parent={os.getpid()}"),
        )
        try:
            code = await agent.wait()
        finally:
            if agent.returncode is None:
                agent.terminate()
                try:
                    async with asyncio.timeout(_TERM_S):
                        await agent.wait()
                except TimeoutError:
                    agent.kill()
                    await agent.wait()
        lived = asyncio.get_running_loop().time() - started
        failures = 0 if lived > max(_RESPAWN_S) else failures + 1
        delay = _RESPAWN_S[min(failures, len(_RESPAWN_S) - 1)]
        log.warning("weights agent ended", code=code, starts_again_in_s=delay)
        await asyncio.sleep(delay)

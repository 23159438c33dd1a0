"""The one error that a person of the dev cluster gets to read."""

from pathlib import Path

LOG_LINES = 20


class DevclusterError(RuntimeError):
    """Something failed in a way that the message explains, with what to do next."""


def tail(path: Path, lines: int = LOG_LINES) -> str:
    """Return the last ``lines`` lines of a log, or say that there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def failed(what: str, log: Path) -> DevclusterError:
    """Make the error of a failure whose reason stands in ``log``."""
    return DevclusterError(f"{what}\nRead {log}; its last lines:\n{tail(log)}")

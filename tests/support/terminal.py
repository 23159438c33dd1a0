"""A program under a terminal of its own, and what a person saw there."""

import codecs
import errno
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Mapping, Sequence

_CODE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|(\r)|(\n)")


class Screen:
    """Rows of text, as far as one line that changes needs: what else comes is an error.

    ``shown`` are its states, one after each piece of text, without empty rows at the end.
    """

    def __init__(self) -> None:
        self.rows: list[str] = [""]
        self.shown: list[list[str]] = []
        self.has_cursor = True
        self.codes: set[str] = set()
        """The control codes that moved or erased something."""
        self._row = self._column = 0
        self._rest = ""

    def write(self, text: str) -> None:
        """What the program prints; codes may be cut anywhere."""
        text, self._rest = self._rest + text, ""
        if (cut := re.search(r"\x1b(\[[?0-9;]*)?$", text)) is not None:
            text, self._rest = text[: cut.start()], text[cut.start() :]
        at = 0
        for found in _CODE.finditer(text):
            self._put(text[at : found.start()])
            self._obey(found)
            at = found.end()
        self._put(text[at:])

    @property
    def text(self) -> list[str]:
        """The rows now."""
        rows = [row.rstrip() for row in self.rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def _put(self, text: str) -> None:
        if not text:
            return
        row = self.rows[self._row].ljust(self._column)
        end = self._column + len(text)
        self.rows[self._row] = row[: self._column] + text + row[end:]
        self._column = end
        if not self.shown or self.text != self.shown[-1]:
            self.shown.append(self.text)

    def _obey(self, found: re.Match[str]) -> None:
        private, number, letter, back, feed = found.groups()
        if back:
            self._column = 0
        elif feed:
            self._row += 1
            self.rows.extend([""] * (self._row + 1 - len(self.rows)))
        elif private:
            assert (number, letter) in (("25", "h"), ("25", "l")), found.group()
            self.has_cursor = letter == "h"
        elif letter == "A":
            self._row = max(0, self._row - int(number or 1))
        elif letter == "K":
            assert number == "2", found.group()
            self.rows[self._row] = ""
        else:
            assert letter == "m", f"a code that this screen does not know: {found.group()!r}"
        if letter and letter != "m":
            self.codes.add(letter)


class Terminal:
    """``argv`` with a terminal as its stdin and stderr, and as its stdout unless that is a file's.

    Args:
        argv: The program.
        env: All of its environment.
        stdout: Another one.
        columns: How wide the terminal is.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], *, stdout: int | None = None,
        columns: int = 160,
    ) -> None:  # fmt: skip
        self.screen = Screen()
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            argv, env=env, stdin=theirs, stdout=theirs if stdout is None else stdout,
            stderr=theirs, preexec_fn=_take_terminal, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, seen: Callable[[Screen], bool], timeout_s: float = 30.0) -> None:
        """Wait until the screen is, or was, like that."""
        with self._news:
            assert self._news.wait_for(lambda: seen(self.screen), timeout_s), self.screen.shown[-5:]

    def type(self, keys: bytes) -> None:
        """As a person does; ``b"\\x03"`` is Ctrl-C."""
        os.write(self._own, keys)

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait until it has ended and all of it was read; its exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    def close(self) -> None:
        """End what still runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._own)

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        while True:
            try:
                found = os.read(self._own, 65536)
            except OSError as error:
                if error.errno != errno.EIO:  # the program has gone, and with it the terminal
                    raise
                return
            if not found:
                return
            with self._news:
                self.screen.write(decoder.decode(found))
                self._news.notify_all()


def _take_terminal() -> None:
    """In the child: Ctrl-C goes to whom the terminal belongs to."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

"""The rank of ``synthetic`` as a process, driven from here."""

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rollout_pod.weights.recording import checksum

SHM = Path("/dev/shm")


class Rank:
    """``load`` is what a session's ``on_accepted`` calls."""

    def __init__(self, shape: str, where: str, run_dir: Path) -> None:
        self.socket = run_dir / "ranks" / "rank-0.sock"
        self._version = ""
        self._kind = "load"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.synthetic", str(run_dir), str(SHM), shape, where],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._answer(180) == "ready"
        self.pid = self._process.pid

    def expect(self, version: str, kind: str = "load") -> None:
        """The version that the next session brings."""
        self._version, self._kind = version, kind

    def load(self, session: str) -> None:
        """Start loading; ``report`` has the end."""
        self._say(f"{self._kind} {session} {self._version}")

    def report(self) -> dict[str, Any]:
        """Of the load that was started last."""
        report: dict[str, Any] = self._answer(150)
        if not report["ok"]:
            raise RuntimeError(report["error"])
        return report

    def ask(self, command: str) -> Any:
        """One command, one answer."""
        self._say(command)
        return self._answer(150)

    def beside(self, command: str, work: Callable[[], Any]) -> tuple[Any, Any]:
        """One command, and ``work`` here at the same time; the answers of both."""
        self._say(command)
        done = work()
        return self._answer(150), done

    def answer(self) -> Any:
        """Of a command that was given by ``load``."""
        return self._answer(150)

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether all of them are in its parameters, to the bit."""
        theirs = self.ask("sums")
        return all(int(checksum(tensor)) == theirs[name] for name, tensor in tensors.items())

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def _answer(self, timeout_s: float) -> Any:
        line = self._answers.get(timeout=timeout_s)
        if line is None:
            raise RuntimeError("the rank has ended")
        return json.loads(line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)


@contextmanager
def rank(shape: str, where: str) -> Iterator[Rank]:
    """Started, and ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="rank-") as folder:
        made = Rank(shape, where, Path(folder))
        try:
            yield made
        finally:
            made.close()

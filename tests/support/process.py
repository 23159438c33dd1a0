"""``rollout-pod serve`` as a real process, with the real engine and the real agent."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from rollout_pod.ctl import Ctl
from rollout_pod.engine.base import EngineOutput
from rollout_pod.protocol import GenerateResponse, StateDocument
from tests.support.engine_kit import BASE_ARGS, reference

START_S = 120.0
GREEDY = {"temperature": 0, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def command_of(process: psutil.Process) -> str:
    """Empty where it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@dataclass
class ServeProcess:
    """One pod; ``start`` may be called again after ``kill``, as a container restarts."""

    model: Path
    run_dir: Path
    options: Sequence[str] = ()
    engine_args: Sequence[str] = BASE_ARGS
    env: Mapping[str, str] | None = None
    """Of the process, instead of this one's."""
    command: str = "serve"
    data: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    admin: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    process: subprocess.Popen[bytes] | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    @property
    def log(self) -> Path:
        return self.run_dir / "serve.log"

    def start(self, *options: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "rollout_pod", self.command, f"--model={self.model}",
                    f"--run-dir={self.run_dir}", f"--data-address={self.data}",
                    f"--admin-address={self.admin}", *self.options, *options, "--",
                    *self.engine_args,
                ],
                stdout=log, stderr=log, env=self.env,
            )  # fmt: skip

    def until(
        self, done: Callable[[StateDocument], bool], *, timeout_s: float = START_S
    ) -> StateDocument:
        """Follow the state, also over a start; fails with the log's end."""
        assert self.process
        deadline = time.monotonic() + timeout_s
        state = None
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ended:\n{self.tail()}"
            try:
                with self.ctl() as ctl:
                    state = ctl.state()
                    while not done(state):
                        assert time.monotonic() < deadline, f"still {state}\n{self.tail()}"
                        state = ctl.state(after=state, timeout_s=0.2)
                    return state
            except AssertionError:
                raise
            except Exception:
                time.sleep(0.1)
        raise AssertionError(f"not there in {timeout_s} s; last {state}\n{self.tail()}")

    def serving(self, version: str, *, timeout_s: float = START_S) -> StateDocument:
        return self.until(
            lambda s: s.phase == "Serving" and s.weight_version == version, timeout_s=timeout_s
        )

    def ctl(self) -> Ctl:
        return Ctl.of_run_dir(self.run_dir, f"http://{self.admin}")

    def interrupt(self, mode: str, *, timeout_s: float = 60.0) -> None:
        """What pauses and updates do from now on to requests in flight."""
        interruption = {"mode": mode, "timeout_s": timeout_s}
        with self.ctl() as ctl:
            ctl.change(
                lambda d: type(d).model_validate(d.model_dump() | {"interruption": interruption})
            )

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        """What a person types."""
        return subprocess.run(
            [
                sys.executable, "-m", "rollout_pod", "ctl", *args,
                f"--run-dir={self.run_dir}", f"--admin=http://{self.admin}",
            ],
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip

    def generate(self, prompt: list[int], max_tokens: int, **more: object) -> GenerateResponse:
        body = {
            "request_id": f"r{time.monotonic_ns()}",
            "prompt_token_ids": prompt,
            "sampling_params": GREEDY | {"max_tokens": max_tokens},
            **more,
        }
        answer = httpx.post(f"http://{self.data}/v1/rollout/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return GenerateResponse.model_validate_json(answer.content)

    @contextmanager
    def stream(
        self, prompt: list[int], max_tokens: int, **more: object
    ) -> Iterator[Iterator[tuple[str, dict[str, object]]]]:
        """The events of a stream; leaving the block closes the connection."""
        body = {
            "request_id": f"s{time.monotonic_ns()}",
            "prompt_token_ids": prompt,
            "sampling_params": GREEDY | {"max_tokens": max_tokens},
            "stream": True,
            **more,
        }

        def events(answer: httpx.Response) -> Iterator[tuple[str, dict[str, object]]]:
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))

        with httpx.stream(
            "POST", f"http://{self.data}/v1/rollout/generate", json=body, timeout=120
        ) as answer:
            assert answer.status_code == 200
            yield events(answer)

    def delete(self, request_id: str) -> GenerateResponse:
        answer = httpx.delete(f"http://{self.data}/v1/rollout/requests/{request_id}", timeout=30)
        assert answer.status_code == 200, answer.text
        return GenerateResponse.model_validate_json(answer.content)

    def begin(self, prompt: list[int], max_tokens: int, **more: object) -> Future[GenerateResponse]:
        return self._pool.submit(self.generate, prompt, max_tokens, **more)

    def get(self, path: str) -> int:
        return httpx.get(f"http://{self.data}{path}", timeout=10).status_code

    def metric(self, name: str) -> float:
        """Of several processes: what the steering one says."""
        text = httpx.get(f"http://{self.data}/metrics", timeout=10).text
        shared = name.rstrip() + '{front_end="main"}'
        return next(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith((name, shared))
        )

    def child(self, *words: str) -> psutil.Process:
        """The one descendant whose command line or title holds all the words."""
        assert self.process
        found = [
            p
            for p in psutil.Process(self.process.pid).children(recursive=True)
            if all(word in command_of(p) for word in words)
        ]
        assert len(found) == 1, found
        return found[0]

    def kill(self) -> None:
        """As a container dies: all of it at once."""
        assert self.process
        family = [*psutil.Process(self.process.pid).children(recursive=True)]
        self.process.kill()
        for member in family:
            if member.is_running():
                member.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        assert self.process
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-40:])

    def is_greedy(self, path: Path, prompt: list[int], answer: GenerateResponse) -> bool:
        """These are exactly the greedy tokens of transformers with this checkpoint."""
        output = EngineOutput(
            tuple(answer.token_ids), tuple(answer.log_probs), answer.finish_reason
        )
        return reference(path).agrees(prompt, output)


@contextmanager
def serve_process(model: Path, *options: str, **more: object) -> Iterator[ServeProcess]:
    """A pod's process, ended afterwards with everything it started."""
    with tempfile.TemporaryDirectory(prefix="pod-") as folder:
        pod = ServeProcess(model, Path(folder), options, **more)  # type: ignore[arg-type]
        try:
            yield pod
        finally:
            if pod.process and pod.process.poll() is None:
                family = psutil.Process(pod.process.pid).children(recursive=True)
                code = pod.stop()
                assert code == 0, pod.tail()
                _, alive = psutil.wait_procs(family, timeout=10)
                assert not alive, alive
            pod._pool.shutdown(cancel_futures=True)

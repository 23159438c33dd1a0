"""Two pods' processes that form one engine, on this machine: each with its own run folder."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.engine_kit import BASE_ARGS
from tests.support.process import ServeProcess, free_port

HERE = "127.0.0.1"


@dataclass
class TwoNodes:
    head: ServeProcess
    node: ServeProcess

    def start(self) -> None:
        self.head.start()
        self.node.start()


@contextmanager
def two_nodes(model: Path, *options: str, engine_args: tuple[str, ...]) -> Iterator[TwoNodes]:
    """One rank each. Ended afterwards with everything they started."""
    with tempfile.TemporaryDirectory(prefix="nd-") as folder:
        head_dir, node_dir = Path(folder) / "h", Path(folder) / "n"
        for made in (head_dir, node_dir):
            made.mkdir(mode=0o700)
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        shared = ("--nodes=2", "--group=first", f"--advertise={HERE}", "--join-timeout=60")
        args = (*BASE_ARGS, *engine_args)
        head = ServeProcess(
            model, head_dir, (*shared, f"--ranks-port={free_port()}", *options), args,
            env | {"VLLM_CPU_OMP_THREADS_BIND": "0"},
        )  # fmt: skip
        node = ServeProcess(
            model, node_dir,
            (*shared, "--node-rank=1", f"--head={head.admin}", f"--token-dir={head_dir}/admin"),
            args, env | {"VLLM_CPU_OMP_THREADS_BIND": "1"}, command="follow",
        )  # fmt: skip
        try:
            yield TwoNodes(head, node)
        finally:
            family = [
                psutil.Process(pod.process.pid)
                for pod in (head, node)
                if pod.process and pod.process.poll() is None
            ]
            family += [child for process in family for child in process.children(recursive=True)]
            for pod in (head, node):
                if pod.process and pod.process.poll() is None:
                    pod.kill()
                pod._pool.shutdown(cancel_futures=True)
            _, alive = psutil.wait_procs(family, timeout=10)
            assert not alive, alive

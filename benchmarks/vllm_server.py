"""vLLM's own server beside ours: the same model, arguments and machine."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from benchmarks.pod import MeasuredModel
from tests.support.process import free_port

START_S = 240.0


@dataclass(frozen=True)
class VllmServer:
    """One that starts, or has started."""

    url: str
    process: asyncio.subprocess.Process

    async def ready(self) -> str:
        """Its address, once it answers."""
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
            while not await _answers(http, self.url):
                if self.process.returncode is not None:
                    raise RuntimeError(f"vllm serve ended with status {self.process.returncode}")
                await asyncio.sleep(0.5)
        return self.url


@asynccontextmanager
async def vllm_server(model: MeasuredModel) -> AsyncIterator[VllmServer]:
    """Starts it, and ends it."""
    port = free_port()
    command = ("-m", "vllm.entrypoints.cli.main", "serve", model.path, *model.args)
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "--tokens-only", f"--port={port}", "--host=127.0.0.1"),
        *("--disable-uvicorn-access-log", "--logprobs-mode=processed_logprobs"),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield VllmServer(f"http://127.0.0.1:{port}", server)
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

"""vLLM's own server beside ours: the same model, arguments and machine."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from benchmarks.pod import MeasuredPod
from tests.support.process import free_port

START_S = 240.0


@asynccontextmanager
async def vllm_server(pod: MeasuredPod) -> AsyncIterator[str]:
    """Its address, once it answers."""
    port = free_port()
    command = ("-m", "vllm.entrypoints.cli.main", "serve", pod.model, *pod.args)
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "--tokens-only", f"--port={port}", "--host=127.0.0.1"),
        *("--disable-uvicorn-access-log", "--logprobs-mode=processed_logprobs"),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
            while not await _answers(http, url):
                if server.returncode is not None:
                    raise RuntimeError(f"vllm serve ended with status {server.returncode}")
                await asyncio.sleep(0.5)
        yield url
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

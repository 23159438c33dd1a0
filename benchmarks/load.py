"""A load from a process of its own: ``python -m benchmarks.load URL CONCURRENT TOKENS KIND``.

KIND ``whole``, ``stream`` or ``vllm`` (vLLM's own token route): ``budgets`` requests, CONCURRENT at
a time; prints ``{"tokens", "seconds"}``. KIND ``cut``: CONCURRENT requests, which somebody cuts;
prints ``{"tokens", "last"}``, with the machine's monotonic clock when the last answer was there.
"""

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp
import uvloop

WAVES = 2


def budgets(concurrent: int, tokens: int) -> list[int]:
    """``max_tokens`` of each request: from half to one and a half of ``tokens``, which is their
    mean, so that requests end and begin at all times, as rollouts do.
    """
    count = WAVES * concurrent
    return [tokens // 2 + tokens * (i * 7 % count) // max(1, count - 1) for i in range(count)]


def prompt(i: int) -> list[int]:
    """Prompt token ids of the request ``i``."""
    return [3 + i % 900, 5, 7, 11]


def _body(kind: str, i: int, tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
    name = f"load-{i}-{time.monotonic_ns()}"
    if kind == "vllm":
        params |= {"logprobs": 0, "detokenize": False}
        return {"request_id": name, "token_ids": prompt(i), "sampling_params": params}
    return {
        "request_id": name,
        "prompt_token_ids": prompt(i),
        "sampling_params": params,
        "stream": kind == "stream",
    }


async def main(url: str, concurrent: int, tokens: int, kind: str) -> None:
    """Send and count."""
    turn = asyncio.Semaphore(concurrent)
    connector = aiohttp.TCPConnector(limit=concurrent)
    timeout = aiohttp.ClientTimeout(total=600)
    path = "/inference/v1/generate" if kind == "vllm" else "/v1/rollout/generate"
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:

        async def one(i: int, tokens: int) -> int:
            async with turn, http.post(path, json=_body(kind, i, tokens)) as answer:
                answer.raise_for_status()
                if kind == "vllm":
                    return len((await answer.json())["choices"][0]["token_ids"])
                if kind != "stream":
                    return len((await answer.json())["token_ids"])
                count = 0
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        count += len(json.loads(line[6:]).get("token_ids", ()))
                return count

        if kind == "cut":
            counts = await asyncio.gather(*(one(i, tokens) for i in range(concurrent)))
            print(json.dumps({"tokens": sum(counts), "last": time.monotonic()}))
            return
        await asyncio.gather(*(one(i, 2) for i in range(concurrent)))  # connections are open
        started = time.perf_counter()
        asked = budgets(concurrent, tokens)
        counts = await asyncio.gather(*(one(i, n) for i, n in enumerate(asked)))
        seconds = time.perf_counter() - started
        if counts != asked:
            raise SystemExit("a request did not get what it asked for")
        print(json.dumps({"tokens": sum(counts), "seconds": seconds}))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))

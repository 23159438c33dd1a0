"""A load from a process of its own: ``python -m benchmarks.load URL CONCURRENT TOKENS KIND``.

KIND ``whole`` or ``stream``: twice CONCURRENT requests, CONCURRENT at a time; prints ``{"tokens",
"seconds"}``. KIND ``cut``: CONCURRENT requests, which somebody cuts; prints ``{"tokens", "last"}``,
with the machine's monotonic clock when the last answer was there.
"""

import asyncio
import json
import sys
import time

import aiohttp


async def main(url: str, concurrent: int, tokens: int, kind: str) -> None:
    """Send and count."""
    turn = asyncio.Semaphore(concurrent)
    connector = aiohttp.TCPConnector(limit=concurrent)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:

        async def one(i: int) -> int:
            body = {
                "request_id": f"load-{i}-{time.monotonic_ns()}",
                "prompt_token_ids": [3 + i % 900, 5, 7, 11],
                "sampling_params": {"temperature": 0, "ignore_eos": True, "max_tokens": tokens},
                "stream": kind == "stream",
            }
            async with turn, http.post("/v1/rollout/generate", json=body) as answer:
                answer.raise_for_status()
                if kind != "stream":
                    return len((await answer.json())["token_ids"])
                count = 0
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        count += len(json.loads(line[6:]).get("token_ids", ()))
                return count

        if kind == "cut":
            counts = await asyncio.gather(*(one(i) for i in range(concurrent)))
            print(json.dumps({"tokens": sum(counts), "last": time.monotonic()}))
            return
        await asyncio.gather(*(one(i) for i in range(min(concurrent, 8))))  # connections are open
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(i) for i in range(2 * concurrent)))
        print(json.dumps({"tokens": sum(counts), "seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))

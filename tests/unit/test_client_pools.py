"""Slots of a client's connection pools (no network)."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest

from rollout_client import RolloutClient
from rollout_client.pools import POOL_SIZE, Pools


def pools(max_concurrency: int) -> Pools:
    return Pools(max_concurrency, timeout=httpx.Timeout(1.0), transport=None)


@pytest.mark.parametrize("count", [1, POOL_SIZE, 3 * POOL_SIZE + 5])
async def test_no_pool_ever_carries_more_than_its_size(count: int):
    made = pools(count)
    for _ in range(2):  # given back, they can be had again
        async with AsyncExitStack() as stack:
            held = Counter([id(await stack.enter_async_context(made.slot())) for _ in range(count)])
            assert sum(held.values()) == count
            assert max(held.values()) <= POOL_SIZE
            with pytest.raises(TimeoutError):  # all are out
                async with asyncio.timeout(0.01), made.slot():
                    pass
    await made.aclose()


async def test_few_requests_share_few_connections():
    made = pools(8 * POOL_SIZE)
    clients = set()
    for _ in range(3 * POOL_SIZE):
        async with made.slot() as client:
            clients.add(id(client))
    assert len(clients) == 1
    await made.aclose()


async def test_a_slot_comes_back_after_an_error():
    made = pools(1)
    with pytest.raises(RuntimeError):
        async with made.slot():
            raise RuntimeError
    async with asyncio.timeout(1), made.slot():
        pass
    await made.aclose()


def test_a_client_without_slots_is_refused():
    with pytest.raises(ValueError, match="max_concurrency: must be at least 1, not 0"):
        RolloutClient("http://127.0.0.1:1", max_concurrency=0)

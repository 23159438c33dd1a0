"""How verl's streams of weights are read, and in which types they are sent."""

import asyncio
import threading

import pytest
import torch

from rollout_client.verl.weights import Pairs, casting, read_types
from tests.support.engine_kit import checkpoint, tensors_of


def named(count: int):
    return [(f"t{i}", torch.full((2,), float(i), requires_grad=True)) for i in range(count)]


def read(pairs: Pairs, count: int | None = None) -> list[str]:
    return [name for _, (name, _) in zip(range(count or 99), pairs, strict=False)]


async def test_a_generator_is_read_on_another_thread_without_gradients():
    seen: list[tuple[int, bool]] = []

    def gather():
        for name, tensor in named(3):
            seen.append((threading.get_ident(), torch.is_grad_enabled()))
            yield name, tensor * 2

    pairs = Pairs(gather(), timeout_s=5)
    found = await asyncio.to_thread(lambda: list(pairs))
    assert [name for name, _ in found] == ["t0", "t1", "t2"]
    assert not any(tensor.requires_grad for _, tensor in found)
    (thread,) = {thread for thread, _ in seen}
    assert thread != threading.get_ident()
    assert {grad for _, grad in seen} == {False}
    assert torch.is_grad_enabled()


async def test_what_an_engine_receives_is_awaited_in_the_loop():
    threads: set[int] = set()

    async def receive():
        for pair in named(3):
            await asyncio.sleep(0.001)
            threads.add(threading.get_ident())
            yield pair

    pairs = Pairs(receive(), timeout_s=5)
    assert await asyncio.to_thread(read, pairs) == ["t0", "t1", "t2"]
    assert threads == {threading.get_ident()}
    assert await asyncio.to_thread(read, pairs) == []


async def test_in_the_loop_itself_it_would_wait_for_itself():
    async def receive():
        yield named(1)[0]

    pairs = Pairs(receive(), timeout_s=5)
    with pytest.raises(RuntimeError, match="on another thread"):
        next(pairs)


async def test_an_engine_that_brings_nothing_is_not_waited_for_without_end():
    async def receive():
        await asyncio.sleep(60)
        yield named(1)[0]

    pairs = Pairs(receive(), timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"no tensor in 0\.05 s"):
        await asyncio.to_thread(next, pairs)
    await pairs.drain()  # it is not asked again


@pytest.mark.parametrize("is_async", [False, True])
async def test_draining_reads_to_the_end(is_async):
    left: list[str] = []

    def gather():
        for name, tensor in named(4):
            left.append(name)
            yield name, tensor

    async def receive():
        for pair in gather():
            yield pair

    pairs = Pairs(receive() if is_async else gather(), timeout_s=5)
    assert await asyncio.to_thread(read, pairs, 1) == ["t0"]
    await pairs.drain()
    assert left == ["t0", "t1", "t2", "t3"]
    await pairs.drain()


async def test_a_generator_that_fails_is_not_asked_again():
    def gather():
        yield named(1)[0]
        raise OSError("gather failed")

    pairs = Pairs(gather(), timeout_s=5)
    with pytest.raises(OSError, match="gather failed"):
        await asyncio.to_thread(list, pairs)
    await pairs.drain()


def test_types_are_those_of_the_checkpoint():
    path = checkpoint("dense", 1)
    types = read_types(path)
    assert types == {n: str(t.dtype).removeprefix("torch.") for n, t in tensors_of(path).items()}
    assert read_types(None) == {}


def test_tensors_are_sent_in_the_types_that_the_engine_expects():
    types = {"w": "bfloat16", "router": "float32", "q": "float8_e4m3fn", "ids": "int64"}
    cast = casting(types, default="float16")
    f32, bf16 = torch.float32, torch.bfloat16
    assert cast("w", f32) == bf16
    assert cast("router", bf16) == f32
    assert cast("new", f32) == torch.float16
    # not ours to make: the pod says what it expects
    assert cast("q", bf16) == bf16
    assert cast("ids", f32) == f32
    assert cast("w", torch.int64) == torch.int64
    assert casting({}, default="auto")("w", f32) == f32

"""A blocking call whose caller is cancelled, once, twice, or by the end of its loop."""

import asyncio
import threading

import pytest

from rollout_pod.weights.on_thread import on_thread


class Call:
    """Blocks until it is told to give up so many times."""

    def __init__(self, times: int = 1) -> None:
        self.begun, self.told, self.ended = threading.Event(), threading.Semaphore(0), False
        self.times = times

    def __call__(self) -> str:
        self.begun.set()
        for _ in range(self.times):
            assert self.told.acquire(timeout=20)
        self.ended = True
        return "done"

    def give_up(self) -> None:
        self.told.release()


async def test_what_it_returns_and_raises() -> None:
    assert await on_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await on_thread(lambda: 1 // 0)


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_however_often_it_is_cancelled_the_call_has_ended(times: int) -> None:
    call = Call(times)
    task = asyncio.create_task(on_thread(call, call.give_up))
    await asyncio.to_thread(call.begun.wait, 10)
    for _ in range(times):
        assert not task.done()
        task.cancel()
        await asyncio.sleep(0.02)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.ended


def test_a_loop_that_ends_waits_for_it() -> None:
    call, order = Call(), list[str]()

    async def send() -> None:
        try:
            await on_thread(call, call.give_up)
        finally:
            order.append(f"closed, ended: {call.ended}")

    async def main() -> None:
        order.append("begun")
        main.task = asyncio.create_task(send())  # type: ignore[attr-defined]  # kept from the collector
        await asyncio.to_thread(call.begun.wait, 10)

    asyncio.run(main())
    assert order == ["begun", "closed, ended: True"]

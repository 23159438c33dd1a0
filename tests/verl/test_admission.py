"""verl's gate: who waits, who is sent back, who returns what it has."""

import asyncio

from rollout_client.rollout import Rollout
from rollout_client.verl.admission import Admission

PARTIAL = Rollout(request_id="r")


async def test_calls_pass_an_open_gate_and_are_counted():
    gate = Admission()
    call = gate.call()
    assert await call.admitted()
    with call:
        assert gate.close(rejecting=False) == 1
    gate.open()
    assert gate.close(rejecting=False) == 0


async def test_later_calls_wait_for_the_opening():
    gate = Admission()
    gate.close(rejecting=False)
    waiting = [asyncio.create_task(gate.call().admitted()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    gate.close(rejecting=False)
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    gate.open()
    assert await asyncio.gather(*waiting) == [True] * 3


async def test_rejecting_sends_back_those_that_wait_and_those_that_come():
    gate = Admission()
    gate.close(rejecting=False)
    waiting = asyncio.create_task(gate.call().admitted())
    await asyncio.sleep(0)
    gate.close(rejecting=True)
    assert not await waiting
    assert not await gate.call().admitted()
    gate.close(rejecting=False)  # a plain abort lets them wait again
    again = asyncio.create_task(gate.call().admitted())
    await asyncio.sleep(0)
    assert not again.done()
    gate.open()
    assert await again


def test_who_must_return():
    gate = Admission()
    fresh, cut = gate.call(), gate.call()
    cut.was_cut(PARTIAL)
    # a pause that somebody else asked for: both go on
    assert not fresh.must_return()
    assert not cut.must_return()
    gate.close(rejecting=False)
    assert not fresh.must_return()  # the pod has not begun it: it waits, as a new one would
    assert cut.must_return()
    gate.close(rejecting=True)
    assert fresh.must_return()
    assert cut.must_return()
    gate.open()
    assert not fresh.must_return()
    assert not cut.must_return()

"""Callers that go while the engine dies."""

import asyncio
import gc
from typing import Any

import pytest

from rollout_pod.engine.base import EngineDeadError, EngineRequest
from rollout_pod.gate import Gate
from rollout_pod.protocol import BASE_VERSION, OnPause, WeightsRef
from tests.support.fakes import FakeEngine


@pytest.mark.parametrize("abort_raises", [False, True])
@pytest.mark.parametrize("how", ["cancelled", "gone"])
async def test_a_caller_that_went_leaves_no_error_that_nobody_saw(
    how: str, abort_raises: bool
) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    engine = DyingEngine(abort_raises=abort_raises)
    gate = Gate(engine)
    gate.open(WeightsRef(version=BASE_VERSION), 1)
    left = asyncio.Event()

    async def gone() -> None:
        await left.wait()

    caller = asyncio.create_task(
        gate.generate(
            "r1", lambda name: EngineRequest(name, [1], 100), on_pause=OnPause.RETURN,
            timeout_s=5, gone=gone,
        )
    )  # fmt: skip
    while not engine.running:
        await asyncio.sleep(0)
    if how == "cancelled":
        caller.cancel()
    else:
        left.set()
    with pytest.raises((EngineDeadError, asyncio.CancelledError)):
        await caller
    assert gate.unfinished == 0
    await asyncio.sleep(0.01)
    del caller
    gc.collect()
    assert complaints == []


class DyingEngine(FakeEngine):
    """Dies of an abort."""

    def __init__(self, *, abort_raises: bool) -> None:
        super().__init__()
        self.abort_raises = abort_raises

    async def abort(self, engine_id: str) -> None:
        self.kill("died in an abort")
        if self.abort_raises:
            raise EngineDeadError("died in an abort")

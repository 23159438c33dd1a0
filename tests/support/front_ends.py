"""Front ends in the process of the test, on channels that are queues of the loop."""

import asyncio
from collections.abc import Mapping

from rollout_pod.engine.base import Engine
from rollout_pod.front_ends.channel import Channel, Handler
from rollout_pod.front_ends.front_end import FrontEnd
from rollout_pod.front_ends.shared_gate import Member, SharedGate
from rollout_pod.generation import Generation


def channel_pair(
    notes: Mapping[str, Handler], calls: Mapping[str, Handler],
    other_notes: Mapping[str, Handler], other_calls: Mapping[str, Handler],
) -> tuple[Channel, Channel]:  # fmt: skip
    """Two ends. A frame takes a turn of the loop."""
    loop = asyncio.get_running_loop()
    one = Channel(lambda frame: loop.call_soon(other.receive, frame), notes, calls)
    other = Channel(lambda frame: loop.call_soon(one.receive, frame), other_notes, other_calls)
    return one, other


class Attached:
    """A front end that was put behind a gate, with what has to end with it."""

    def __init__(
        self, gate: SharedGate, engine: Engine, index: int, *, is_attached: bool = True
    ) -> None:
        self.front_end = FrontEnd(index, engine)
        self.main, self.front_end.channel = channel_pair(
            {**gate.notes_of(index), "failed": lambda _: None},
            gate.calls_of(index),
            self.front_end.notes(),
            self.front_end.calls(),
        )
        self.generation = self.front_end.generation = Generation(
            engine, self.front_end.gate, max_model_len=lambda: 100_000,
            elsewhere=self.front_end.elsewhere,
        )  # fmt: skip
        if is_attached:
            self.front_end.take_requests()
        gate.join(Member(index, self.main))
        self._counting = asyncio.create_task(self.front_end.count(), name=f"counts {index}")

    def die(self) -> None:
        """The process is gone: both ends see it."""
        self.main.close()
        self.front_end.channel.close()

    async def end(self) -> None:
        """End all that it began."""
        self.die()
        self._counting.cancel()
        await asyncio.gather(self._counting, return_exceptions=True)
        await self.main.join()
        await self.front_end.channel.join()


def front_ends_of(gate: SharedGate, engine: Engine, count: int) -> list[Attached]:
    """Put ``count`` front ends behind ``gate``."""
    return [Attached(gate, engine, index) for index in range(1, count + 1)]

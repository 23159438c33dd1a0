"""A handle of an update that is on its way."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from rollout_client.trainer.results import ReplicaResult


class Update:
    """What ``ServerAdapter.begin_update`` returns. Its work is a task of this loop."""

    def __init__(self, version: str, work: Coroutine[Any, Any, dict[str, ReplicaResult]]) -> None:
        self.version = version
        self._task = asyncio.create_task(work, name=f"update to {version}")
        # an error that nobody waits for is told by the next call of the adapter, not at exit
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._task.done()

    async def wait(self) -> dict[str, ReplicaResult]:
        """Its end. May be called several times; cancelling a wait does not end the update.

        Raises:
            AdapterError: see ``ServerAdapter.update_weights``.
            asyncio.CancelledError: it was given up.
        """
        return await asyncio.shield(self._task)

    async def give_up(self) -> None:
        """End it; returns when the tensors are not read any more. Idempotent.

        A pod that has not begun to load serves on; one that has waits for a complete update. The
        replicas go on asking for the version.
        """
        self._task.cancel()
        await asyncio.wait({self._task})

"""Two ranks and their agent, updated again and again."""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from rollout_pod.weights.agent_client import AgentClient, TransferError
from rollout_pod.weights.report import LoadReport
from tests.support.weights import (
    ModelLoader,
    Place,
    expected_of,
    mixed_tensors,
    same,
    write_checkpoint,
)

BUCKET_BYTES = 8192


class Site:
    """Two ranks and an agent, whose last update may have failed."""

    def __init__(self, place: Place, client: AgentClient) -> None:
        self.place = place
        self.client = client
        self.tensors = [mixed_tensors(seed) for seed in range(2)]
        self.paths = [
            write_checkpoint(place.root / f"v{i}", tensors, shards=2)
            for i, tensors in enumerate(self.tensors)
        ]
        self.agent = place.start_agent()
        self._sessions = (f"s{number}" for number in itertools.count())
        place.start_receivers(*(expected_of(self.tensors[0]) for _ in range(2)))

    async def stage(self, version: int, path: Path | None = None) -> str:
        session = next(self._sessions)
        await self.client.stage(
            session=session, version=f"v{version}", path=path or self.paths[version],
            rank_sockets=self.place.rank_sockets, bucket_bytes=BUCKET_BYTES, timeout_s=30,
        )  # fmt: skip
        return session

    def load(
        self, session: str, version: int, *loaders: ModelLoader, timeout_s: float = 30
    ) -> "list[asyncio.Future[LoadReport]]":
        return [
            asyncio.ensure_future(
                asyncio.to_thread(
                    receiver.load, session, loader, version=f"v{version}", flush=True,
                    timeout_s=timeout_s,
                )
            )
            for receiver, loader in zip(self.place.receivers, loaders, strict=True)
        ]  # fmt: skip

    async def commit(self, version: int) -> None:
        """A whole update, after whatever happened."""
        session = await self.stage(version)
        loaders = ModelLoader(), ModelLoader()
        loads = self.load(session, version, *loaders)
        sent = await self.client.send(session=session, timeout_s=30)
        assert all([(await load).ok for load in loads]), sent.reports
        await self.client.committed(session=session)
        assert all(same(loader.model, self.tensors[version]) for loader in loaders)

    async def failing(
        self, version: int, *loaders: ModelLoader, during: Callable[[str], Awaitable[None]]
    ) -> None:
        """One that fails, by its loaders or by ``during``: the sender and a rank at least say so."""
        session = await self.stage(version)
        loads = self.load(session, version, *loaders)
        send = asyncio.ensure_future(self.client.send(session=session, timeout_s=30))
        await during(session)
        with pytest.raises(TransferError):
            await send
        assert not all([(await load).ok for load in loads])

    def usage(self) -> list[int]:
        """Descriptors and threads, here and of the agent."""
        processes = psutil.Process(os.getpid()), psutil.Process(self.agent.pid)
        return [count for p in processes for count in (p.num_fds(), p.num_threads())]

    def memory(self) -> list[int]:
        processes = psutil.Process(os.getpid()), psutil.Process(self.agent.pid)
        return [process.memory_info().rss for process in processes]

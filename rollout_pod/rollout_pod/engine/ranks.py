"""Calls to the workers of an engine that runs: all ranks, of all data-parallel engines."""

import socket
import time
from typing import Any

from rollout_pod.engine.base import (
    EngineError,
    EngineHungError,
    EngineInternalError,
    RankReport,
)
from rollout_pod.engine.lifeline import Lifeline

_CALL_S = 60.0
_SPARE_S = 10.0
"""More for vLLM's own deadline than for ours, which tells of a hang: its own, of a failed call."""


class Ranks:
    """Of one engine.

    Args:
        llm: vLLM's ``AsyncLLM``.
        lifeline: That watches it.
    """

    def __init__(self, llm: Any, lifeline: Lifeline) -> None:
        parallel = llm.vllm_config.parallel_config
        self._core = llm.engine_core
        self._llm = llm
        self._lifeline = lifeline
        self.world = int(parallel.world_size * parallel.data_parallel_size)
        self.is_data_parallel = self.world > parallel.world_size

    async def call(
        self, method: str, args: tuple[Any, ...], timeout_s: float, *, what: str = ""
    ) -> list[Any]:
        """Call a method of every rank's worker; the answers, engine by engine, each by rank.

        Raises:
            EngineHungError: not all of them answered in time.
        """
        what = what or f"run {method}"
        within = timeout_s + _SPARE_S
        if not self.is_data_parallel:
            call = self._llm.collective_rpc(method, timeout=within, args=args)
            return list(await self._lifeline.call(call, what, timeout_s))
        each = self._core.call_utility_all_async("collective_rpc", method, within, args, None)
        return [a for answers in await self._lifeline.call(each, what, timeout_s) for a in answers]

    async def reports(
        self, method: str, args: tuple[Any, ...], version: str, timeout_s: float
    ) -> tuple[RankReport, ...]:
        """The same, of a method that loads: by global rank. See ``Engine.load_weights``."""
        started = time.monotonic()
        try:
            answers = await self.call(method, args, timeout_s + 1)
        except EngineHungError:
            raise
        except EngineError as error:
            seconds = time.monotonic() - started
            host = socket.gethostname()
            return tuple(
                RankReport(rank, host, False, version, seconds=seconds, error=str(error))
                for rank in range(self.world)
            )
        reports = (RankReport(**answer) for answer in answers)
        return tuple(sorted(reports, key=lambda report: report.rank))

    async def check(self, timeout_s: float) -> None:
        """See ``Engine.ping``."""
        try:
            faults = await self.call("rollout_fault", (), timeout_s, what="answer")
        except EngineHungError as error:
            raise EngineHungError(f"{error}: its loop hangs") from error
        known = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]
        if known:
            raise EngineInternalError(f"a device has faulted: {'; '.join(known)}")

    async def free_memory(self) -> int | None:
        """Of all ranks' devices together, in bytes; None on CPU."""
        answers = await self.call("rollout_free_memory", (), _CALL_S)
        return None if None in answers else sum(answers)

    async def clear_prefix_caches(self) -> bool:
        """Whether every engine says that it did."""
        if self.is_data_parallel:
            call = self._core.call_utility_all_async("reset_prefix_cache", False, False)
            cleared = await self._lifeline.call(call, "clear its prefix caches", _CALL_S)
        else:
            call = self._llm.reset_prefix_cache()
            cleared = [await self._lifeline.call(call, "clear its prefix cache", _CALL_S)]
        return all(answer is True for answer in cleared)

"""The front ends, as the process that steers has them: started, told, counted, ended."""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from rollout_pod.front_ends.channel import CallFailed, ChannelClosed, Link
from rollout_pod.front_ends.front_end import Facts
from rollout_pod.front_ends.merge import merge_metrics
from rollout_pod.front_ends.settings import FrontEndSettings
from rollout_pod.front_ends.shared_gate import Member, SharedGate
from rollout_pod.supervisor.supervisor import PodFailed, Supervisor

log = structlog.get_logger(__name__)

_LOOK_S: Final = 1.0
"""How often it is looked at what makes no news: whether the engine lives."""
_END_S: Final = 10.0
_METRICS_S: Final = 5.0


class Fleet:
    """Owns the processes; one that ends before its time ends the pod.

    Args:
        supervisor: the pod's, whose gate is ``gate``.
        gate: what all of them stand behind.
        settings: of each.
    """

    def __init__(
        self, supervisor: Supervisor, gate: SharedGate, settings: Sequence[FrontEndSettings]
    ) -> None:
        self._supervisor = supervisor
        self._gate = gate
        self._settings = settings
        self._facts: Facts | None = None
        self._members: list[Member] = []
        self._failures: dict[int, str] = {}

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            PodFailed: a front end ended.
        """
        tasks = [
            asyncio.create_task(self._keep(each), name=f"front end {each.share.index}")
            for each in self._settings
        ]
        tasks.append(asyncio.create_task(self._follow(), name="front end facts"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, settings: FrontEndSettings) -> None:
        """One front end, from its start to its end."""
        share = settings.share
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollout_pod", "front-end", f"--channel={theirs.fileno()}"),
                f"--parent={os.getpid()}",
                f"--settings={msgspec.json.encode(settings).decode()}",
                pass_fds=(theirs.fileno(),),
            )
        finally:
            theirs.close()
        link = await Link.open(
            ours,
            {**self._gate.notes_of(share.index), "failed": partial(self._failed, share.index)},
            {**self._gate.calls_of(share.index), "metrics": self._metrics},
        )
        member = Member(share.index, link.channel)
        self._members.append(member)
        reading = asyncio.create_task(link.run(), name=f"front end {share.index} channel")
        ended = asyncio.create_task(process.wait(), name=f"front end {share.index} process")
        watch = asyncio.create_task(self._watch(member), name=f"front end {share.index} watch")
        try:
            if self._facts is not None:
                link.channel.tell("facts", msgspec.to_builtins(self._facts))
            self._gate.join(member)
            await asyncio.wait({ended, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                watch.result()
            await reading  # its last words
        finally:
            if process.returncode is None:
                await self._end(member, process)
            for task in (reading, ended, watch):
                task.cancel()
            await asyncio.gather(reading, ended, watch, return_exceptions=True)
        why = self._failures.get(share.index, f"exit code {process.returncode}")
        raise PodFailed(f"front end {share.index} ended: {why}")

    async def _watch(self, member: Member) -> None:
        """Until cancelled, or its loop hangs: connections that the kernel gives it would hang, too.

        Raises:
            PodFailed: it hangs.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._supervisor.is_started:
                continue
            timeout_s = self._supervisor.heartbeat_timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    await member.channel.call("settle")
            except TimeoutError:
                raise PodFailed(
                    f"front end {member.index}: no answer for {timeout_s:g} s, its loop hangs"
                ) from None
            except (ChannelClosed, CallFailed):
                await asyncio.sleep(_END_S)  # it is ending; its end says why

    async def _end(self, member: Member, process: asyncio.subprocess.Process) -> None:
        member.channel.tell("end")
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            log.warning("front end killed: it did not end", front_end=member.index)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _follow(self) -> None:
        """Tell the front ends of every change of the pod."""
        board = self._supervisor.board
        after: str | None = None
        while True:
            document = await board.wait_news(after=after, timeout_s=_LOOK_S)
            after = f"{document.boot_id}:{document.revision}"
            facts = Facts(
                phase=document.phase,
                is_started=self._supervisor.is_started,
                is_ready=self._supervisor.is_ready,
                liveness_error=self._supervisor.liveness_error(),
                max_model_len=self._supervisor.max_model_len,
                boot_id=document.boot_id,
                weight_version=document.weight_version,
                weight_step=document.weight_step,
            )
            if facts != self._facts:
                self._facts = facts
                for member in self._members:
                    member.channel.tell("facts", msgspec.to_builtins(facts))
            if board.is_closed:  # it answers at once, and this loop would keep all others waiting
                await asyncio.sleep(_LOOK_S)

    def _failed(self, index: int, message: str) -> None:
        self._failures[index] = message

    async def _metrics(self) -> bytes:
        texts = {"main": await self._supervisor.metrics_text()}
        for member in self._members:
            with suppress(ChannelClosed, CallFailed, TimeoutError):
                async with asyncio.timeout(_METRICS_S):
                    text: Any = await member.channel.call("metrics")
                texts[str(member.index)] = text
        return await asyncio.to_thread(merge_metrics, texts)

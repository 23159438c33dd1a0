"""A version is loaded: the agent's side, the ranks' side, and what they say of it."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from rollout_pod.engine.base import (
    Engine,
    EngineDeadError,
    EngineError,
    EngineHungError,
    RankReport,
)
from rollout_pod.protocol import UpdatePhase, WeightsRef
from rollout_pod.supervisor.board import Board
from rollout_pod.supervisor.faults import Faults
from rollout_pod.supervisor.ports import WeightsAgent
from rollout_pod.supervisor.staging import update_news
from rollout_pod.supervisor.state import Rank
from rollout_pod.weights.agent_client import TransferError

log = structlog.get_logger(__name__)

_REPORT_S = 10.0
"""How much longer than the transfer the ranks' reports may take."""


@dataclass
class Transfer:
    """From a staged version to one that every rank has loaded."""

    board: Board
    engine: Engine
    agent: WeightsAgent
    faults: Faults

    async def load(
        self, ref: WeightsRef, session: str, *, flush: bool, on_device: bool = False
    ) -> None:
        """Let every rank load the staged version; whatever goes wrong poisons, unless no rank
        had touched its model yet. A trainer that pushes it sends by itself, and of what waits
        ``on_device`` every rank has all.
        """
        desired = self.board.desired
        timeout_s = desired.update_timeout_s if desired else 600.0
        started = time.monotonic()
        before = self.board.state
        before_transport = before.update.transport if before.update else None
        # in memory only: a process that is killed from here on boots anew, from a checkpoint
        self.board.change(
            transferring=True,
            loaded=None,
            transferred=False,
            caches_clear=False,
            update=update_news(self.board, phase=UpdatePhase.TRANSFERRING),
        )
        load = asyncio.create_task(
            self.engine.switch_weights(ref.version, timeout_s=timeout_s)
            if on_device
            else self.engine.load_weights(
                session, version=ref.version, flush=flush, timeout_s=timeout_s
            ),
            name=f"load {session}",
        )
        problems: list[str] = []
        reports: tuple[RankReport, ...] = ()
        try:
            if not ref.is_pushed and not on_device:
                problems += await self._send(session, timeout_s, load)
            async with asyncio.timeout(timeout_s + _REPORT_S):
                reports = await load
        except EngineDeadError as error:
            self.faults.fail_engine(str(error))
            problems.append(str(error))  # the cause is to be the container's last words
        except (EngineHungError, TimeoutError) as error:
            # the engine's fault or the version's: the next engine tries it again, and as often as
            # it tries one that fails
            message = f"no report of the load of {ref.version}: {str(error) or 'time is over'}"
            await self.faults.fail_update(ref, message, restore=None)
            self.faults.fail_engine(message)
            return
        except EngineError as error:
            problems.append(f"the engine did not report: {error}")
        finally:
            load.cancel()  # a call that nobody waits for any more, unless it has ended
            await asyncio.gather(load, return_exceptions=True)
        problems += self._problems_of(reports, ref)
        seconds = time.monotonic() - started
        if not problems:
            self.board.change(
                transferring=False,
                poisoned=False,
                loaded=ref,
                transferred=True,
                ranks=tuple(Rank(r.rank, r.host, r.path, r.note) for r in reports),
                update=update_news(
                    self.board,
                    phase=UpdatePhase.COMMITTING,
                    transfer=seconds,
                    transport=_said(report.transport for report in reports) or before_transport,
                    mode="staged" if on_device else _said(report.mode for report in reports),
                    steps=dict(max(reports, key=lambda report: report.seconds).steps),
                ),
            )
            return
        untouched = bool(reports) and not any(report.touched for report in reports)
        await self.faults.fail_update(
            ref, "; ".join(problems), restore=before if untouched and not flush else None
        )

    async def _send(
        self, session: str, timeout_s: float, load: asyncio.Task[tuple[RankReport, ...]]
    ) -> list[str]:
        """What went wrong on the sender's side. It is not waited for where the engine died: a
        sender may wait for ranks of a machine that is gone until its deadline.
        """
        send = asyncio.create_task(
            self.agent.send(session=session, timeout_s=timeout_s), name=f"send {session}"
        )
        try:
            await asyncio.wait({send, load}, return_when=asyncio.FIRST_COMPLETED)
            if not send.done() and isinstance(load.exception(), EngineDeadError):
                return []
            await send
        except TransferError as error:
            return [str(error)]
        except Exception as error:
            log.exception("the agent's client failed unexpectedly", session=session)
            return [f"{type(error).__name__}: {error}"]
        finally:
            send.cancel()  # a call that nobody waits for any more, unless it has ended
            await asyncio.gather(send, return_exceptions=True)
        return []

    def _problems_of(self, reports: tuple[RankReport, ...], ref: WeightsRef) -> list[str]:
        """What keeps these reports from being a complete load of ``ref`` on every rank."""
        info = self.board.state.info
        world = info.world_size if info else 0
        problems = [f"rank {r.rank}: {r.error}" for r in reports if not r.ok]
        problems += [
            f"rank {r.rank} loaded {r.version}"
            for r in reports
            if r.ok and r.version != ref.version
        ]
        if sorted(r.rank for r in reports) != list(range(world)):
            problems.append(f"{len(reports)} of {world} ranks reported")
        given = {r.manifest: r.rank for r in reversed(reports) if r.ok and r.manifest}
        if len(given) > 1:
            ranks = " and ".join(str(rank) for rank in sorted(given.values()))
            problems.append(
                f"ranks {ranks} were given different tensors, or the same in another order: all "
                "senders of a session send the same ones in one order"
            )
        return problems


def _said(words: Iterable[str]) -> str | None:
    """What the ranks say; each of several, where they differ. None where none says anything."""
    return ", ".join(sorted({word for word in words if word})) or None

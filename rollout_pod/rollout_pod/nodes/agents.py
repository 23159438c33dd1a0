"""The weights agents of all nodes as one: a version is staged, or sent, when all have done so."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import structlog
from pydantic import BaseModel, ValidationError

from rollout_pod.nodes.asking import Tokens, post
from rollout_pod.nodes.muster import Member
from rollout_pod.protocol import (
    NodeDone,
    NodeSend,
    NodeSent,
    NodeSession,
    NodeStage,
    NodeStaged,
    Problem,
)
from rollout_pod.supervisor.ports import Sent, Staged, WeightsAgent
from rollout_pod.weights.agent_client import GRACE_S, SHORT_S, StageError, TransferError

log = structlog.get_logger(__name__)

_CONNECT_S: Final = 5.0
_HTTP_S: Final = 5.0
"""More than the node's own deadline, whose words say more."""

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=BaseModel)


class NodeAgents:
    """A ``WeightsAgent``: the head's own, and over HTTP those of the other nodes.

    Args:
        own: The head's.
        group: Sent along, so that no node of another incarnation obeys.
        members: The nodes that there are.
        tokens: What their admin ports ask for.
        transport: Of httpx, for tests.
    """

    def __init__(
        self,
        own: WeightsAgent,
        *,
        group: str,
        members: Callable[[], Sequence[Member]],
        tokens: Tokens,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._own = own
        self._group = group
        self._members = members
        self._tokens = tokens
        self._http = httpx.AsyncClient(transport=transport, trust_env=False)

    async def stage(
        self,
        *,
        session: str,
        version: str,
        path: str,
        rank_sockets: Sequence[Path],
        bucket_bytes: int,
        timeout_s: float,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Staged:
        """See ``WeightsAgent``. The progress is that of the head's own.

        Raises:
            StageError: a node's, or what they hold is not the same. The others are told.
        """
        asked = NodeStage(
            group=self._group, session=session, version=version, path=path,
            ranks=len(rank_sockets), bucket_bytes=bucket_bytes, timeout_s=timeout_s,
        )  # fmt: skip
        own = self._own.stage(
            session=session, version=version, path=path, rank_sockets=rank_sockets,
            bucket_bytes=bucket_bytes, timeout_s=timeout_s, on_progress=on_progress,
        )  # fmt: skip
        members = self._members()
        others = [self._ask(each, "stage", asked, NodeStaged, timeout_s) for each in members]
        try:
            head, *nodes = await _all_or_none([own, *others])
            for member, staged in zip(members, nodes, strict=True):
                if differs := _difference(head, staged):
                    raise StageError(
                        f"{path} is not the same on all nodes: node {member.rank} has {differs}; "
                        "each node reads its own volume: copy it there again, under another name",
                        kind="source",
                        retryable=True,
                    )
        except StageError:
            await self._release(session)
            raise
        return max([head, *nodes], key=lambda staged: staged.seconds)

    async def send(self, *, session: str, timeout_s: float) -> Sent:
        """See ``WeightsAgent``. Waits for all, also where one fails.

        Raises:
            TransferError: with what each node said that failed.
        """
        asked = NodeSend(group=self._group, session=session, timeout_s=timeout_s)
        results = await asyncio.gather(
            self._own.send(session=session, timeout_s=timeout_s),
            *(self._ask(m, "send", asked, NodeSent, timeout_s) for m in self._members()),
            return_exceptions=True,
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        unforeseen = next(
            (e for e in failed if not isinstance(e, StageError | TransferError)), None
        )
        if unforeseen is not None:
            raise unforeseen
        if failed:
            raise TransferError("; ".join(map(str, failed)), kind="transfer")
        sent = [result for result in results if not isinstance(result, BaseException)]
        return max(sent, key=lambda each: each.seconds)

    async def committed(self, *, session: str) -> None:
        """See ``WeightsAgent``."""
        await self._tell("committed", session, self._own.committed(session=session))

    async def discard(self, *, session: str) -> None:
        """See ``WeightsAgent``."""
        await self._tell("discard", session, self._own.discard(session=session))

    async def close(self) -> None:
        """See ``WeightsAgent``."""
        await self._own.close()
        await self._http.aclose()

    async def _release(self, session: str) -> None:
        try:
            await self.discard(session=session)
        except StageError as error:
            log.info("a node was not told", session=session, error=str(error))

    async def _tell(self, what: str, session: str, own: Awaitable[None]) -> None:
        asked = NodeSession(group=self._group, session=session)
        results = await asyncio.gather(
            own,
            *(self._ask(member, what, asked, NodeDone, SHORT_S) for member in self._members()),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _ask(
        self, member: Member, what: str, asked: BaseModel, kind: type[ReplyT], timeout_s: float
    ) -> ReplyT:
        who = f"node {member.rank}"
        timeout = httpx.Timeout(timeout_s + GRACE_S + _HTTP_S, connect=_CONNECT_S)
        try:
            url = f"{member.url}/admin/v1/agent/{what}"
            answer = await post(self._http, url, asked, self._tokens, timeout=timeout)
        except httpx.HTTPError as error:
            text = f"{who} at {member.url} does not answer: {error or type(error).__name__}"
            raise StageError(text, kind="agent", retryable=True) from error
        try:
            if answer.status_code == httpx.codes.OK:
                return kind.model_validate_json(answer.content)
            detail = Problem.model_validate_json(answer.content).detail
        except ValidationError:
            detail = f"answered {answer.status_code} with no document of ours"
        raise StageError(f"{who}: {detail}", kind="agent", retryable=True)


def _difference(head: Staged, node: Staged | NodeStaged) -> str:
    """What of the node's version is not as the head's, in words; empty if nothing is."""
    if (node.bytes, node.tensors) != (head.bytes, head.tensors):
        return (
            f"{node.tensors} tensors of {node.bytes} bytes, the head {head.tensors} of {head.bytes}"
        )
    if node.sample != head.sample:
        return "tensors of the same size, but with other names or other bytes than the head"
    if node.sums and head.sums and node.sums != head.sums:
        return "files with other SHA-256 than the head"
    return ""


async def _all_or_none(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((t for t in tasks if t.done() and t.exception() is not None), None)
        return [failed.result()] if failed else [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

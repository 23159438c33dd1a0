"""Scripted replicas behind an httpx transport: the tokens of the fake engine, and every fault.

Nothing here waits. A replica's tokens depend on its version and on all that came before, so a
token that was lost, doubled or sampled after another history shows.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from rollout_client import Rollout
from rollout_pod.protocol import Problem
from tests.support.fakes import fake_token

Json = dict[str, Any]
HOST = "http://pod-{}"


@dataclass(frozen=True)
class Act:
    """What a replica does with its next request: ``tokens`` (all that are asked for: None) come,
    then ``how`` it goes on.

    ``end`` (the rollout ends, or goes on to ``tokens`` and is cut for ``reason``), ``lost``
    (connection reset), ``broken`` (reset within an event), ``silent`` (no byte any more), ``eof``
    (closed without an end), ``no_end`` (as ``lost``, right after the last token), ``error`` (the
    event), ``refused`` (no connection), ``status`` (an HTTP error).
    """

    how: str = "end"
    tokens: int | None = None
    reason: str = "paused"
    status: int = 503
    code: str = "draining"
    headers: tuple[tuple[str, str], ...] = ()
    size: int = 3
    """Tokens in an event."""
    tells: bool = True
    """The last tokens say that they are the last."""
    becomes: str | None = None
    """The version that the replica holds afterwards."""


@dataclass
class FakeReplica:
    """One replica; its script is used up, then it serves."""

    version: str = "base"
    step: int | None = None
    script: list[Act] = field(default_factory=list)
    ready: bool = True
    asked: list[Json] = field(default_factory=list)


class Broken(httpx.AsyncByteStream):
    def __init__(self, chunks: Sequence[bytes], error: Exception | None) -> None:
        self._chunks, self._error = chunks, error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        if self._error is not None:
            raise self._error


class FakeFleet(httpx.AsyncBaseTransport):
    """Replicas by host name: ``http://pod-0`` and so on.

    Args:
        replicas: In order.
        eos_below: Tokens below it end a rollout.
        hook: Awaited with the index of the replica before each answer.
    """

    def __init__(
        self, *replicas: FakeReplica, eos_below: int = 0, hook: Callable[[int], Any] | None = None
    ) -> None:
        self.replicas = replicas
        self.eos_below = eos_below
        self.hook = hook
        self.hosts: list[int] = []

    @property
    def urls(self) -> list[str]:
        return [HOST.format(i) for i in range(len(self.replicas))]

    @property
    def asked(self) -> list[Json]:
        return [body for replica in self.replicas for body in replica.asked]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        index = int(request.url.host.removeprefix("pod-"))
        replica = self.replicas[index]
        if request.url.path == "/readyz":
            facts = {"status": "ok", "weight_version": replica.version, "weight_step": replica.step}
            return httpx.Response(200 if replica.ready else 503, json=facts)
        self.hosts.append(index)
        body = json.loads(await request.aread())
        replica.asked.append(body)
        if self.hook:
            await self.hook(index)
        act = replica.script.pop(0) if replica.script else Act()
        answer = self._answer(replica, body, act)
        if act.becomes:
            replica.version = act.becomes
        return answer

    def _answer(self, replica: FakeReplica, body: Json, act: Act) -> httpx.Response:
        if act.how == "refused":
            raise httpx.ConnectError("refused")
        if act.how == "status":
            problem = Problem(title="no", status=act.status, code=act.code, detail="a detail")
            return httpx.Response(
                act.status, content=problem.model_dump_json(), headers=dict(act.headers)
            )
        history = [*body["prompt_token_ids"], *body["generated_token_ids"]]
        left = body["sampling_params"]["max_tokens"] - len(body["generated_token_ids"])
        wanted = left if act.tokens is None else min(act.tokens, left)
        tokens: list[int] = []
        stopped = False
        while len(tokens) < wanted and not stopped:
            tokens.append(fake_token(replica.version, [*history, *tokens]))
            stopped = tokens[-1] < self.eos_below
        whole = stopped or len(tokens) == left
        finish = ("stop" if stopped else "length") if whole else None
        chunks = [b": a comment\r\n\r\n"]
        for at in range(0, len(tokens), act.size):
            piece = tokens[at : at + act.size]
            last = at + act.size >= len(tokens)
            delta: Json = {
                "token_ids": piece, "log_probs": [-t / 100 for t in piece],
                "version": replica.version, "step": replica.step,
            }  # fmt: skip
            if last and finish and act.tells:
                delta["finish_reason"] = finish
            # as pods do: what is null is left out
            given = {name: value for name, value in delta.items() if value is not None}
            chunks.append(_event("delta", given))
        return httpx.Response(
            200,
            headers={"content-type": "text/event-stream; charset=utf-8"},
            stream=self._ending(replica, body, act, chunks, len(tokens), finish),
        )

    def _ending(
        self, replica: FakeReplica, body: Json, act: Act, chunks: list[bytes], count: int,
        finish: str | None,
    ) -> httpx.AsyncByteStream:  # fmt: skip
        error: Exception | None = None
        if act.how == "end":
            chunks.append(_event("end", end(body, count, finish, act.reason, replica)))
        elif act.how == "error":
            problem = Problem(title="no", status=500, code="engine_error", detail="a detail")
            chunks.append(_event("error", json.loads(problem.model_dump_json())))
        elif act.how == "silent":
            error = httpx.ReadTimeout("silent")
        elif act.how in ("lost", "broken", "no_end"):
            error = httpx.ReadError("reset")
            if act.how == "broken" and len(chunks) > 1:
                chunks[-1] = chunks[-1][: len(chunks[-1]) // 2]
        else:
            assert act.how == "eof", act
        return Broken(chunks, error)


def check_rollout(
    prompt: Sequence[int], rollout: Rollout, budget: int, *, eos_below: int = 0
) -> None:
    """Token for token the greedy run of each span's version: nothing is lost or doubled, the
    budget is exact, and the spans cover all and join what is equal.
    """
    history, covered = list(prompt), 0
    for span in rollout.weight_versions:
        assert span.start == covered < span.end
        for token in rollout.token_ids[span.start : span.end]:
            assert token == fake_token(span.version, history)
            history.append(token)
        covered = span.end
    assert covered == len(rollout.token_ids) == len(rollout.log_probs)
    labels = [(span.version, span.step) for span in rollout.weight_versions]
    assert all(a != b for a, b in pairwise(labels))
    ended = [token < eos_below for token in rollout.token_ids]
    assert not any(ended[:-1]), "went on after its end"
    assert rollout.finish_reason == ("stop" if ended[-1] else "length")
    assert len(rollout.token_ids) == budget or ended[-1]


def end(body: Json, count: int, finish: str | None, reason: str, replica: FakeReplica) -> Json:
    span = {"version": replica.version, "step": replica.step, "start": 0, "end": count}
    return {
        "request_id": body["request_id"], "num_tokens": count, "is_cancel": finish is None,
        "finish_reason": finish or "abort", "stop_reason": None,
        "cancel_reason": None if finish else reason, "weight_versions": [span] if count else [],
        "attempt": body["attempt"], "generation": 1, "num_cached_tokens": 0,
    }  # fmt: skip


def _event(name: str, data: Json) -> bytes:
    return f"event: {name}\r\ndata: {json.dumps(data)}\r\n\r\n".encode()

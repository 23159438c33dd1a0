"""The operations of ``attack`` done to a served pod, over HTTP, as far as they can be had there."""

import asyncio
import itertools
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.soak_load import Load
from rollout_pod.protocol import LOCAL_OWNER
from tests.support.attack import (
    AgentFault,
    CancelOne,
    Disconnect,
    DuplicateDocument,
    DuplicateRequest,
    Let,
    Operation,
    OtherOwner,
    PutDocument,
    StaleDocument,
    StalePrecondition,
    StartOpenAI,
    StartRequest,
)
from tests.support.process import ServeProcess

LET_S = 0.3
SETTLE_S = 90.0

NOT_READY = "no weight version is committed yet"


class AttackedProcess:
    """``versions`` holds every version's checkpoint, and ``broken``, which has no weights."""

    def __init__(self, process: ServeProcess, versions: Path) -> None:
        self._process, self._versions = process, versions
        self.load = Load(f"http://{process.data}", versions)
        self._ids = itertools.count()
        self._callers: list[tuple[str, asyncio.Task[None]]] = []
        self.documents = self.faults = 0

    async def __aenter__(self) -> "AttackedProcess":
        token = (self._process.run_dir / "admin" / "token").read_text().strip()
        self._admin = aiohttp.ClientSession(
            f"http://{self._process.admin}", headers={"Authorization": f"Bearer {token}"}
        )
        self._data = aiohttp.ClientSession(f"http://{self._process.data}")
        async with self._admin.get("/admin/v1/desired") as answer:
            self._document = await answer.json()
        self._asked = {"base", (await self._state())["weight_version"]}
        self._was_keep = False
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._admin.close()
        await self._data.close()

    async def apply(self, operation: Operation) -> None:
        """Do it, and look at what the pod says of itself."""
        match operation:
            case PutDocument() as put:
                await self._put(put)
            case AgentFault("loses its sessions"):
                self.faults += 1
                with suppress(
                    AssertionError, psutil.Error
                ):  # it was killed just now, and is not back yet
                    self._process.child("rollout_pod", "weights").kill()
            case AgentFault():
                self.faults += 1
                await self._put(PutDocument("step-3", path=str(self._versions / "broken")))
            case DuplicateDocument():
                assert await self._send(self._document) == 200
            case StaleDocument(behind):
                if self._document["generation"] >= behind:
                    older = self._document["generation"] - behind
                    assert await self._refused(generation=older) == 409
            case OtherOwner():
                assert await self._refused(owner="somebody") == 409
            case StalePrecondition():
                assert await self._refused(if_match='"gone:0"') == 412
            case StartRequest() | StartOpenAI():
                self._call(operation)
            case DuplicateRequest(n):
                await self._use_again(n)
            case Disconnect(n):
                name, task = self._caller(n)
                if task:
                    task.cancel()
            case CancelOne(n):
                name, task = self._caller(n)
                if task:
                    async with self._data.delete(f"/v1/rollout/requests/{name}") as answer:
                        assert answer.status in (200, 404), await answer.text()
            case Let(turns, seconds):
                await asyncio.sleep(min(LET_S, seconds + turns / 1000))
            case _:
                raise ValueError(f"not against a real pod: {operation}")
        await self._look()

    async def settle(self, put: PutDocument) -> None:
        """This comes true, every caller has its answer, and nothing is left."""
        await self._put(put)
        async with asyncio.timeout(SETTLE_S):
            while (state := await self._state())["phase"] != "Serving" or state[
                "weight_version"
            ] != put.version:
                await asyncio.sleep(0.05)
            tasks = [task for _, task in self._callers]
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            while (await self._state())["unfinished"]:
                await asyncio.sleep(0.05)
        wrong = [e for e in ends if e and not isinstance(e, asyncio.CancelledError)]
        if self.faults:  # an agent that dies in a transfer leaves nothing to serve until the next
            wrong = [e for e in wrong if NOT_READY not in str(e)]
        assert not wrong, wrong
        self._callers.clear()

    async def _look(self) -> None:
        state = await self._state()
        assert state["weight_version"] in {*self._asked, None}, state
        assert state["phase"] not in ("Failed", "Draining"), state
        if state["phase"] == "Serving":
            assert state["gate"] == "open" and state["ready"] and state["weight_version"], state
        if state["phase"] == "Paused" and self._document["interruption"]["mode"] == "abort":
            kept = state["generation"] != self._document["generation"]
            assert kept or not state["unfinished"] or self._was_keep, state

    async def _state(self) -> dict[str, Any]:
        async with self._admin.get("/admin/v1/state") as answer:
            state: dict[str, Any] = await answer.json()
        return state

    async def _put(self, put: PutDocument) -> None:
        path = put.path if put.path and "/moved" not in put.path else None
        # asleep at level 2 it has no version, and its callers get errors by rule
        more = {"sleep": put.more["sleep"] | {"level": 1}} if "sleep" in put.more else {}
        path = path or str(self._versions / put.version)
        put = replace(put, path=path, pushed=False, fallback="base", more=more)
        document = put.document(self._document["generation"] + 1).model_dump(mode="json")
        self._was_keep = self._document["interruption"]["mode"] == "keep"
        self._document = document | {"owner": LOCAL_OWNER, "bucket_bytes": 65536}
        self._asked.add(put.version)
        self.documents += 1
        assert await self._send(self._document) == 200

    async def _refused(self, *, if_match: str | None = None, **changes: Any) -> int:
        other = self._document | {"paused": not self._document["paused"]} | changes
        return await self._send(other, if_match)

    async def _send(self, document: dict[str, Any], if_match: str | None = None) -> int:
        headers = {"If-Match": if_match} if if_match else {}
        async with self._admin.put("/admin/v1/desired", json=document, headers=headers) as answer:
            return answer.status

    def _call(self, operation: StartRequest | StartOpenAI) -> None:
        number = next(self._ids)
        name, prompt = f"attack-{number}", [3 + number % 8, 5, 7, 11]
        work = (
            self.load.openai(self._data, prompt, operation.tokens, streams=bool(number % 2))
            if isinstance(operation, StartOpenAI)
            else self._native(name, prompt, operation)
        )
        self._callers.append((name, asyncio.create_task(work)))

    async def _native(self, name: str, prompt: list[int], operation: StartRequest) -> None:
        body = {
            "request_id": name, "prompt_token_ids": prompt, "generated_token_ids": [],
            "sampling_params": {"temperature": 0, "ignore_eos": True, "max_tokens": operation.tokens},
            "stream": operation.stream, "on_pause": "wait" if operation.waits else "return",
        }  # fmt: skip
        tokens, end = await self.load.native(self._data, body, None, "stream")
        assert end is not None
        assert end["is_cancel"] or len(tokens) == operation.tokens, end

    async def _use_again(self, n: int) -> None:
        name, task = self._caller(n)
        if task is None:
            return
        body = {"request_id": name, "prompt_token_ids": [3], "sampling_params": {"max_tokens": 1}}
        async with self._data.post("/v1/rollout/generate", json=body) as answer:
            # it may have ended meanwhile, or still be on its way
            assert answer.status in (200, 409), await answer.text()

    def _caller(self, n: int) -> tuple[str, asyncio.Task[None] | None]:
        alive = [c for c in self._callers if not c[1].done()]
        return alive[-1 - n] if n < len(alive) else ("", None)

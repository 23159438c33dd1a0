"""The callers of a soak: all routes, and all ways to leave; what came back is kept and checked."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from tests.support.engine_kit import reference

_TIE = 1e-4
"""Two logits so near are one to engines that add up in another order; other weights are far off."""
KINDS = ("whole", "stream", "openai", "openai stream", "leaves", "deleted")
MAX_TOKENS = 160
ROLLOUT_S = 120.0


@dataclass(frozen=True)
class Piece:
    """Tokens that one version sampled after ``history``."""

    version: str
    history: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass
class Load:
    """Callers at ``url``; ``versions`` holds the checkpoints that their answers may name."""

    url: str
    versions: Path
    requests: int = 0
    continued: int = 0
    left: int = 0
    tokens: int = 0
    checked: int = 0
    lost: int = 0
    """Tokens that the pod says it gave, and that did not come."""
    mixed: int = 0
    """Tokens that are not the greedy ones of their span's version."""
    wrong: list[str] = field(default_factory=list)
    _pieces: set[Piece] = field(default_factory=set)
    _stopped: bool = False
    _serial: "itertools.count[int]" = field(default_factory=itertools.count)

    def stop(self) -> None:
        """Begin no more rollouts."""
        self._stopped = True

    async def run(self, callers: int, *, seconds: float | None) -> None:
        """Let callers come until ``stop`` or for ``seconds``; returns when each has its answer."""
        end = None if seconds is None else time.monotonic() + seconds
        timeout = aiohttp.ClientTimeout(total=ROLLOUT_S)
        async with aiohttp.ClientSession(self.url, timeout=timeout) as http:

            async def caller(number: int) -> None:
                dice = random.Random(number)
                while not self._stopped and (end is None or time.monotonic() < end):
                    kind = dice.choice(KINDS)
                    try:
                        await self._rollout(http, kind, dice)
                    except (aiohttp.ClientError, TimeoutError, AssertionError) as error:
                        self.wrong.append(f"{kind}: {type(error).__name__}: {error}")

            await asyncio.gather(*(caller(number) for number in range(callers)))

    async def _rollout(self, http: aiohttp.ClientSession, kind: str, dice: random.Random) -> None:
        # few prompts, so that most of what is to be checked is alike
        prompt = [3 + dice.randrange(8), 5, 7, 11]
        budget = dice.choice((8, 40, MAX_TOKENS))
        if kind.startswith("openai"):
            await self.openai(http, prompt, budget, streams=kind.endswith("stream"))
            return
        tokens: list[int] = []
        while len(tokens) < budget:
            name = f"soak-{next(self._serial)}"
            body = {
                "request_id": name, "prompt_token_ids": prompt, "generated_token_ids": tokens,
                "sampling_params": {"temperature": 0, "ignore_eos": True, "max_tokens": budget},
                "stream": kind != "whole", "on_pause": dice.choice(("wait", "return")),
            }  # fmt: skip
            self.requests += 1
            stops_after = dice.randrange(1, 20) if kind in ("leaves", "deleted") else None
            came, end = await self.native(http, body, stops_after, kind)
            tokens += came
            if end is None or end["cancel_reason"] == "cancelled":
                self.left += 1
                return
            if not end["is_cancel"]:
                assert end["finish_reason"] == "length", end
                assert len(tokens) == budget, f"{len(tokens)} of {budget} tokens"
                return
            self.continued += 1
            await asyncio.sleep(0.02 if not came else 0)  # refused: the gate is closed

    async def native(
        self, http: aiohttp.ClientSession, body: dict[str, Any], stops_after: int | None, kind: str
    ) -> tuple[list[int], dict[str, Any] | None]:
        """What came, and how it ended; None where this caller left."""
        before = (*body["prompt_token_ids"], *body["generated_token_ids"])
        async with http.post("/v1/rollout/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            if not body["stream"]:
                end = await answer.json()
                self._took(before, end["token_ids"], end["weight_versions"])
                return end["token_ids"], end
            tokens: list[int] = []
            async for name, data in _events(answer):
                if name != "delta":
                    assert name == "end", data
                    self.lost += data["num_tokens"] - len(tokens)
                    return tokens, data
                span = {"version": data["version"], "start": 0, "end": len(data["token_ids"])}
                self._took((*before, *tokens), data["token_ids"], [span])
                tokens += data["token_ids"]
                if stops_after is not None and len(tokens) >= stops_after:
                    if kind == "leaves":
                        return tokens, None
                    stops_after = None
                    async with http.delete(f"/v1/rollout/requests/{body['request_id']}") as gone:
                        assert gone.status in (200, 404), await gone.text()
            raise AssertionError("a stream without an end")

    async def openai(
        self, http: aiohttp.ClientSession, prompt: list[int], budget: int, *, streams: bool
    ) -> None:
        body = {
            "prompt": prompt, "max_tokens": budget, "temperature": 0,
            "ignore_eos": True, "stream": streams, "return_token_ids": True,
        }  # fmt: skip
        self.requests += 1
        tokens: list[int] = []
        spans: list[dict[str, Any]] = []
        async with http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            if streams:
                async for _, data in _events(answer):
                    assert "error" not in data, data
                    for choice in data["choices"]:
                        tokens += choice["token_ids"] or ()
                    spans += data.get("weight_versions", ())
            else:
                data = await answer.json()
                tokens, spans = data["choices"][0]["token_ids"], data["weight_versions"]
        self.lost += max(0, budget - len(tokens))
        self._took(tuple(prompt), tokens, spans)

    def _took(
        self, before: tuple[int, ...], tokens: Sequence[int], spans: Sequence[dict[str, Any]]
    ) -> None:
        self.tokens += len(tokens)
        covered = 0
        for span in spans:
            assert span["start"] == covered, f"a gap in {spans}"
            covered = span["end"]
            piece = tuple(tokens[span["start"] : covered])
            history = (*before, *tokens[: span["start"]])
            self._pieces.add(Piece(span["version"], history, piece))
        self.lost += max(0, covered - len(tokens))
        assert covered == len(tokens), f"{covered} of {len(tokens)} tokens have a version"

    def check(self) -> None:
        """Compare all tokens with transformers' greedy ones. Takes a while."""
        known: set[tuple[str, tuple[int, ...]]] = set()
        for piece in sorted(self._pieces, key=lambda p: -len(p.history) - len(p.tokens)):
            whole = (*piece.history, *piece.tokens)
            at = range(len(piece.history), len(whole))
            if all((piece.version, whole[: n + 1]) in known for n in at):
                continue
            logits = reference(self.versions / piece.version).logits(
                list(piece.history), piece.tokens
            )
            taken = logits.gather(1, torch.tensor(piece.tokens)[:, None])[:, 0]
            good = (logits.max(-1).values - taken <= _TIE).tolist()
            self.mixed += good.count(False)
            self.checked += len(good)
            known.update(
                (piece.version, whole[: n + 1]) for n, ok in zip(at, good, strict=True) if ok
            )


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    name = ""
    async for line in answer.content:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: {"):
            yield name, json.loads(line[6:])
